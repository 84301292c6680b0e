"""Tests the doctor's findings, one wrong fact at a time, on facts of two healthy hosts."""

import subprocess
import sys

import pytest

from hybrid_imagenet.commands.doctor import doctor_command as doctor
from hybrid_imagenet.commands.doctor import host_facts, probe
from hybrid_imagenet.commands.doctor.diagnosis import FAIL, PASS, WARN, Finding, JobRequirements
from tests.commands.doctor.healthy import GPU, HEALTHY, findings_after


def test_diagnose_of_healthy_hosts_passes_every_check():
    findings = findings_after()
    assert len(findings) >= 17
    assert {finding.level for finding in findings.values()} == {PASS}


@pytest.mark.parametrize(
    ("key", "value", "check", "level", "text"),
    [
        ("python", "3.12.1", "version of Python", FAIL, "3.12.1 on b"),
        ("versions", {"horovod": "0.28.1"}, "version of tensorflow", FAIL, "none on b"),
        ("code", "def", "program", FAIL, "def on b"),
        ("unresolved", ["a"], "host names", FAIL, "b: cannot look up a"),
        ("interfaces", {"ens3": {"up": True, "mtu": 1500}}, "interface eth0", FAIL, "b: missing"),
        (
            "interfaces",
            {"eth0": {"up": False, "mtu": 9000}},
            "interface eth0",
            FAIL,
            "b: missing or down",
        ),
        ("interfaces", {"eth0": {"up": True, "mtu": 1500}}, "MTU of eth0", FAIL, "1500 on b"),
        ("rdma", [], "RDMA", FAIL, "b: no active port"),
        ("rdma", [{"active": False, "rate": "40"}], "RDMA", FAIL, "b: no active port"),
        ("gpus", [GPU], "GPUs", FAIL, "b: 1 GPUs for 2 ranks"),
        ("gpus", [GPU | {"name": "P40"}, GPU | {"name": "P40"}], "GPU model", WARN, "P40 on b"),
        ("gpus", [GPU, GPU | {"driver_version": "1"}], "GPU driver", WARN, "1, 580.1 on b"),
        (
            "build",
            {"is_cuda_build": False},
            "GPU kernels",
            FAIL,
            "b: this TensorFlow is built for the CPU",
        ),
        ("nccl", False, "NCCL", FAIL, "b: Horovod was built without NCCL"),
        ("data", {"exists": False}, "dataset", FAIL, "b: no /data"),
        ("data", HEALTHY["data"] | {"digest": "d2"}, "data files", FAIL, "digest d2 on b"),
        ("run_free_gb", 1.0, "space for results", WARN, "b: 1.0 GB"),
        ("shared_memory_gb", 0.06, "shared memory", WARN, "b: 0.06 GB"),
        ("cores", 1, "cores", WARN, "b: 2 ranks on 1 cores"),
        ("cores", 3, "cores that decode", WARN, "b: 3 cores of "),
        ("locked_memory", 1024, "locked memory", WARN, "b: 1024"),
    ],
)
def test_diagnose_of_one_wrong_fact_names_the_host_and_a_remedy(key, value, check, level, text):
    finding = findings_after(lambda facts: facts.update({key: value}))[check]
    assert finding.level == level
    assert text in finding.message
    assert finding.remedy


def test_diagnose_of_a_dataset_in_subdirectories_does_not_compare_it():
    finding = findings_after(lambda facts: facts["data"].update(files=0), changed_hosts="ab")[
        "data files"
    ]
    assert (finding.level, finding.message) == (
        WARN,
        "not compared: /data contains only directories",
    )


def test_diagnose_of_hosts_without_horovod_warns():
    findings = findings_after(
        lambda facts: facts.update(versions={"numpy": "2"}),
        JobRequirements({"a": 2}, gpus=True),
        "a",
    )
    assert findings["Horovod"].level == WARN


def test_diagnose_of_several_common_interfaces_suggests_a_choice():
    def add_interface(facts):
        facts["interfaces"]["ib0"] = {"up": True, "mtu": 2044}

    requirements = JobRequirements({"a": 2, "b": 2}, None, None, gpus=True)
    findings = findings_after(add_interface, requirements)
    assert findings["interface"].level == PASS, "only one is common"
    finding = findings_after(add_interface, requirements, "ab")["interface"]
    assert finding.level == WARN
    assert "--network_interfaces" in finding.remedy


def test_collect_facts_reads_interfaces_and_adapters(tmp_path):
    def write(path, text):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for name, value in (("operstate", "up\n"), ("mtu", "9000\n")):
        write(f"sys/class/net/ens1/{name}", value)
    write("sys/class/net/ens2/operstate", "down\n")
    write("sys/class/net/ens2/mtu", "1500\n")
    write("sys/class/infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    (tmp_path / "dev/shm").mkdir(parents=True)
    facts = probe.collect_facts({}, tmp_path)
    assert facts["interfaces"] == {
        "ens1": {"up": True, "mtu": 9000},
        "ens2": {"up": False, "mtu": 1500},
    }
    assert facts["rdma"] == [{"device": "mlx5_0", "active": True}]
    assert facts["shared_memory_gb"] > 0


def test_collect_facts_returns_a_data_digest_of_names_sizes_and_manifest(tmp_path):
    (tmp_path / "a.tfrecord").write_bytes(b"123")
    first = probe.collect_facts({"data_dir": str(tmp_path)})["data"]
    assert (first["files"], first["bytes"]) == (1, 3)
    (tmp_path / "manifest.json").write_text("{}")
    second = probe.collect_facts({"data_dir": str(tmp_path)})["data"]
    (tmp_path / "manifest.json").write_text("[]")
    third = probe.collect_facts({"data_dir": str(tmp_path)})["data"]
    assert len({d["digest"] for d in (first, second, third)}) == 3
    assert probe.collect_facts({"data_dir": str(tmp_path / "none")})["data"] == {"exists": False}


def test_parse_hosts_accepts_the_form_of_horovodrun():
    assert host_facts.parse_hosts("a:2,b, c.d-e:10", 4) == {"a": 2, "b": 4, "c.d-e": 10}


def test_doctor_on_an_unreachable_host_fails_with_a_remedy(tmp_path):
    words = ["doctor", "-H", "localhost:1,no-such-host.invalid:1", "--no_ranks"]
    command = [sys.executable, "-m", "hybrid_imagenet", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 1
    assert "OK    version of horovod: " in result.stdout
    *_, counts, verdict = result.stdout.splitlines()
    assert counts.endswith(" 2 FAIL")
    assert verdict.startswith("Not ready. Fix first: host no-such-host.invalid: ssh failed")
    assert not list(tmp_path.iterdir()), "nothing is left behind"
    line = next(line for line in result.stdout.splitlines() if line.startswith("FAIL"))
    assert "host no-such-host.invalid: ssh failed" in line
    assert "->" in line


@pytest.mark.parametrize(
    "arguments", [("-H", "a;b"), ("-H", "a,a"), ("--network_interfaces=eth0;x",), ("--bogus",)]
)
def test_doctor_with_a_wrong_command_line_exits_with_2(arguments, capsys):
    assert doctor.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("levels", "verdict"),
    [
        ((PASS,), "Ready to run"),
        ((PASS, WARN), "Ready to run. Look at this first: check 1: found -> fix it"),
        ((WARN, PASS, FAIL, FAIL), "Not ready. Fix first: check 2: found -> fix it"),
    ],
)
def test_format_report_ends_with_ready_or_the_first_thing_to_fix(levels, verdict):
    findings = []
    for number, level in enumerate(levels):
        findings.append(Finding(level, f"check {number}", "found", "fix it"))
    lines = doctor.format_report(findings, use_color=False).splitlines()
    assert [line.split()[0] for line in lines[: len(levels)]] == list(levels)
    counts = f"{levels.count(PASS)} OK, {levels.count(WARN)} WARN, {levels.count(FAIL)} FAIL"
    assert lines[len(levels) :] == [counts, verdict]


def test_format_report_has_color_only_if_requested():
    findings = [Finding(FAIL, "x", "bad", "fix it")]
    assert "\033[31mFAIL" in doctor.format_report(findings, use_color=True)
    assert "\033" not in doctor.format_report(findings, use_color=False)
