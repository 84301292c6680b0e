"""The ladder of the first run on GPUs, climbed on made measurements."""

import json

import pytest

from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import gpu
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.doctor import probe
from hybrid_imagenet.tools.doctor.diagnosis import FAIL, PASS, WARN, Finding

A100 = dict(
    zip(
        probe.GPU_FIELDS,
        ("0", "GPU-1", "NVIDIA A100-SXM4-40GB", "535.1.5", "8.0", "40960"),
        strict=True,
    )
)
GOOD = [Finding(PASS, "GPUs", "one for each rank"), Finding(PASS, "NCCL inside a", "P2P")]


def row(ranks, hosts, step, compute, **more):
    """What a job prints, from milliseconds."""
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
        **({"transport": "NCCL 2.21, channels by P2P/CUMEM"} if ranks > 1 else {}),
        **more,
    }


@pytest.fixture
def climb(monkeypatch):
    def climb(rows, findings=GOOD, gpus=8, hosts="a", words=(), name=A100["name"]):
        """Climbs with results by number of ranks; returns the report, its lines and the jobs that
        were started.
        """
        asked = []

        def measure(ranks, where, flags, options):
            asked.append((ranks, where))
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
        return report, "\n".join(gpu._lines(report)), asked

    return climb


def test_a_good_machine_is_climbed_to_the_top(climb):
    rows = {1: row(1, 1, 108, 108), 8: row(8, 1, 111, 109), 16: row(16, 2, 112, 109)}
    report, text, asked = climb(rows, hosts="a:8,b:8")
    assert asked == [(1, "a:1"), (8, "a:8"), (16, "a:8,b:8")]
    assert (report["error"], report["notes"]) == ("", [])
    (alone,) = [speed for speed in published.speeds("a100", "fp16") if speed.gpus == 1]
    assert f"published: 2,375 images/s ({alone.source})" in text
    assert "the speed is as expected" in text
    assert "cluster      16    112.0         3.0   36,571.4            96.4 %" in text
    json.dumps(report)


def test_what_falls_short_is_named(climb):
    findings = [*GOOD[:1], Finding(WARN, "NCCL inside a", "SHM", "look at ACS and IOMMU")]
    report, text, _ = climb({1: row(1, 1, 152, 152), 8: row(8, 1, 200, 170)}, findings)
    one, shared, exposed = report["notes"]
    assert one.startswith("one GPU has 71 % of the published speed: ") and "--profile_steps" in one
    assert shared.startswith("one host: 18.0 ms lost before any communication")
    assert exposed.startswith("one host: 30.0 ms of communication") and exposed.endswith(
        "-> look at ACS and IOMMU"
    )
    assert "as expected" not in text


def test_a_rung_that_fails_ends_the_ladder_and_keeps_what_was_found(climb):
    report, _, asked = climb({1: row(1, 1, 108, 108), 8: UserError("the job of 8 ranks failed")})
    assert (report["error"], len(asked), list(report["rungs"])) == (
        "the job of 8 ranks failed",
        2,
        ["one GPU"],
    )


def test_an_interrupted_ladder_keeps_what_was_found(climb):
    report, _, _ = climb({1: row(1, 1, 108, 108), 8: KeyboardInterrupt()})
    assert (report["error"], list(report["rungs"])) == ("interrupted", ["one GPU"])


def test_without_a_gpu_one_line_says_so_or_the_cpu_takes_its_place(climb):
    report, _, asked = climb({}, gpus=0)
    assert report["error"].startswith("no host has a GPU")
    assert asked == []
    cpu = {1: row(1, 1, 900, 900, gpu=None), 2: row(2, 1, 1500, 1400, gpu=None)}
    report, text, asked = climb(cpu, gpus=0, words=["--allow_cpu"])
    assert asked == [(1, "a:1"), (2, "a:2")]
    assert (report["error"], report["expected"]) == ("", None)
    assert "batch 256 per rank, CPU" in text


def test_a_precision_that_the_gpu_lacks_is_one_line(climb):
    report, _, _ = climb({1: row(1, 1, 108, 108, precision="mixed_bfloat16")}, name="Tesla V100")
    assert "V100 SXM2 has no BF16" in report["error"]


def test_an_h100_is_judged_by_its_published_peer_and_not_by_what_this_program_reached_before(climb):
    report, text, _ = climb({1: row(1, 1, 58.4, 58.4)}, gpus=1, name="NVIDIA H100 80GB HBM3")
    assert report["expected"] == pytest.approx(7162, abs=1)
    assert report["notes"]
    assert "this program before: 5,707 at batch 256" in text


def test_a_p40_computes_in_fp32_with_the_papers_batch(climb):
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


def test_the_command_writes_its_report_and_ends_with_the_code_of_wrong_use(
    tmp_path, monkeypatch, capsys
):
    facts = {"localhost": {"gpus": []}}
    monkeypatch.setattr(
        gpu.doctor,
        "check_hosts",
        lambda options: (facts, [Finding(FAIL, "NCCL", "absent", "build it")]),
    )
    assert gpu.main([f"--out={tmp_path}/made/report"]) == 2
    out, err = capsys.readouterr()
    assert "fail  NCCL: absent -> build it" in out
    assert err.startswith("error: no host has a GPU") and err.count("\n") == 1
    report = json.loads((tmp_path / "made/report/report.json").read_text())
    assert report["findings"][0]["check"] == "NCCL"
    good = {"rungs": {"one GPU": 1}}
    (tmp_path / "made/report/report.json").write_text(json.dumps(good))
    assert gpu.main([f"--out={tmp_path}/made/report", "--", "--no_such=1"]) == 2
    assert json.loads((tmp_path / "made/report/report.json").read_text()) == good
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"--out=.*cannot be written"):
        gpu.main([f"--out={tmp_path}/file/x", "--", "--no_such=1"])
