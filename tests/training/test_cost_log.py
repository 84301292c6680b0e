"""The costs of an epoch in its record, from the counters of all ranks."""

import types

import pytest

from hybrid_imagenet.training.cost_log import CostLog
from tests.support.fake_run import FakeRun, attach


def epoch_logs(exposed_ms):
    """Returns the logs of an epoch of two ranks, the second of which has read 7 bytes in 2 reads.

    Args:
      exposed_ms: Time of each rank from its last gradient to the last sum.
    """
    reads = types.SimpleNamespace(bytes_read=100, operations=10)
    other = {"exposed_ms": exposed_ms[1], "bytes_read": 7, "reads": 2}
    communicator = types.SimpleNamespace(allgather_object=lambda costs: [costs, other])
    save_callback = types.SimpleNamespace(take_seconds=lambda: 1.5)
    reducer = types.SimpleNamespace(statistics=lambda: {"exposed_ms": exposed_ms[0]})
    log = attach(CostLog(reads, save_callback, reducer), FakeRun(communicator=communicator))
    log.on_train_begin()
    reads.bytes_read = 130
    reads.operations = 13
    logs = {}
    log.on_epoch_end(0, logs)
    return logs


def test_cost_log_of_two_ranks_names_the_rank_that_waits_least():
    assert epoch_logs([30.0, 10.0]) == {
        "bytes_read": 37,
        "reads": 5,
        "checkpoint_seconds": 1.5,
        "communication_seconds": 0.01,
        "slowest_rank": 1,
        "slowest_rank_seconds": pytest.approx(0.01),
    }


def test_cost_log_without_timed_steps_omits_communication():
    assert set(epoch_logs([None, 10.0])) == {"bytes_read", "reads", "checkpoint_seconds"}
