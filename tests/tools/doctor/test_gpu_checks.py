"""What the doctor says about GPUs, from facts and from made-up trees of /sys and answers of nvidia-smi."""

import os

import pytest

from hybrid_imagenet.tools.doctor import probe
from hybrid_imagenet.tools.doctor.checks import FAIL, PASS, WARN, Request
from tests.tools.doctor.healthy import GPU, judged

ROWS = {
    "V100": "Tesla V100-SXM2-16GB, 16384, 535.1.5, 0, 0x0000000000000001, 7.0",
    "P40": "Tesla P40, 23040, 535.1.5, 0, 0x0000000000000000, 6.1",
    "B200": "NVIDIA B200, 183359, 570.8.1, 0, 0x0000000000000000, 10.0",
}


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts an nvidia-smi on the path that answers a query with some GPUs."""

    def write(*names: str) -> None:
        table = [dict(zip(probe.GPU_FIELDS, f"{i}, {ROWS[n]}".split(", "), strict=True)) for i, n in enumerate(names)]
        (tmp_path / "nvidia-smi").write_text(
            f"#!{os.sys.executable}\nimport sys\nrows = {table!r}\n"
            "fields = sys.argv[1].partition('=')[2].split(',')\n"
            "print('\\n'.join(', '.join(row.get(f, '') for f in fields) for row in rows))\n"
        )
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return write


def tree(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_the_probe_reads_gpus_with_their_capability(tmp_path, nvidia_smi):
    nvidia_smi("V100", "P40")
    device = "sys/bus/pci/devices/0000"
    files = {f"{device}:{bus}:00.0/vendor": "0x10de\n" for bus in ("1a", "86", "87", "90")}
    files |= {f"{device}:{bus}:00.0/class": "0x030200\n" for bus in ("1a", "86", "87")}
    files |= {f"{device}:90:00.0/class": "0x068000\n"}  # a switch of NVLink is no GPU
    files |= {"dev/infiniband/uverbs0": "", "sys/bus/pci/drivers/efa/bind": ""}
    tree(tmp_path, files)
    (tmp_path / "sys/class/infiniband/rdmap0/device").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/rdmap0/device/driver").symlink_to(tmp_path / "sys/bus/pci/drivers/efa")
    facts = probe.facts({}, tmp_path)
    assert [(g["compute_cap"], g["index"]) for g in facts["gpus"]] == [("7.0", "0"), ("6.1", "1")]
    assert facts["gpu_bus"] == ["0000:1a:00.0", "0000:86:00.0", "0000:87:00.0"]
    assert (facts["verbs"]["devices"], facts["verbs"]["efa"]) == (True, True)
    assert facts["build"]["is_cuda_build"] is False, "the tests run with TensorFlow for CPUs"


def with_gpus(nvidia_smi, tmp_path, name):
    """Judges two hosts of which the second has two GPUs of a kind, as the probe reads them."""
    nvidia_smi(name, name)
    gpus = probe.facts({}, tmp_path)["gpus"]
    return lambda facts: facts.update(gpus=gpus)


@pytest.mark.parametrize(
    ("name", "cudnn", "level", "text"),
    [
        ("V100", "9.10.2.21", PASS, "compute capability 7.0"),
        ("P40", "9.28.0.33", FAIL, "b: GPU 0 (Tesla P40): compute capability 6.1 is not supported by cuDNN 9.28"),
        ("B200", "9.28.0.33", FAIL, "b: GPU 0 (NVIDIA B200): compute capability 10.0 has no kernels"),
    ],
)  # fmt: skip
def test_gpus_are_held_against_the_kernels_of_tensorflow_and_cudnn(nvidia_smi, tmp_path, name, cudnn, level, text):
    def change(facts):
        with_gpus(nvidia_smi, tmp_path, name)(facts)
        facts["versions"]["nvidia-cudnn-cu12"] = cudnn

    finding = judged(change)["GPU kernels"]
    assert finding.level == level
    assert text in finding.message


VERBS = {"devices": True, "library": True, "efa": False, "plugin": True}


@pytest.mark.parametrize(
    ("change", "check", "level", "text"),
    [
        ({"build": {"is_cuda_build": False}}, "GPU kernels", FAIL, "b: this TensorFlow is built for the CPU"),
        ({"gpus": [GPU | {"driver_version": "470.8"}] * 2}, "driver and CUDA", FAIL, "470.8 is too old for CUDA 12"),
        ({"verbs": VERBS | {"devices": False}}, "RDMA libraries", WARN, "b: its RDMA adapters have no"),
        ({"verbs": VERBS | {"library": False}}, "RDMA libraries", WARN, "but no libibverbs"),
        ({"verbs": VERBS | {"efa": True, "plugin": False}}, "RDMA libraries", WARN, "EFA adapters need libnccl-net.so"),
    ],
)  # fmt: skip
def test_one_wrong_fact_about_gpus_gives_one_finding(change, check, level, text):
    before, after = judged(), judged(lambda facts: facts.update(change))
    assert before[check].level == PASS
    assert (after[check].level, text in after[check].message) == (level, True), after[check]
    assert after[check].remedy
    worse = {name for name, finding in after.items() if finding.level != PASS}
    assert worse <= {check, "GPU driver"}, "a driver that is too old also differs from the other host's"


def test_without_gpus_there_is_one_line_and_one_more_if_the_bus_has_some():
    request = Request({"a": 2, "b": 2}, "eth0", "/data", gpus=False)

    def change(facts):
        facts.update(gpus=[], gpu_bus=[])

    findings = judged(change, request)
    assert (findings["GPUs"].level, "GPUs in sight" in findings) == (PASS, False)
    found = judged(lambda facts: facts.update(gpus=[], gpu_bus=["0000:1a:00.0"]), request)["GPUs in sight"]
    assert found.level == WARN
    assert "b: 1 on the PCI bus, 0 in nvidia-smi" in found.message
