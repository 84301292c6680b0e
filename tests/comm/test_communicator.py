"""Collectives between real ranks."""

import math
import re
import socket
import sys
import types

import pytest
import tensorflow as tf

from hybrid_imagenet.comm import SingleProcess, job_lines, process
from hybrid_imagenet.comm.environment import Placement
from tests import ranks
from tests.comm import programs


def check(outcomes, size):
    for rank, out in enumerate(outcomes):
        assert (out["rank"], out["size"], out["local"]) == (rank, size, [rank, size])
        assert len(out["hosts"]) == size and len(set(out["hosts"])) == 1
        assert out["horovod"] == (
            size > 1 and ranks.has_horovod()
        )  # the ranks of a pool import it beforehand
        total = size * (size + 1) / 2
        assert out["sum"] == [total, 2 * total]
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
        whole = [
            mean,
            2 * mean,
            3 * mean,
        ]  # each gradient fills a row; the one without elements travels nowhere
        rows = {"0": [2 * x for x in whole], "1": [mean, 0.0, 0.0], "3": whole}
        assert out["packed"] == {place: [values, 1024, 0.0] for place, values in rows.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_collectives_of_ranks(pools, size):
    check(pools[size].call(programs.collectives), size)


def test_collectives_of_tensorflow(pools):
    check(pools["tensorflow"].call(programs.collectives, "tensorflow"), 4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["mpi", ""])
def test_collectives_of_one_rank(launcher):
    with ranks.own(1, launcher) as pool:
        check(pool.call(programs.collectives), 1)


@pytest.mark.parametrize("engine", ["horovod", "tensorflow"])
def test_errors_of_some_ranks_end_all(pools, engine):
    outcomes = pools["tensorflow" if engine == "tensorflow" else 4].call(programs.errors, engine)
    assert all(out == outcomes[0] for out in outcomes)
    reading, small, variables, gradients, alike, others = outcomes[0]
    assert reading.startswith("rank 1 on ") and reading.endswith(": cannot read")
    assert small == "--x=1: too small"
    assert variables.startswith("rank 1 on ") and "The 1 variables to broadcast differ" in variables
    assert gradients.startswith("rank 1 on ") and "The gradients differ" in gradients
    assert alike is None
    assert re.match(
        r"Host \S+ has another version of keras than \S+. Run launch/setup.sh of the same commit",
        others,
    )


@pytest.mark.parametrize("engine", ["horovod", pytest.param("tensorflow", marks=pytest.mark.slow)])
def test_a_rank_that_dies_does_not_leave_the_others_hanging(engine):
    with (
        ranks.own(2) as pool,
        pytest.raises(AssertionError, match=r"a rank has left: exit code [1-9]|ops is aborted"),
    ):
        pool.call(programs.death, engine, timeout=300)


def test_ranks_that_nothing_has_connected_are_told_so_at_the_end(monkeypatch, capsys):
    monkeypatch.delattr(sys, "last_type", raising=False)
    tf.zeros([])  # a program that computes nothing has only printed its --help
    monkeypatch.setattr(process._state, "communicator", None)
    for rank, expected in (
        (0, "warning: the 2 ranks were never connected, so each has worked alone"),
        (1, ""),
    ):
        monkeypatch.setattr(process._state, "place", Placement(rank=rank, size=2))
        process._warn_if_never_connected()
        assert capsys.readouterr().err.partition(". Training")[0] == expected
    monkeypatch.setattr(process._state, "place", Placement(rank=0, size=2))
    monkeypatch.setattr(process._state, "communicator", SingleProcess())
    process._warn_if_never_connected()
    assert capsys.readouterr().err == ""


def test_a_rank_tells_its_supervisor_that_its_program_ends_unless_an_error_ended_it(
    monkeypatch, capfd
):
    word = "0123456789abcdef" * 2
    monkeypatch.setenv(job_lines.JOB_VARIABLE, word)
    monkeypatch.delattr(sys, "last_type", raising=False)
    monkeypatch.setattr(process._state, "place", Placement(rank=1, size=2))
    process._notify_supervisor_of_exit()
    line = capfd.readouterr().err
    assert job_lines.parse_program_end(line.removeprefix(word).encode()) == job_lines.ProgramEnd(
        1, 2, socket.gethostname()
    )
    monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    process._notify_supervisor_of_exit()
    assert capfd.readouterr().err == ""


def test_the_line_that_a_program_ends_is_registered_after_the_engine_that_it_must_precede(
    monkeypatch,
):
    two_ranks = types.SimpleNamespace(size=2)
    registered = []
    monkeypatch.setattr(process.atexit, "register", registered.append)
    monkeypatch.setattr(process.atexit, "unregister", registered.remove)
    monkeypatch.setattr(process, "_state", process._ProcessState(place=Placement(rank=0, size=2)))
    registered.append(process._notify_supervisor_of_exit)  # by init
    monkeypatch.setattr(
        process, "connect", lambda *arguments: registered.append("engine") or two_ranks
    )
    process.communicator()
    assert registered == ["engine", process._notify_supervisor_of_exit]
