"""Tests where `hybrid-imagenet run` finds its hosts: files and allocations of schedulers."""

import shlex
import socket

import pytest

from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.commands import host_list, run
from hybrid_imagenet.commands.doctor import host_facts
from hybrid_imagenet.errors import UserError

DIGITS = ("--dataset=digits", "--augmentation=digits")
SLURM = {"SLURM_JOB_NODELIST": "n[1-2],big", "SLURM_TASKS_PER_NODE": "2(x2),4"}


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", *SLURM):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("a\nb\n", {"a": 0, "b": 0}),
        ("# hosts\n\na slots=2 # two\n b:3\nc  slots = 4\r\n", {"a": 2, "b": 3, "c": 4}),
        ("b\na\nb\na\nb\n", {"b": 3, "a": 2}),
        ("a slots=2\na:3\nb\n", {"a": 5, "b": 0}),
        ("a slots=2\na\n", {"a": 3}),
    ],
)
def test_parse_lines_returns_the_slots_of_each_host(text, slots):
    assert host_list.parse_lines(text) == slots
    assert list(host_list.parse_lines(text)) == list(slots)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n-oProxyCommand=x\n", "line 2 is '-oProxyCommand=x'"),
        ("a b\n", "line 1 is 'a b'"),
        ("a slots=0\n", "line 1 is 'a slots=0'"),
        ("a slots=two\n", "line 1 is 'a slots=two'"),
        ("a:2 slots=2\n", "line 1 is 'a:2 slots=2'"),
        ("# nothing\n", "it lists no host"),
    ],
)
def test_read_of_an_invalid_file_raises_with_the_line(text, message, tmp_path):
    path = tmp_path / "hosts"
    path.write_text(text)
    with pytest.raises(UserError, match=f"--hostfile={path} is not valid: {message}. Write HOST"):
        host_list.read(None, str(path), {})


def test_read_takes_the_first_source_that_is_set(tmp_path):
    environ = dict(SLURM)
    sources = [("$SLURM_JOB_NODELIST", {"n1": 2, "n2": 2, "big": 4})]
    assert host_list.read(None, None, {}) is None
    for variable in ("LSB_DJOB_HOSTFILE", "PBS_NODEFILE"):
        path = tmp_path / variable
        path.write_text(f"a\na\n{variable}\n")
        sources.append((f"${variable}", {"a": 2, variable: 0}))
    # Each scheduler in turn precedes those before it.
    for variable, (source, slots) in zip(
        ("", "LSB_DJOB_HOSTFILE", "PBS_NODEFILE"), sources, strict=True
    ):
        if variable:
            environ[variable] = str(tmp_path / variable)
        assert host_list.read(None, None, environ) == host_list.HostList(slots, source, True)
    (tmp_path / "mine").write_text("c:3\n")
    mine = host_list.HostList({"c": 3}, f"--hostfile={tmp_path}/mine")
    assert host_list.read(None, f"{tmp_path}/mine", environ) == mine
    assert host_list.read("d:1", None, environ) == host_list.HostList({"d": 1})


@pytest.mark.parametrize(
    ("tasks", "slots"),
    [(None, {"n1": 0, "n2": 0}), ("1(x2)", {"n1": 0, "n2": 0}), ("1,3", {"n1": 0, "n2": 3})],
)
def test_read_of_one_slurm_task_on_a_node_leaves_its_slots_open(tasks, slots):
    environ = {"SLURM_JOB_NODELIST": "n[1-2]"}
    if tasks is not None:
        environ["SLURM_TASKS_PER_NODE"] = tasks
    hosts = host_list.read(None, None, environ)
    assert hosts is not None and hosts.slots == slots


@pytest.mark.parametrize(
    "environ",
    [
        SLURM | {"SLURM_TASKS_PER_NODE": "2"},
        SLURM | {"SLURM_TASKS_PER_NODE": "x"},
        SLURM | {"SLURM_JOB_NODELIST": "n[1-"},
        SLURM | {"SLURM_JOB_NODELIST": "-n1,a,b"},
    ],
)
def test_read_of_slurm_variables_that_do_not_match_raises(environ):
    with pytest.raises(UserError, match=r"Slurm's variables cannot be read .*Set -H HOST:SLOTS"):
        host_list.read(None, None, environ)


@pytest.mark.parametrize("name", ["node1", "node1.cluster"])
def test_read_of_an_allocation_of_this_host_alone_returns_none(name, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    environ = {"SLURM_JOB_NODELIST": name, "SLURM_TASKS_PER_NODE": "2"}
    assert host_list.read(None, None, environ) is None
    # The same allocation on a login node.
    monkeypatch.setattr(socket, "gethostname", lambda: "login")
    hosts = host_list.read(None, None, environ)
    assert hosts is not None and hosts.slots == {name: 2}


def test_read_of_an_allocation_has_this_host_under_its_own_name(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node1.cluster")
    hosts = host_list.read(None, None, {"SLURM_JOB_NODELIST": "node[1-2]"})
    assert hosts is not None and hosts.slots == {"node1.cluster": 0, "node2": 0}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["8", "-H", "n1:2,n2:2,big:4"]),
        (["-np", "3"], ["3", "-H", "n1:2,n2:2,big:4"]),
        (["--nproc_per_node=3"], ["9", "-H", "n1:3,n2:3,big:3"]),
        (["-H", "c:2"], ["2", "-H", "c:2"]),
        (["-np", "2", "--host_discovery_script=h"], ["2", "-H", "localhost:2"]),
    ],
)
def test_run_in_an_allocation_starts_ranks_on_its_hosts(words, expected, monkeypatch, capfd):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert run.main([*words, "--dry_run", "--", *DIGITS]) == 0
    command = shlex.split(capfd.readouterr().out)
    first = command.index("-np") + 1
    assert command[first : first + 3] == expected


@pytest.mark.parametrize("words", [["train.py"], ["--", *DIGITS]], ids=["script", "training"])
def test_run_prints_where_its_hosts_are_from(words, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    monkeypatch.setattr(run, "_run_job", lambda *_: (0, None))
    assert run.main(["-np", "3", "--hostfile=hosts", *words]) == 0
    assert capfd.readouterr().err == "starting 3 ranks (a:2,b:2 from --hostfile=hosts) ...\n"


def test_run_with_more_ranks_than_an_allocation_has_names_its_variable(monkeypatch, capfd):
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    assert run.main(["-np", "9", "--", *DIGITS]) == 2
    assert capfd.readouterr().err == (
        "error: -np 9 needs 9 slots, but $SLURM_JOB_NODELIST (n1:2,n2:2,big:4) has 8. Use -np 8,"
        " or -H n1:3,n2:3,big:4 for 9 ranks.\n"
    )


def test_run_names_the_file_whose_host_does_not_answer(monkeypatch, tmp_path, capfd):
    def query_hosts(names, request, ssh_port):
        return {name: host_facts.UnreachableError("ssh failed: no route", "") for name in names}

    monkeypatch.setattr(host_facts, "query_hosts", query_hosts)
    monkeypatch.setattr(gpus, "count", lambda: 0)
    (tmp_path / "hosts").write_text("far\n")
    assert run.main([f"--hostfile={tmp_path}/hosts", "--", *DIGITS]) == 2
    assert f"--hostfile={tmp_path}/hosts far: the GPUs of this host" in capfd.readouterr().err
