"""Tests launch/local.sh and the cluster scripts: commands, host lists, arguments, lost hosts."""

import shlex
import subprocess
from pathlib import Path

import pytest

from tests.launch.shell import LAUNCH, ROOT, error_line, run
from tests.support import in_process

CLUSTER1 = LAUNCH / "cluster1.sh"
CLUSTER2 = LAUNCH / "cluster2.sh"


def _command(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Returns the words of the command that a dry run printed last."""
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("script", "hosts", "expected"),
    [
        (CLUSTER1, ["a", "b", "c"], ("24", "a:8,b:8,c:8")),
        (CLUSTER2, ["a", "b", "c", "d", "e", "f"], ("24", "a:4,b:4,c:4,d:4,e:4,f:4")),
        (CLUSTER1, ["a:2,b", "c:1"], ("11", "a:2,b:8,c:1")),
        (
            CLUSTER1,
            ["--slots=3", "node-1.example.org", "10.0.0.7"],
            ("6", "node-1.example.org:3,10.0.0.7:3"),
        ),
        (CLUSTER1, ["localhost:2"], ("2", "localhost:2")),
    ],
)
def test_cluster_script_dry_run_prints_ranks_and_hosts(script, hosts, expected):
    words = _command(run(script, "--dry-run", *hosts))
    assert words[0] == "horovodrun"
    assert (words[words.index("-np") + 1], words[words.index("-H") + 1]) == expected
    assert f"--flagfile={ROOT}/flags/{script.stem}.flags" in words


def test_cluster_script_reads_hosts_from_the_environment_unless_named():
    assert "x:8,y:2" in _command(run(CLUSTER1, "--dry-run", HOSTS="x, y:2"))
    assert "z:8" in _command(run(CLUSTER1, "--dry-run", "z", HOSTS="x,y"))


def test_cluster_script_passes_flags_unchanged():
    flags = ["--run_dir=a b; touch $HOME/x `id` 'q' \"d\"", "--epochs=3"]
    words = _command(run(CLUSTER1, "a", "--dry-run", *flags, "--", "--slots=9", "-v"))
    assert words[-4:] == [*flags, "--slots=9", "-v"]


def test_local_script_passes_flags_unchanged_and_uses_ranks():
    words = _command(run(LAUNCH / "local.sh", "--dry-run", "--run_dir=a b;$x", RANKS="4"))
    assert words[1:5] == ["-m", "hybrid_imagenet", "run", "-np"]
    assert words[5:8] == ["4", "-H", "localhost:4"]
    assert words[-1] == "--run_dir=a b;$x"
    for wrong in ("0", "two", "1;id", ""):
        result = run(LAUNCH / "local.sh", "--dry-run", RANKS=wrong)
        assert result.returncode == (0 if wrong == "" else 2)


def test_cluster_script_rejects_invalid_hosts_and_options_in_one_line(tmp_path):
    for words in (
        *(
            ["a;touch x"],
            ["$(touch x)"],
            ["`touch x`"],
            ["-oProxyCommand=touch"],
            ["a:0"],
            ["a:1:2"],
            ["a,,b"],
            ["*"],
        ),
        *(["7"], ["a", "a"], ["../a"], [], [","], ["a", "--slots=0"], ["a", "--ssh-port=22;x"]),
        ["a", "--network-interfaces=eth0 --mca x"],
    ):
        result = run(CLUSTER1, "--dry-run", *words, cwd=tmp_path)
        assert result.returncode == 2, words
        error_line(result)
        assert result.stdout == ""
    assert not list(tmp_path.iterdir())


def test_cluster_script_rejects_a_directory_with_a_blank(tmp_path):
    result = run(CLUSTER1, "--dry-run", "a", HYBRID_IMAGENET_VENV=str(tmp_path / "my venv"))
    assert result.returncode == 1
    assert "my venv" in error_line(result)


def test_cluster_script_keeps_settings_of_the_user():
    lines = run(CLUSTER1, "--dry-run", "a", NCCL_IB_TC="5").stdout.splitlines()
    exported = next(line for line in lines if line.startswith("export "))
    assert "NCCL_IB_TC=5" in exported
    # NCCL finds this value by itself, so only a value of the user would be set.
    assert "NCCL_IB_GID_INDEX" not in exported
    assert "NCCL_NET_GDR_LEVEL=PHB" in exported
    assert "NCCL_NET_GDR_LEVEL=LOC" in run(CLUSTER2, "--dry-run", "a").stdout


@pytest.mark.parametrize("script", [CLUSTER1, CLUSTER2])
def test_cluster_script_sets_the_ring_of_the_papers_unless_the_user_sets_nccl_algo(script):
    # Without the variable NCCL may use a tree. An empty value lets NCCL choose.
    assert "NCCL_ALGO=Ring" in run(script, "--dry-run", "a").stdout.split()
    assert "NCCL_ALGO=Tree" in run(script, "--dry-run", "a", NCCL_ALGO="Tree").stdout.split()
    assert "NCCL_ALGO" not in run(script, "--dry-run", "a", NCCL_ALGO="").stdout


@pytest.mark.parametrize(
    ("hosts", "ring"),
    [
        (["a:8"] * 1, True),
        ([f"h{n}:8" for n in range(8)], True),
        ([f"h{n}:8" for n in range(9)], False),
    ],
)
def test_cluster_script_beyond_64_ranks_lets_nccl_choose_the_algorithm(hosts, ring):
    assert ("NCCL_ALGO=Ring" in run(CLUSTER1, "--dry-run", *hosts).stdout.split()) == ring


def test_cluster_script_with_an_unknown_host_prints_one_line_with_its_name():
    result = run(
        CLUSTER1, "no-such-host.invalid:2", "--dataset=digits", "--augmentation=digits", timeout=30
    )
    assert result.returncode == 2
    assert "no-such-host.invalid" in error_line(result)


def test_cluster_script_with_an_unknown_flag_prints_one_error_before_ranks_start():
    for script, hosts in ((CLUSTER1, ["localhost:2"]), (CLUSTER2, ["no-such-host.invalid"])):
        result = run(script, *hosts, "--epoch=3")
        assert result.returncode == 2
        assert "epoch" in error_line(result)


SUPERVISED = Path(__file__).parent / "supervised.sh"


def test_supervised_ranks_of_this_host_start_without_ssh(tmp_path):
    for tool in Path("/usr/bin").iterdir():
        if tool.name not in ("ssh", "rsh", "srun"):
            (tmp_path / tool.name).symlink_to(tool)
    result = run(SUPERVISED, "echo", "here", PATH=str(tmp_path))
    assert result.stdout.split() == ["here", "here"], result.stderr


def test_supervised_ranks_get_the_variable_of_the_terminal():
    result = run(SUPERVISED, "printenv", "HYBRID_IMAGENET_TERMINAL")
    assert result.stdout.split() == ["0", "0"]


@pytest.mark.parametrize("path", sorted((ROOT / "flags").glob("*.flags")), ids=lambda p: p.name)
def test_flag_files_are_valid_and_name_command_and_hardware(path: Path, monkeypatch):
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    text = "\n".join(head)
    for word in ("Command:", "Hardware:"):
        assert word in text
    assert "Expected:" in text or "Published:" in text
    # The images are on other hosts, so this host is not checked for them.
    monkeypatch.setenv("HYBRID_IMAGENET_RANKS_ELSEWHERE", "1")
    code, _, errors = in_process.call(
        "hybrid_imagenet.main", [f"--flagfile={path}", "--check_only"]
    )
    assert code == 0, errors
