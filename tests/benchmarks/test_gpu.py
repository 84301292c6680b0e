"""The ladder of the first run on GPUs, climbed on made measurements and profiles."""

import dataclasses
import json
import os
import sys

import pytest

from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import _gpu_jobs, _gpu_rank, _gpu_report, gpu
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.doctor.findings import FAIL, PASS, WARN, Finding
from tests.comm.test_nccl_log import BETWEEN
from tests.runlog.test_kernels import CONV, NCHW, NHWC, recorded

A100 = {"name": "NVIDIA A100-SXM4-40GB", "memory.total": "40960", "index": "0"}
GOOD = [Finding(PASS, "GPUs", "one for each rank"), Finding(PASS, "NCCL inside a", "P2P")]


def row(ranks, hosts, step, compute, events, **more):
    """What a job prints: milliseconds, and the events of its profile."""
    profile = recorded(*events, steps=((0, 109),)) if events else None
    return {
        "ranks": ranks, "hosts": hosts, "model": "resnet50", "precision": "mixed_float16", "image_size": 224,
        "batch_per_rank": 256, "step_seconds": step / 1e3, "compute_seconds": compute / 1e3,
        "exposed_seconds": (step - compute) / 1e3, "images_per_second": ranks * 256e3 / step, "gpu": A100["name"],
        "profile": profile and dataclasses.asdict(profile), "slowed": "", "described": {"host": "a"},
        **({"transport": "NCCL 2.21, channels by P2P/CUMEM"} if ranks > 1 else {}), **more,
    }  # fmt: skip


def fast(layout=NHWC):
    operation = "bn:FusedBatchNormV3"
    return [("Stream #1", CONV, 0, 60, "c:Conv2D"), ("Stream #1", layout, 60, 108, operation)]


def slow():
    moved = ("Stream #1", "nchwToNhwcKernel", 35, 79, "bn:FusedBatchNormV3")
    return [("Stream #1", CONV, 0, 35, "c:Conv2D"), moved, ("Stream #1", NCHW, 79, 108, "bn:FusedBatchNormV3")]


def climb(rows, findings=GOOD, gpus=8, hosts="a", flags=(), rate=30_000.0, words=(), fused=None):
    """Climbs with results by number of ranks; returns the report and the jobs that were started.

    `fused` is the result with --fuse_relu_gradients, by default that without; its job is not among those returned.
    """
    asked = []

    def measure(ranks, where, profiled, given):
        tried = "--fuse_relu_gradients" in given
        found = fused if tried and fused else rows[ranks]
        if not tried:
            asked.append((ranks, where, profiled > 0))
        if isinstance(found, Exception):
            raise found
        return found

    facts = {word.partition(":")[0]: {"gpus": [A100] * gpus} for word in hosts.split(",")}
    tools = gpu.Tools(lambda arguments: (facts, findings), measure, lambda given: rate)
    options = gpu._parse(["-H", hosts, *words])
    return gpu.climb(options, flags, tools, lambda line: None), asked


def test_a_good_machine_is_climbed_to_the_top_without_a_cause():
    rows = {1: row(1, 1, 108, 108, fast()), 8: row(8, 1, 111, 109, ()), 16: row(16, 2, 112, 109, ())}
    report, asked = climb(rows, hosts="a:8,b:8")
    assert asked == [(1, "a:1", True), (8, "a:8", False), (16, "a:8,b:8", False)]
    assert (report["error"], report["causes"], report["gpu"]) == ("", [], "a100")
    (alone,) = [speed for speed in published.speeds("a100", "fp16") if speed.gpus == 1]
    assert (report["expected"], report["expected_from"]) == (2375, alone.source)
    assert report["limit"] == pytest.approx(3656, abs=1)
    line = _gpu_report.summary(report).splitlines()[1]
    assert line == f"published: 2,375 ({alone.source}); limit of the memory: 3,656"
    assert "as expected" in _gpu_report.summary(report)
    text = _gpu_report.markdown(report)
    assert "| cluster | 16 | 112.00 | 109.00 | 3.00 |" in text
    assert "| normalization | 48.00 | 44.0 % |" in text
    assert "normalization in NHWC" in text and CONV[:60] in text
    assert "DeepLearningExamples, TensorFlow 1" in text
    json.dumps(report)


@pytest.mark.parametrize(
    ("second", "line"),
    [
        (row(1, 1, 96, 96, ()), "with --fuse_relu_gradients 2,666.7 images/s: 1.125 times as fast"),
        (UserError("CUDNN_STATUS_BAD_PARAM"), "--fuse_relu_gradients does not run on this GPU: CUDNN_STATUS_BAD_PARAM"),
    ],
)
def test_fused_gradients_are_tried_beside_the_step_in_fp16(second, line):
    report, _ = climb({1: row(1, 1, 108, 108, fast())}, hosts="a:1", fused=second)
    assert line in _gpu_report.summary(report).splitlines()
    assert line in _gpu_report.markdown(report)


def test_the_first_cause_of_a_slow_gpu_is_in_the_report():
    report, _ = climb({1: row(1, 1, 152, 152, slow()), 8: row(8, 1, 160, 153, ())})
    assert "normalization runs in NCHW: 44.0 ms of transpositions" in report["causes"][0]["what"]
    assert "first cause: normalization runs in NCHW" in _gpu_report.summary(report)
    assert "1. normalization runs in NCHW" in _gpu_report.markdown(report)


def test_what_the_doctor_finds_about_nccl_is_the_remedy_of_exposed_communication():
    findings = [*GOOD[:1], Finding(WARN, "NCCL inside a", "SHM", "look at ACS and IOMMU")]
    report, _ = climb({1: row(1, 1, 108, 108, fast()), 8: row(8, 1, 150, 109, ())}, findings)
    assert report["causes"][0]["remedy"] == "look at ACS and IOMMU"


def test_a_rung_that_fails_ends_the_ladder_and_keeps_what_was_found():
    report, asked = climb({1: row(1, 1, 108, 108, fast()), 8: UserError("the job of 8 ranks failed")})
    assert (report["error"], len(asked), list(report["rungs"])) == ("the job of 8 ranks failed", 2, ["one GPU"])
    assert "**Ended early:** the job of 8 ranks failed" in _gpu_report.markdown(report)


def test_without_a_gpu_one_line_says_so_or_the_cpu_takes_its_place():
    report, asked = climb({}, gpus=0)
    assert report["error"].startswith("no host has a GPU")
    assert asked == []
    cpu = {1: row(1, 1, 900, 900, (), gpu=None), 2: row(2, 1, 1500, 1400, (), gpu=None)}
    report, asked = climb(cpu, gpus=0, words=["--allow_cpu"])
    assert [a[:2] for a in asked] == [(1, "a:1"), (2, "a:2")]
    assert (report["error"], report["expected"], report["causes"]) == ("", None, [])
    assert "on one CPU" in _gpu_report.summary(report)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"hosts": "a:2", "flags": ["--no_such=1"]}, "no_such"),
        ({"hosts": "a:2", "rows": {1: row(1, 1, 108, 108, fast(), precision="mixed_bfloat16")}, "gpu": "Tesla V100"},
         "V100 SXM2 has no BF16"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(kwargs, message, monkeypatch):
    monkeypatch.setitem(A100, "name", kwargs.pop("gpu", A100["name"]))
    report, _ = climb(kwargs.pop("rows", {}), **kwargs)
    assert message in report["error"]
    assert "\n" not in report["error"]


def test_an_h100_is_judged_by_its_published_peer_and_not_by_what_this_program_reached_before(monkeypatch):
    monkeypatch.setitem(A100, "name", "NVIDIA H100 80GB HBM3")
    report, _ = climb({1: row(1, 1, 58.4, 58.4, fast())}, gpus=1)
    assert report["expected"] == pytest.approx(7162, abs=1)
    assert report["causes"]
    line = _gpu_report.summary(report).splitlines()[1]
    assert "this program before: 4,387 at batch 256, 5,105 at batch 512" in line
    assert line.endswith("limit of the memory: 7,876")


def test_a_p40_computes_in_fp32_with_the_papers_batch(monkeypatch):
    monkeypatch.setitem(A100, "name", "Tesla P40")
    p40 = row(1, 1, 128e3 / 295, 128e3 / 295, fast(), precision="float32", batch_per_rank=128)
    report, _ = climb({1: p40 | {"images_per_second": 295.0}}, gpus=1)
    assert report["flags"][:3] == ["--dataset=synthetic_tensors", "--per_gpu_batch=128", "--precision=float32"]
    assert (report["expected"], report["causes"]) == (295, [])
    assert report["expected_from"] == "Lu et al., section 3.2.2"


def test_the_result_of_a_job_is_found_among_the_words_of_launcher_and_nccl():
    said = f'{BETWEEN}[1,0]<stdout>:{_gpu_rank.MARK}{{"ranks": 2}}[1,0]<stdout>:\nbye\n'
    assert _gpu_jobs.result(said) == {"ranks": 2}
    assert _gpu_jobs.reason(f"{BETWEEN}starting\nerror: rank 1: no memory\n") == "error: rank 1: no memory"
    assert _gpu_jobs.reason("") == "it said nothing"


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ("0x0000000000000001\n0x0000000000000004\n", ""),
        ("0x0000000000000001\n0x0000000000000060\n", "heat, heat, by the hardware"),
        ("[N/A]\n0x8\n", "hardware slowdown"),
    ],
)
def test_slow_clocks_are_read_from_the_bits_of_nvidia_smi(samples, text):
    assert _gpu_jobs.slowed(samples) == text


def test_clocks_are_read_while_a_job_runs(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nwhile :; do echo 0x0000000000000040; sleep 0.05; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    options = gpu._parse(["--steps=1"])
    program = "import time; time.sleep(0.5); print('" + _gpu_rank.MARK + '{"ranks": 1}' + "')"
    monkeypatch.setattr(_gpu_jobs, "_job", lambda *arguments: [sys.executable, "-c", program])
    assert _gpu_jobs.measure(1, "localhost:1", 0, [], options) == {"ranks": 1, "slowed": "heat, by the hardware"}
    assert "NCCL said nothing" in _gpu_jobs.measure(2, "localhost:2", 0, [], options)["transport"]
    monkeypatch.setattr(_gpu_jobs, "_job", lambda *arguments: [sys.executable, "-c", "raise SystemExit('error: no')"])
    with pytest.raises(UserError, match=r"the job of 2 ranks failed \(exit code 1\): error: no"):
        _gpu_jobs.measure(2, "localhost:2", 0, [], options)
    options.timeout = 0.1
    monkeypatch.setattr(_gpu_jobs, "_job", lambda *arguments: ["sleep", "60"])
    with pytest.raises(UserError, match=r"more than --timeout=0\.1 s"):
        _gpu_jobs.measure(1, "localhost:1", 0, [], options)


@pytest.mark.slow
def test_ranks_measure_and_profile_themselves(pools):
    flags = ["--dataset=synthetic_tensors", "--model=resnet8", "--model_width=4", "--image_size=8", "--per_gpu_batch=4"]
    words = ["--steps=1", "--rounds=1", "--classes=10", "--profiled=1", "--", *flags]
    first, second = pools[2].call(run_rank, words)
    found = _gpu_jobs.result(first)
    assert (found["ranks"], found["model"], found["profile"], second) == (2, "resnet8", None, "")
    assert found["compute_seconds"] > 0 and found["step_seconds"] > 0


def run_rank(words):
    """The rank of a job, in a rank of the pool: its output."""
    import contextlib
    import io

    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        _gpu_rank.main(words)
    return output.getvalue()


def test_the_command_writes_its_report_and_ends_with_the_code_of_wrong_use(tmp_path, monkeypatch, capsys):
    facts = {"localhost": {"gpus": []}}
    monkeypatch.setattr(gpu.doctor, "examine", lambda options: (facts, [Finding(FAIL, "NCCL", "absent", "build it")]))
    assert gpu.main([f"--out={tmp_path}/made/report"]) == 2
    out, err = capsys.readouterr()
    assert "fail  NCCL: absent -> build it" in out
    assert err.startswith("error: no host has a GPU") and err.count("\n") == 1
    report = json.loads((tmp_path / "made/report/report.json").read_text())
    assert report["findings"][0]["check"] == "NCCL"
    assert "fail  NCCL" in (tmp_path / "made/report/report.md").read_text()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out=.*cannot be written"):
        gpu.main([f"--out={tmp_path}/file/x"])
