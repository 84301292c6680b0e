"""What Horovod is told before it starts, and the names of hosts."""

import os
from unittest import mock

import pytest

from hybrid_imagenet.comm import horovod_engine as engine
from hybrid_imagenet.comm.settings import Settings


@pytest.fixture
def options(monkeypatch):
    """Calls _set_engine as if Horovod had NCCL or not; returns its answer and what it set."""

    def call(settings, nccl=False, **given):
        monkeypatch.setattr(engine.hvd, "nccl_built", lambda: nccl)
        monkeypatch.setattr(engine.tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if nccl else [])
        rest = {name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")}
        with mock.patch.dict(os.environ, rest | given, clear=True):
            answer = engine._set_engine(settings)
            return answer, {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")}

    return call


def test_one_bucket_is_one_message(options):
    answer, found = options(Settings(fusion_threshold_mb=4, cycle_time_ms=2.5))
    assert not answer
    assert found == {
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_FUSION_THRESHOLD": str(8 * 2**20),
    }


def test_what_the_launcher_set_stays(options):
    assert options(Settings(), HOROVOD_CYCLE_TIME="7")[1]["HOROVOD_CYCLE_TIME"] == "7"


def test_with_nccl_sums_are_handed_on_before_they_are_done_and_the_thread_looks_often(options):
    """Otherwise Horovod's thread waits for each sum on the host, and the device runs dry behind every one."""
    plain, found = options(Settings())[1], options(Settings(), nccl=True)[1]
    assert "HOROVOD_ENABLE_ASYNC_COMPLETION" not in plain
    assert found["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "1"
    assert (plain["HOROVOD_CYCLE_TIME"], found["HOROVOD_CYCLE_TIME"]) == ("1", "0.2")
    given = options(Settings(cycle_time_ms=3), nccl=True, HOROVOD_ENABLE_ASYNC_COMPLETION="0")[1]
    assert (given["HOROVOD_CYCLE_TIME"], given["HOROVOD_ENABLE_ASYNC_COMPLETION"]) == ("3", "0")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Settings(allreduce="hierarchical"), "HOROVOD_HIERARCHICAL_ALLREDUCE"),
        (Settings(allreduce="torus"), "HOROVOD_TORUS_ALLREDUCE"),
        (Settings(allreduce="torus", options={"torus_grid": "2x2"}), None),  # a grid of one's own is composed
        (Settings(allreduce="masters"), None),
        (Settings(), None),
    ],
)
def test_with_nccl_horovod_does_what_it_can_itself(options, settings, expected):
    answer, found = options(settings, nccl=True)
    assert answer == (expected is not None)
    assert [name for name in found if name.endswith("_ALLREDUCE")] == ([expected] if expected else [])
    assert not options(settings, nccl=False)[0]
