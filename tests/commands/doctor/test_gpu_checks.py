"""Tests the doctor's findings about GPUs, with a stub of nvidia-smi."""

import os

import pytest

from hybrid_imagenet.commands.doctor import probe
from hybrid_imagenet.commands.doctor.diagnosis import FAIL, PASS, WARN, JobRequirements
from tests.commands.doctor.healthy import findings_after

ROWS = {
    "V100": "Tesla V100-SXM2-16GB, 535.1.5, 7.0, 16160",
    "P40": "Tesla P40, 535.1.5, 6.1, 23040",
    "B200": "NVIDIA B200, 570.8.1, 10.0, 183359",
}


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Returns a function that puts an nvidia-smi on the path that answers with some GPUs."""

    def write(*names: str) -> None:
        table = [
            dict(zip(probe.GPU_FIELDS, f"{i}, GPU-{i}abc, {ROWS[n]}".split(", "), strict=True))
            for i, n in enumerate(names)
        ]
        (tmp_path / "nvidia-smi").write_text(
            f"#!{os.sys.executable}\nimport sys\nrows = {table!r}\n"
            "fields = sys.argv[1].partition('=')[2].split(',')\n"
            "print('\\n'.join(', '.join(row.get(f, '') for f in fields) for row in rows))\n"
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


def test_collect_facts_reads_the_visible_gpus(tmp_path, nvidia_smi, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    nvidia_smi("V100", "P40")
    facts = probe.collect_facts({}, tmp_path)
    assert [(g["compute_cap"], g["index"]) for g in facts["gpus"]] == [("7.0", "0"), ("6.1", "1")]
    for visible_devices, indices in (
        ("1", ["1"]),
        ("GPU-1a,0", ["0", "1"]),
        ("", []),
        ("MIG-GPU-7", ["0", "1"]),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible_devices)
        assert [g["index"] for g in probe.collect_facts({}, tmp_path)["gpus"]] == indices
    assert facts["build"]["is_cuda_build"] is False, "the tests run with TensorFlow for CPUs"


@pytest.mark.parametrize(
    ("name", "cudnn", "level", "text"),
    [
        ("V100", "9.10.2.21", PASS, "compute capability 7.0"),
        (
            "P40",
            "9.28.0.33",
            FAIL,
            "b: GPU 0 (Tesla P40): compute capability 6.1 is not supported by cuDNN 9.28",
        ),
        (
            "B200",
            "9.28.0.33",
            FAIL,
            "b: GPU 0 (NVIDIA B200): compute capability 10.0 has no kernels",
        ),
    ],
)
def test_diagnose_compares_gpus_with_the_kernels_of_tensorflow_and_cudnn(
    nvidia_smi, tmp_path, name, cudnn, level, text
):
    nvidia_smi(name, name)

    def change(facts):
        facts["gpus"] = probe.collect_facts({}, tmp_path)["gpus"]
        facts["versions"]["nvidia-cudnn-cu12"] = cudnn

    finding = findings_after(change)["GPU kernels"]
    assert finding.level == level
    assert text in finding.message


def test_diagnose_without_gpus_warns_if_tensorflow_is_built_for_gpus():
    requirements = JobRequirements({"a": 2, "b": 2}, "eth0", "/data", gpus=False)
    finding = findings_after(lambda facts: facts.update(gpus=[]), requirements)["GPUs"]
    assert (finding.level, finding.message) == (
        WARN,
        "a: TensorFlow is built for GPUs; b: TensorFlow is built for GPUs",
    )
    for_cpus = findings_after(
        lambda facts: facts.update(gpus=[], build={"is_cuda_build": False}), requirements, "ab"
    )
    assert for_cpus["GPUs"].level == PASS
