"""Tests the variables that Horovod reads when it starts, and its native torus."""

import logging
import os
from unittest import mock

import pytest

from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.comm.settings import CommunicationSettings

engine = pytest.importorskip("hybrid_imagenet.comm.horovod_engine")


@pytest.fixture
def options(monkeypatch):
    """Returns a function that configures Horovod, with or without NCCL.

    The function returns the result of _configure_horovod and the variables that it has set.
    """

    def call(settings, nccl=False, call=engine._configure_horovod, **variables):
        monkeypatch.setattr(engine.hvd, "nccl_built", lambda: nccl)
        monkeypatch.setattr(
            engine.tf.config, "get_visible_devices", lambda kind: ["GPU:0"] if nccl else []
        )
        rest = {
            name: value for name, value in os.environ.items() if not name.startswith("HOROVOD_")
        }
        with mock.patch.dict(os.environ, rest | variables, clear=True):
            answer = call(settings)
            return answer, {
                name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")
            }

    return call


def test_configure_horovod_does_not_fuse_buckets(options):
    answer, variables = options(CommunicationSettings(fusion_threshold_mb=4))
    assert not answer
    assert variables == {
        "HOROVOD_CYCLE_TIME": "0.2",
        "HOROVOD_DISABLE_GROUP_FUSION": "1",
        "HOROVOD_FUSION_THRESHOLD": str(8 * 2**20),
    }
    deterministic = options(CommunicationSettings(deterministic=True))[1]
    assert deterministic["HOROVOD_FUSION_THRESHOLD"] == "0"


def test_configure_horovod_turns_on_async_completion_only_with_nccl(options):
    # Otherwise Horovod's thread waits for each sum on the host, and the GPU runs idle.
    without_nccl = options(CommunicationSettings())[1]
    with_nccl = options(CommunicationSettings(), nccl=True)[1]
    assert "HOROVOD_ENABLE_ASYNC_COMPLETION" not in without_nccl
    assert with_nccl["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "1"
    assert without_nccl["HOROVOD_CYCLE_TIME"] == "0.2"
    assert with_nccl["HOROVOD_CYCLE_TIME"] == "0.2"
    set_by_user = options(
        CommunicationSettings(),
        nccl=True,
        HOROVOD_CYCLE_TIME="3",
        HOROVOD_ENABLE_ASYNC_COMPLETION="0",
    )[1]
    assert set_by_user["HOROVOD_CYCLE_TIME"] == "3"
    assert set_by_user["HOROVOD_ENABLE_ASYNC_COMPLETION"] == "0"


FOUR_BY_TWO = ("a", "a", "b", "b", "c", "c", "d", "d")


@pytest.mark.parametrize(
    ("allreduce", "names", "grid", "expected"),
    [
        ("hierarchical", FOUR_BY_TWO, None, True),
        # The composed algorithm raises an error for these hosts.
        ("hierarchical", ("a", "a", "b"), None, False),
        ("torus", FOUR_BY_TWO, None, True),
        ("torus", FOUR_BY_TWO, "2x4", False),
        # The default grid is 2x4 inside one host.
        ("torus", ("a",) * 8, None, False),
        # The default grid is 32x32 (Mikami et al., Table 4), and not 128x8.
        ("torus", tuple(str(i // 8) for i in range(1024)), None, False),
        ("masters", FOUR_BY_TWO, None, False),
    ],
)
def test_native_torus_is_used_only_with_one_row_per_host(allreduce, names, grid, expected):
    settings = CommunicationSettings(allreduce=allreduce)
    if grid:
        settings = settings.with_options({"torus_grid": grid})
    assert engine._horovod_supports_natively(settings, names) == expected


@pytest.mark.parametrize(("nccl", "is_native"), [(True, True), (False, False)])
def test_hierarchical_never_sums_in_the_memory_of_the_hosts(
    options, monkeypatch, caplog, nccl, is_native
):
    # Horovod's hierarchical all-reduce would, but its torus over NCCL is the same algorithm.
    started = []
    monkeypatch.setattr(engine, "read_placement", lambda: Placement(0, 4, 0, 2))
    monkeypatch.setattr(
        engine.hosts,
        "gather_by_mpi",
        lambda key, size: [["a", "", "1"], ["a", "", "1"], ["b", "", "1"], ["b", "", "1"]],
    )
    monkeypatch.setattr(
        engine.hvd, "init", lambda process_sets: started.append([s.ranks for s in process_sets])
    )
    monkeypatch.setattr(engine.hvd, "is_initialized", lambda: bool(started))
    monkeypatch.setattr(engine.hvd, "size", lambda: 4)
    settings = CommunicationSettings(allreduce="hierarchical")
    with caplog.at_level(logging.INFO):
        variables = options(settings, nccl=nccl, call=engine.HorovodCommunicator)[1]
    expected = ["HOROVOD_TORUS_ALLREDUCE"] if is_native else []
    assert [name for name in variables if name.endswith("_ALLREDUCE")] == expected
    assert started == [[] if is_native else [[0, 1], [2, 3], [0, 2], [1, 3]]]
    assert ("Horovod's own torus" in caplog.text) == is_native
