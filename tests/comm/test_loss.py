"""Tests that errors of Horovod and TensorFlow after the loss of a rank are recognized."""

import pytest
import tensorflow as tf

from hybrid_imagenet import train
from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_STALLED
from tests.support import in_process

HorovodInternalError = pytest.importorskip("horovod.common.exceptions").HorovodInternalError
SHUT_DOWN = (
    "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt"
)
RESET = (
    "Collective ops is aborted by: Collective ops is aborted by: recvmsg:Connection reset by peer\n"
    "Additional GRPC error information from remote target /job:worker/replica:0/task:2"
)
UNHEALTHY = (
    "Collective ops is aborted by: Error reported from /job:worker/task:2: The following tasks are"
    " unhealthy:"
)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (tf.errors.UnknownError(None, None, SHUT_DOWN), "Horovod has been shut down"),
        (HorovodInternalError(SHUT_DOWN), "Horovod has been shut down"),
        (HorovodInternalError(), "HorovodInternalError"),
        (tf.errors.UnavailableError(None, None, RESET), "recvmsg:Connection reset by peer"),
        (
            tf.errors.UnavailableError(None, None, UNHEALTHY),
            "Error reported from rank 2: The following tasks are unhealthy",
        ),
    ],
)
def test_lost_rank_message_describes_the_error(error, reason):
    assert lost_rank.is_lost_rank_error(error)
    line = lost_rank.lost_rank_message(error)
    assert line.startswith(f"{lost_rank.LOST_RANK_PREFIX} ({reason})")


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InvalidArgumentError(None, None, "shapes differ in {{node HorovodAllreduce_1}}"),
        tf.errors.ResourceExhaustedError(
            None, None, "Collective ops is aborted by: OOM when allocating tensor"
        ),
        ValueError("Horovod has been shut down"),
    ],
)
def test_other_errors_are_not_lost_rank_errors(error):
    assert not lost_rank.is_lost_rank_error(error)


def test_program_that_loses_a_rank_prints_one_line_and_exits_as_stalled(monkeypatch):
    def lose_rank(config, communicator):
        raise tf.errors.UnavailableError(None, None, RESET)

    monkeypatch.setattr(train, "run", lose_rank)
    code, _, errors = in_process.call(
        "hybrid_imagenet.main", ["--recipe=hybrid", "--dataset=synthetic", "--progress=none"]
    )
    assert code == EXIT_STALLED
    assert errors.count("\n") == 1
    assert errors.startswith(f"{lost_rank.LOST_RANK_PREFIX} (recvmsg:Connection reset by peer); ")


def test_command_that_loses_a_rank_prints_one_line_and_exits_as_stalled(capfd):
    def lose_rank(words):
        raise HorovodInternalError(SHUT_DOWN)

    assert command_line.run_command(lose_rank, []) == EXIT_STALLED
    message = lost_rank.lost_rank_message(HorovodInternalError(SHUT_DOWN))
    assert capfd.readouterr().err == f"{message}\n"
