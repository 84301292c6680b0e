"""Tests dev/lab.sh, a cluster of namespaces. Most tests need root and tools of the system."""

import csv
import dataclasses
import functools
import io
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.launch import losses
from tests.launch.shell import LAUNCH, ROOT, error_line, run

LAB = ROOT / "dev" / "lab.sh"


@functools.cache
def _obstacle() -> str:
    """Returns why this machine cannot create the namespaces, or "" if it can."""
    if os.getuid() != 0:
        return "needs root"
    if not (shutil.which("sshd") or Path("/usr/sbin/sshd").exists()):
        return "needs openssh-server"
    if not all(map(shutil.which, ("ip", "tc", "unshare", "nsenter", "setpriv"))):
        return "needs iproute2 and util-linux"
    allowed = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True
    )
    return "" if allowed.returncode == 0 else "this machine does not allow namespaces"


namespaces = pytest.mark.skipif(_obstacle() != "", reason=_obstacle() or "allowed")


def test_lab_with_an_invalid_command_line_prints_one_line():
    for arguments, text in (
        ((), "There is no command"),
        (("--hosts=0", "--", "true"), "--hosts '0'"),
        (("--slots=x", "--", "true"), "--slots 'x'"),
        (("--rate=1mbit;x", "--", "true"), "--rate"),
        (("true",), "Write -- before the command"),
    ):
        result = run(LAB, *arguments)
        assert result.returncode == 2
        assert text in error_line(result)


def test_lab_without_its_tools_prints_the_packages_to_install(tmp_path):
    for tool in ("bash", "env", "dirname", "id", "awk"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    result = run(LAB, "--", "true", PATH=str(tmp_path))
    assert result.returncode == 1
    assert ("apt install iproute2" if os.getuid() == 0 else "needs root") in error_line(result)


@namespaces
def test_lab_hosts_have_names_addresses_and_limited_links(tmp_path):
    show = (
        "hostname; ssh lab2 hostname; ssh lab2 ip -o -4 address show eth0; echo $HOSTS $INTERFACE; "
        "tc qdisc show dev eth0; ssh lab2 tc qdisc show dev eth0; exit 3"
    )
    result = run(
        LAB,
        "--hosts=2",
        "--slots=4",
        "--rate=50mbit",
        "--",
        "bash",
        "-c",
        show,
        TMPDIR=str(tmp_path),
    )
    assert result.returncode == 3, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:2] == ["lab1", "lab2"]
    assert "10.99.0.2/24" in lines[2]
    assert lines[3] == "lab1:4,lab2:4 eth0"
    assert len(re.findall(r"tbf .* rate 50Mbit", result.stdout)) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@namespaces
def test_cluster_script_on_two_lab_hosts_sums_over_ranks(tmp_path):
    command = (LAUNCH / "cluster1.sh", "--module=check_ranks")
    result = run(
        LAB, "--hosts=2", "--slots=1", "--rate=1gbit", "--", *command,
        timeout=180, TMPDIR=str(tmp_path), PYTHONPATH=str(LAUNCH),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert {f"rank {rank} of 2: sum 3.0" in result.stdout for rank in range(2)} == {True}


@namespaces
def test_cluster_script_and_doctor_name_an_unknown_interface_and_an_unreachable_host(tmp_path):
    script = (
        f"{LAUNCH}/cluster1.sh --network-interfaces=eth7 --module=check_ranks; echo code $?; "
        f"HOSTS=lab1,10.99.0.9 {LAUNCH}/cluster1.sh --module=check_ranks; echo code $?; "
        "python -m hybrid_imagenet doctor -H lab1:1,lab2:1,10.99.0.9:1 --network_interfaces=eth0 "
        "--run_dir=$TMPDIR --no_ranks; "
        "echo code $?"
    )
    result = run(
        LAB, "--hosts=2", "--slots=1", "--", "bash", "-c", script, timeout=120, TMPDIR=str(tmp_path)
    )
    output = result.stdout + result.stderr
    assert "error: host lab1: There is no network interface eth7. Use one of: eth0 lo" in output
    assert "error: host lab2: There is no network interface eth7" in output
    assert "error: host 10.99.0.9: " in output
    assert re.search(r"FAIL  host 10\.99\.0\.9: ssh failed", output)
    assert "OK    host lab2" in output
    assert "OK    MTU of eth0: 1500" in output
    assert re.findall(r"code (\d)", output) == ["2", "2", "1"]


HERE = Path(__file__).parent
RUN = (
    "python -m hybrid_imagenet run -np 3 -H $HOSTS --network-interfaces eth0 --module"
    " tests.resilience.watched_rank"
)


@namespaces
def test_run_ends_when_a_host_loses_its_network(tmp_path):
    (tmp_path / "job").mkdir()
    result = run(
        LAB,
        "--hosts=3",
        "--slots=1",
        "--rate=1gbit",
        "--",
        HERE / "lost_host.sh",
        timeout=180,
        TMPDIR=str(tmp_path),
        ROOT=str(ROOT),
        FOLDER=str(tmp_path / "job"),
        PYTHONPATH=str(ROOT),
        START=RUN,
    )
    ends_of_job = re.search(r"code 4 after (\d+) s\nleft 0\nleft 0\n", result.stdout)
    assert ends_of_job, result.stdout + result.stderr
    assert int(ends_of_job[1]) <= 4 + 30
    assert "stall: rank 2 on lab3" in result.stdout
    assert "error: rank 2 on lab3 hung for" in result.stdout


def documented_losses():
    """Returns the rows of tests/losses.csv by what was lost."""
    with losses.TABLE.open(newline="", encoding="utf-8") as file:
        return {(row["engine"], row["moment"], row["lost"]): row for row in csv.DictReader(file)}


def test_table_of_losses_has_each_loss_in_order():
    assert list(documented_losses()) == [dataclasses.astuple(loss) for loss in losses.losses()]


@namespaces
@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        ("horovod", losses.START, losses.STOPPED),
        ("horovod", losses.TRAINING, losses.KILLED),
        ("tensorflow", losses.TRAINING, losses.KILLED),
        ("tensorflow", losses.TRAINING, losses.CUT),
    ],
)
def test_training_that_loses_a_rank_or_a_host_ends_as_documented(row, tmp_path):
    command = ("python", "-m", "tests.launch.losses", *row)
    result = run(
        LAB,
        "--hosts=3",
        "--slots=1",
        "--",
        *command,
        timeout=400,
        TMPDIR=str(tmp_path),
        PYTHONPATH=str(ROOT),
    )
    documented = documented_losses()[row]
    (found,) = csv.DictReader(io.StringIO(result.stdout))
    assert found["exit_code"] == documented["exit_code"], result.stdout + result.stderr
    assert found["left"] == "none"
    assert found["stderr"].partition(" ")[0] == documented["stderr"].partition(" ")[0]


@namespaces
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_training_that_loses_ranks_and_hosts_counts_every_example_once(engine, tmp_path):
    result = run(
        LAB,
        "--hosts=3",
        "--slots=1",
        "--rate=1gbit",
        "--",
        "python",
        "-m",
        "tests.launch.changing_hosts",
        "--losses=10",
        "--seed=1",
        f"--engine={engine}",
        timeout=900,
        TMPDIR=str(tmp_path),
        PYTHONPATH=str(ROOT),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("passed\n")
