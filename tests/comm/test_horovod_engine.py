"""The variables that Horovod reads when it starts, and its native torus."""

import logging
import os
from unittest import mock

import pytest

from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.comm.settings import CommunicationSettings

engine = pytest.importorskip("hybrid_imagenet.comm.horovod_engine")


@pytest.fixture
def options(monkeypatch):
    """Calls _configure_horovod with or without NCCL; returns its result and what it has set."""

    def call(settings, nccl=False, call=engine._configure_horovod, **given):
        monkeypatch.setattr(engine.hvd, "nccl_built", lambda: nccl)
        monkeypatch.setattr(
            engine.tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if nccl else []
        )
        rest = {
            name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")
        }
        with mock.patch.dict(os.environ, rest | given, clear=True):
            answer = call(settings)
            return answer, {
                name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")
            }

    return call


def test_configure_horovod_does_not_fuse_buckets(options):
    answer, found = options(CommunicationSettings(fusion_threshold_mb=4))
    assert not answer
    assert found == {
        "HOROVOD_CYCLE_TIME": "0.2",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_FUSION_THRESHOLD": str(8 * 2**20),
    }
    deterministic = options(CommunicationSettings(deterministic=True))[1]
    assert deterministic["HOROVOD_FUSION_THRESHOLD"] == "0"


def test_configure_horovod_turns_on_async_completion_only_with_nccl(options):
    """Otherwise Horovod's thread waits for each sum on the host, and the GPU runs idle."""
    plain, found = (
        options(CommunicationSettings())[1],
        options(CommunicationSettings(), nccl=True)[1],
    )
    assert "HOROVOD_ENABLE_ASYNC_COMPLETION" not in plain
    assert found["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "1"
    assert (plain["HOROVOD_CYCLE_TIME"], found["HOROVOD_CYCLE_TIME"]) == ("0.2", "0.2")
    given = options(
        CommunicationSettings(),
        nccl=True,
        HOROVOD_CYCLE_TIME="3",
        HOROVOD_ENABLE_ASYNC_COMPLETION="0",
    )[1]
    assert (given["HOROVOD_CYCLE_TIME"], given["HOROVOD_ENABLE_ASYNC_COMPLETION"]) == ("3", "0")


FOUR_BY_TWO = ("a", "a", "b", "b", "c", "c", "d", "d")


@pytest.mark.parametrize(
    ("allreduce", "names", "grid", "expected"),
    [
        ("hierarchical", FOUR_BY_TWO, None, True),
        ("hierarchical", ("a", "a", "b"), None, False),  # raises an error where it is composed
        ("torus", FOUR_BY_TWO, None, True),
        ("torus", FOUR_BY_TWO, "2x4", False),
        ("torus", ("a",) * 8, None, False),  # 2x4 inside one host
        (
            "torus",
            tuple(str(i // 8) for i in range(1024)),
            None,
            False,
        ),  # 32x32, not 128x8 (Mikami et al., Table 4)
        ("masters", FOUR_BY_TWO, None, False),
    ],
)
def test_native_torus_is_used_only_with_one_row_per_host(allreduce, names, grid, expected):
    settings = CommunicationSettings(
        allreduce=allreduce, options={"torus_grid": grid} if grid else {}
    )
    assert engine._horovod_supports_natively(settings, names) == expected


@pytest.mark.parametrize(("nccl", "own"), [(True, True), (False, False)])
def test_hierarchical_never_sums_in_the_memory_of_the_hosts(
    options, monkeypatch, caplog, nccl, own
):
    """Horovod's hierarchical all-reduce would, and its torus over NCCL is the same algorithm."""
    started = []
    monkeypatch.setattr(engine, "placement", lambda: Placement(0, 4, 0, 2))
    monkeypatch.setattr(
        engine.hosts,
        "gather_by_mpi",
        lambda own, size: [["a", "", "1"], ["a", "", "1"], ["b", "", "1"], ["b", "", "1"]],
    )
    monkeypatch.setattr(
        engine.hvd, "init", lambda process_sets: started.append([s.ranks for s in process_sets])
    )
    monkeypatch.setattr(engine.hvd, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(engine.hvd, "size", lambda: 4)
    settings = CommunicationSettings(allreduce="hierarchical")
    with caplog.at_level(logging.INFO):
        found = options(settings, nccl=nccl, call=engine.HorovodCommunicator)[1]
    assert [name for name in found if name.endswith("_ALLREDUCE")] == [
        "HOROVOD_TORUS_ALLREDUCE"
    ] * own
    assert started == [[] if own else [[0, 1], [2, 3], [0, 2], [1, 3]]]
    assert ("Horovod's own torus" in caplog.text) == own
