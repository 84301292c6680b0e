"""Tests of `bench gpu` with simulated measurements."""

import json

import pytest

from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import gpu
from hybrid_imagenet.commands.doctor import probe
from hybrid_imagenet.commands.doctor.diagnosis import FAIL, PASS, WARN, Finding
from hybrid_imagenet.errors import UserError

A100 = dict(
    zip(
        probe.GPU_FIELDS,
        ("0", "GPU-1", "NVIDIA A100-SXM4-40GB", "535.1.5", "8.0", "40960"),
        strict=True,
    )
)
GOOD = [
    Finding(PASS, "GPUs", "one for each rank"),
    Finding(PASS, "NCCL inside a", "they summed a vector"),
]


def row(ranks, hosts, step, compute, **more):
    """Returns the row that a job prints; times are in milliseconds."""
    return {
        "ranks": ranks,
        "hosts": hosts,
        "model": "resnet50",
        "precision": "mixed_float16",
        "image_size": 224,
        "batch_per_rank": 256,
        "step_seconds": step / 1e3,
        "compute_seconds": compute / 1e3,
        "exposed_seconds": (step - compute) / 1e3,
        "images_per_second": ranks * 256e3 / step,
        "gpu": A100["name"],
        **more,
    }


@pytest.fixture
def climb(monkeypatch):
    def climb(rows, findings=GOOD, gpus=8, hosts="a", words=(), name=A100["name"]):
        """Runs the benchmark with these rows by number of ranks.

        Returns the report, its lines and the jobs that were started.
        """
        jobs = []

        def measure(ranks, where, flags, options):
            jobs.append((ranks, where))
            if isinstance(rows[ranks], BaseException):
                raise rows[ranks]
            return rows[ranks]

        facts = {
            word.partition(":")[0]: {"gpus": [A100 | {"name": name}] * gpus}
            for word in hosts.split(",")
        }
        monkeypatch.setattr(gpu.doctor, "check_hosts", lambda options: (facts, findings))
        monkeypatch.setattr(gpu, "measure", measure)
        report = gpu.climb(gpu._parse(["-H", hosts, *words]), [])
        return report, "\n".join(gpu.report_lines(report)), jobs

    return climb


def test_climb_on_a_good_machine_measures_all_rungs(climb):
    rows = {1: row(1, 1, 108, 108), 8: row(8, 1, 111, 109), 16: row(16, 2, 112, 109)}
    report, text, jobs = climb(rows, hosts="a:8,b:8")
    assert jobs == [(1, "a:1"), (8, "a:8"), (16, "a:8,b:8")]
    assert (report["error"], report["notes"]) == ("", [])
    (alone,) = [speed for speed in published.speeds("a100", "fp16") if speed.gpus == 1]
    assert f"published: 2,375 images/s ({alone.source})" in text
    assert "the speed is as expected" in text
    assert "cluster      16    112.0         3.0   36,571.4            96.4 %" in text
    json.dumps(report)


def test_climb_on_a_slow_machine_prints_the_causes(climb):
    findings = [*GOOD[:1], Finding(WARN, "NCCL", "an old version", "update it")]
    report, text, _ = climb({1: row(1, 1, 152, 152), 8: row(8, 1, 200, 170)}, findings)
    one, shared, exposed = report["notes"]
    assert one.startswith("one GPU has 71 % of the published speed. ") and "--profile_steps" in one
    assert shared.startswith("one host: 18.0 ms lost before any communication")
    assert exposed.startswith("one host: 30.0 ms of communication") and exposed.endswith(
        "-> update it"
    )
    assert "as expected" not in text


def test_climb_after_a_failure_keeps_earlier_rungs(climb):
    report, _, jobs = climb({1: row(1, 1, 108, 108), 8: UserError("the job of 8 ranks failed")})
    assert (report["error"], len(jobs), list(report["rungs"])) == (
        "the job of 8 ranks failed",
        2,
        ["one GPU"],
    )


def test_climb_after_an_interrupt_keeps_earlier_rungs(climb):
    report, _, _ = climb({1: row(1, 1, 108, 108), 8: KeyboardInterrupt()})
    assert (report["error"], list(report["rungs"])) == ("interrupted", ["one GPU"])


def test_climb_without_a_gpu_is_an_error_or_uses_the_cpu(climb):
    report, _, jobs = climb({}, gpus=0)
    assert report["error"].startswith("no host has a GPU")
    assert jobs == []
    cpu = {1: row(1, 1, 900, 900, gpu=None), 2: row(2, 1, 1500, 1400, gpu=None)}
    report, text, jobs = climb(cpu, gpus=0, words=["--allow_cpu"])
    assert jobs == [(1, "a:1"), (2, "a:2")]
    assert (report["error"], report["expected"]) == ("", None)
    assert "batch 256 per rank, CPU" in text


def test_climb_with_an_unsupported_precision_is_an_error(climb):
    report, _, _ = climb({1: row(1, 1, 108, 108, precision="mixed_bfloat16")}, name="Tesla V100")
    assert "V100 SXM2 does not support BF16" in report["error"]


def test_climb_compares_with_published_speeds_and_not_with_earlier_ones_of_this_program(climb):
    report, text, _ = climb({1: row(1, 1, 58.4, 58.4)}, gpus=1, name="NVIDIA H100 80GB HBM3")
    assert report["expected"] == pytest.approx(7162, abs=1)
    assert report["notes"]
    assert "this program before: 5,707 at batch 256" in text


def test_climb_on_a_p40_uses_fp32_and_the_batch_of_the_paper(climb):
    p40 = row(1, 1, 128e3 / 295, 128e3 / 295, precision="float32", batch_per_rank=128)
    report, _, _ = climb({1: p40 | {"images_per_second": 295.0}}, gpus=1, name="Tesla P40")
    assert report["flags"][:3] == [
        "--dataset=synthetic_tensors",
        "--per_gpu_batch=128",
        "--precision=float32",
    ]
    assert (report["expected"], report["expected_from"], report["notes"]) == (
        295,
        "Lu et al., section 3.2.2",
        [],
    )


def test_main_writes_a_report_and_returns_the_exit_code_of_its_error(tmp_path, monkeypatch, capsys):
    facts = {"localhost": {"gpus": []}}
    monkeypatch.setattr(
        gpu.doctor,
        "check_hosts",
        lambda options: (facts, [Finding(FAIL, "NCCL", "absent", "build it")]),
    )
    assert gpu.main([f"--out={tmp_path}/new/report"]) == 2
    out, err = capsys.readouterr()
    assert "FAIL  NCCL: absent -> build it" in out
    assert err.startswith("error: no host has a GPU") and err.count("\n") == 1
    report = json.loads((tmp_path / "new/report/report.json").read_text())
    assert report["findings"][0]["check"] == "NCCL"
    good = {"rungs": {"one GPU": 1}}
    (tmp_path / "new/report/report.json").write_text(json.dumps(good))
    assert gpu.main([f"--out={tmp_path}/new/report", "--", "--no_such=1"]) == 2
    assert json.loads((tmp_path / "new/report/report.json").read_text()) == good
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out=.*cannot be written"):
        gpu.main([f"--out={tmp_path}/file/x", "--", "--no_such=1"])
