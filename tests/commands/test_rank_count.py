"""Tests how many ranks `hybrid-imagenet run` starts, and options of other launchers."""

import shlex

import pytest

from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.commands import host_list, rank_count, run
from hybrid_imagenet.commands.doctor import host_facts
from hybrid_imagenet.errors import UserError

DIGITS = ("--dataset=digits", "--augmentation=digits")


@pytest.fixture
def eight_gpus(monkeypatch):
    """Makes this host appear to have eight GPUs and a TensorFlow that can use them."""
    monkeypatch.setattr(gpus, "count", lambda: 8)
    monkeypatch.setattr(gpus, "is_built_for_gpus", lambda: True)


def start_nothing(monkeypatch):
    """Makes `run.main` do everything except start ranks."""
    monkeypatch.setattr(run, "_run_job", lambda *_: (0, None))
    monkeypatch.setattr(run.preflight, "run", lambda *_, **__: None)
    monkeypatch.setenv(run.preflight.CHECKED_VARIABLE, "")


def stub_query_hosts(**gpu_counts):
    """Returns a stub of `host_facts.query_hosts`.

    Args:
      gpu_counts: Number of GPUs by host; None for a host that cannot be reached.
    """

    def query_hosts(names, request, ssh_port):
        facts = {}
        for name in names:
            if gpu_counts[name] is None:
                facts[name] = host_facts.UnreachableError("ssh failed: no route", "")
            else:
                facts[name] = {"gpus": [{}] * gpu_counts[name], "build": {"is_cuda_build": True}}
        return facts

    return query_hosts


def test_run_without_np_starts_one_rank_for_each_of_eight_gpus(eight_gpus, capfd):
    assert run.main(["--dry_run", "--", *DIGITS]) == 0
    command = shlex.split(capfd.readouterr().out)
    first = command.index("-np")
    assert command[first : first + 4] == ["-np", "8", "-H", "localhost:8"]


@pytest.mark.parametrize("words", [["train.py"], ["--", *DIGITS]], ids=["script", "training"])
def test_run_without_np_prints_how_many_ranks_start_and_why(
    words, eight_gpus, monkeypatch, tmp_path, capfd
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    start_nothing(monkeypatch)
    assert run.main(words) == 0
    line = capfd.readouterr().err
    assert line.startswith("starting 8 ranks, one for each visible GPU (localhost:8)")
    assert line.count("\n") == 1


def test_run_with_np_prints_no_reason(eight_gpus, monkeypatch, capfd):
    start_nothing(monkeypatch)
    assert run.main(["-np", "2", "--", *DIGITS]) == 0
    assert capfd.readouterr().err.startswith("starting 2 ranks (localhost:2) ...")


@pytest.mark.parametrize(
    ("words", "total", "slots"),
    [
        (["-n", "3"], 3, "localhost:3"),
        (["--num_processes=3"], 3, "localhost:3"),
        (["--num-processes", "3"], 3, "localhost:3"),
        (["--nproc_per_node=3"], 3, "localhost:3"),
        (["--nproc-per-node=gpu"], 8, "localhost:8"),
        (["--nproc-per-node=4", "-H", "a,b"], 8, "a:4,b:4"),
        (["--nproc_per_node=4", "-np", "8", "-H", "a:4,b:4"], 8, "a:4,b:4"),
        (["-H", "a:4,b:2"], 6, "a:4,b:2"),
        (["-H", "localhost"], 8, "localhost:8"),
        (["-np", "4", "-H", "localhost"], 4, "localhost:4"),
        (["-np", "3", "-H", "a,b"], 3, "a:2,b:1"),
        (["-np", "4", "-H", "a,b:1"], 4, "a:3,b:1"),
        (["-np", "1", "-H", "a,b"], 1, "a:1,b:1"),
    ],
)
def test_options_of_run_set_ranks_and_slots(words, total, slots, eight_gpus):
    options, _ = run.parse_arguments([*words, "--", *DIGITS])
    assert (options.np, options.hosts) == (total, slots)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--nproc_per_node=4", "-np", "4", "-H", "a,b"], "4 on each of 2 hosts is 8"),
        (["--nproc_per_node=4", "-H", "a:2"], "-H a:2 contradict each other"),
        (
            ["--nproc_per_node=cpu"],
            "--nproc_per_node=cpu is not valid. Use a whole number, or gpu.",
        ),
        (["--nproc_per_node=0"], "from 1 to"),
        (["-np", "2", "--nproc_per_node=2", "--host_discovery_script=h"], "Use one of them"),
    ],
)
def test_options_of_run_that_contradict_each_other_are_rejected(words, text, eight_gpus):
    with pytest.raises(UserError, match=text):
        run.parse_arguments([*words, "--", *DIGITS])


def test_choose_counts_the_gpus_of_other_hosts_without_slots(eight_gpus, monkeypatch):
    monkeypatch.setattr(host_facts, "query_hosts", stub_query_hosts(far=4, cpu=0))
    count = rank_count.choose(None, None, host_list.read("localhost,far,cpu,known:2", None, {}))
    assert count.slots == {"localhost": 8, "far": 4, "cpu": 1, "known": 2}
    assert (count.total, count.reason) == (15, "one for each visible GPU")


def test_choose_rejects_a_host_whose_gpus_cannot_be_counted(monkeypatch):
    monkeypatch.setattr(host_facts, "query_hosts", stub_query_hosts(far=None))
    with pytest.raises(UserError, match=r"cannot be counted \(ssh failed: no route\).*as in far:8"):
        rank_count.choose(None, None, host_list.read("far", None, {}))


@pytest.mark.parametrize(
    ("gpu_count", "built_for_gpus", "reason"),
    [(0, True, "no GPU is visible"), (8, False, "cannot use the 8 visible GPUs")],
)
def test_choose_without_a_usable_gpu_returns_one_rank(
    gpu_count, built_for_gpus, reason, monkeypatch
):
    monkeypatch.setattr(gpus, "count", lambda: gpu_count)
    monkeypatch.setattr(gpus, "is_built_for_gpus", lambda: built_for_gpus)
    count = rank_count.choose(None, None, None)
    assert (count.total, count.slots) == (1, {"localhost": 1})
    assert reason in count.reason


def test_help_of_run_has_the_usage_of_both_forms(capsys):
    with pytest.raises(SystemExit):
        run.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "usage: hybrid-imagenet run [-np N] [-H HOST:SLOTS,...] [options] -- TRAIN_FLAGS" in text
    assert "run [-np N] [-H HOST:SLOTS,...] [options] SCRIPT [ARGS]" in text
    assert "hybrid-imagenet run -np 4 train.py --epochs=8" in text
