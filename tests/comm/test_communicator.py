"""Tests collectives between real ranks."""

import math
import re
import socket
import sys
import types

import pytest
import tensorflow as tf

from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.comm import SingleProcess, process
from tests import ranks
from tests.comm import programs


def check(outcomes, size):
    for rank, out in enumerate(outcomes):
        assert (out["rank"], out["size"], out["local"]) == (rank, size, [rank, size])
        assert len(out["hosts"]) == size and len(set(out["hosts"])) == 1
        # The ranks of a pool import Horovod beforehand.
        assert out["horovod"] == (size > 1 and ranks.has_horovod())
        total = size * (size + 1) / 2
        assert out["sum"] == [total, 2 * total]
        assert out["max"] == [size - 1, 0]
        assert out["graph_max"] == [size - 2.5, 1.5]
        assert out["host_sum"] == [size, size * (size - 1) / 2]
        assert out["graph_sum"] == size * (size - 1) / 2
        assert out["variables"] == [[5.0] * 6] * 5 + [[1.0] * 6, [0.0], []]
        assert out["object"] == {"from": 0, "list": [1, None, "ä"]}
        assert out["gathered"] == ["x" * r for r in range(size)]
        mean = total / size
        assert [name for name, _ in out["grads"]] == ["float32"] * 3
        assert out["grads"][0][1] == [2 * mean, 4 * mean, 6 * mean]
        assert math.isclose(out["grads"][1][1], mean)
        assert out["grads"][2][1] == [mean, 2 * mean, 3 * mean]
        assert out["eager"] == [[(size - 1) / 2]]
        # Each gradient is padded to a row. The gradient without elements is not sent.
        means = [mean, 2 * mean, 3 * mean]
        rows = {"0": [2 * x for x in means], "1": [mean, 0.0, 0.0], "3": means}
        assert out["packed"] == {position: [values, 1024, 0.0] for position, values in rows.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_on_ranks_return_expected_values(pools, size):
    check(pools[size].call(programs.collectives), size)


def test_collectives_with_the_tensorflow_engine_return_expected_values(pools):
    check(pools["tensorflow"].call(programs.collectives, "tensorflow"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", ""])
def test_collectives_on_one_rank_return_expected_values(launcher):
    with ranks.own(1, launcher) as pool:
        check(pool.call(programs.collectives), 1)


@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_error_of_one_rank_is_raised_on_all_ranks(pools, engine):
    outcomes = pools["tensorflow" if engine == "tensorflow" else 4].call(
        programs.shared_errors, engine
    )
    assert all(out == outcomes[0] for out in outcomes)
    reading, small, variables, gradients, same_versions, other_versions = outcomes[0]
    assert reading.startswith("rank 1 on ") and reading.endswith(": cannot read")
    assert small == "--x=1: too small"
    assert variables.startswith("rank 1 on ") and "The 1 variables to broadcast differ" in variables
    assert gradients.startswith("rank 1 on ") and "The gradients differ" in gradients
    assert same_versions is None
    assert re.match(
        r"Host \S+ has another version of keras than \S+. Run launch/setup.sh of the same commit",
        other_versions,
    )


@pytest.mark.parametrize("engine", ["horovod", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_collective_with_a_dead_rank_ends_the_others(engine):
    with (
        ranks.own(2) as pool,
        pytest.raises(AssertionError, match=r"a rank has ended: exit code [1-9]|ops is aborted"),
    ):
        pool.call(programs.lost_rank, engine, timeout=300)


def test_program_whose_ranks_were_never_connected_warns_at_exit(monkeypatch, capsys):
    monkeypatch.delattr(sys, "last_type", raising=False)
    # A program that computes nothing has only printed its --help, and gets no warning.
    tf.zeros([])
    monkeypatch.setattr(process._state, "communicator", None)
    for rank, expected in (
        (0, "warning: the 2 ranks were never connected, so each has worked alone"),
        (1, ""),
    ):
        monkeypatch.setattr(process._state, "placement", Placement(rank=rank, size=2))
        process._warn_if_never_connected()
        assert capsys.readouterr().err.partition(". Training")[0] == expected
    monkeypatch.setattr(process._state, "placement", Placement(rank=0, size=2))
    monkeypatch.setattr(process._state, "communicator", SingleProcess())
    process._warn_if_never_connected()
    assert capsys.readouterr().err == ""


def test_supervisor_is_notified_of_an_exit_without_an_error(monkeypatch, capfd):
    word = "0123456789abcdef" * 2
    monkeypatch.setenv(job_lines.JOB_VARIABLE, word)
    monkeypatch.delattr(sys, "last_type", raising=False)
    monkeypatch.setattr(process._state, "placement", Placement(rank=1, size=2))
    process._notify_supervisor_of_exit()
    line = capfd.readouterr().err
    assert job_lines.parse_program_end(line.removeprefix(word).encode()) == job_lines.ProgramEnd(
        1, 2, socket.gethostname()
    )
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    process._notify_supervisor_of_exit()
    assert capfd.readouterr().err == ""


def test_exit_notification_runs_before_the_exit_handler_of_the_engine(
    monkeypatch,
):
    two_ranks = types.SimpleNamespace(size=2)
    registered = []
    monkeypatch.setattr(process.atexit, "register", registered.append)
    monkeypatch.setattr(process.atexit, "unregister", registered.remove)
    monkeypatch.setattr(
        process, "_state", process._ProcessState(placement=Placement(rank=0, size=2))
    )
    # `init` registers this handler.
    registered.append(process._notify_supervisor_of_exit)
    monkeypatch.setattr(
        process, "connect", lambda *arguments: registered.append("engine") or two_ranks
    )
    process.communicator()
    assert registered == ["engine", process._notify_supervisor_of_exit]
