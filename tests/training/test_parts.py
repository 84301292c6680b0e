import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.errors import NumericsError
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.training.accumulators import ClassificationSums, over_ranks
from hybrid_imagenet.training.checkpoint_saver import CheckpointSaver
from hybrid_imagenet.training.epoch_values import NumericsGuard, TrustRatios, WeightCheck
from hybrid_imagenet.training.late_copies import LateCopies
from hybrid_imagenet.training.trainer import Trainer
from tests.checkpoints import support


def variable(*values):
    return keras.Variable(np.array(values, np.float32))


@pytest.mark.parametrize(
    ("name", "arguments", "recorded"),
    [
        ("hybrid", {}, True),
        ("hybrid", {"lars_variant": "none"}, False),
        ("sgd", {}, False),
    ],
)
def test_trust_ratios_are_recorded_where_lars_runs(name, arguments, recorded):
    inner = optimizers.create(name, **arguments)
    variables = [keras.Variable(np.ones((2, 2), np.float32), name="kernel"), variable(1.0)]
    inner.build(variables)
    ratios = TrustRatios(inner, variables)
    inner.hyperparameters.assign({"phase": 0.0})
    assert ratios(0) == {}
    inner.hyperparameters.assign({"phase": 1.0})
    assert ratios(1) == ({"trust_ratios": {"kernel": 1.0}} if recorded else {})


def test_metric_average_divides_sums_of_all_ranks_once():
    others = np.array([10.0, 1.0, 2.0, 30.0])
    means = over_ranks(
        ClassificationSums(2.0, 3.0, 4.0, 6.0), lambda vector, name: vector + others
    ).means("train")
    assert means == {"train_loss": 12 / 36, "train_top1": 4 / 36, "train_top5": 6 / 36}


def test_the_guard_stops_a_run_that_only_skips():
    optimizer = DistributedOptimizer(
        optimizers.create("sgd", weight_decay=0.0, learning_rate=0.1),
        loss_scale=1,
        communicator=SingleProcess(),
    )
    weights = [keras.Variable(np.ones(1, np.float32), name=name) for name in ("stem", "head")]
    optimizer.build(weights)
    guard = NumericsGuard(optimizer, 3, LateCopies(optimizer.telemetry_variables(), 0))
    for step in (1, 2):
        optimizer.apply([tf.constant([1.0]), tf.constant([np.nan])])
        assert guard.check(step, float("nan"))["skipped_steps"] == step
    optimizer.apply([tf.constant([1.0]), tf.constant([np.nan])])
    with pytest.raises(NumericsError, match=r"step 3: the last 3 steps .*; in head, last"):
        guard.check(3, float("nan"))


def test_a_rank_whose_weights_differ_is_named():
    def checksum(*values):
        seen = []
        WeightCheck(lambda own: seen.append(own) or [own], [variable(*values)])(0)
        return seen[0]

    assert checksum(1.0, 2.0) == checksum(1.0, 2.0)
    assert checksum(1.0, 2.0) != checksum(1.0, np.nextafter(np.float32(2.0), np.float32(3.0)))
    assert WeightCheck(lambda own: [own] * 4, [variable(1.0)])(0) == {}
    with pytest.raises(NumericsError, match="weights of rank 2 differ"):
        WeightCheck(lambda own: [own, own, own + 1, own], [variable(1.0)])(0)


def test_best_and_target():
    state = RunState()
    for epochs, top1, stop in [(1, 0.5, ""), (3, 0.4, ""), (4, 0.5, ""), (5, 0.9, "target")]:
        judge(state, top1, epochs, 0.9)
        assert state.stop == stop
        assert (state.best_top1, state.best_epoch) == ((0.9, 5) if stop else (0.5, 1))
    judge(first := RunState(), 0.0, 1)
    assert first.best_epoch == 1


def judge(state, top1, epochs, target=None):
    """What a trainer does with the result of a validation."""
    config = types.SimpleNamespace(stop_at_top1=target)
    Trainer(types.SimpleNamespace(state=state, config=config))._judge(top1, epochs)


def saver(store, state, weights, merged, **options):
    return CheckpointSaver(
        store=store,
        state=state,
        variables=lambda: {"w": weights},
        describe=lambda: merged.append(state.step) or support.meta(0),
        **options,
    )


def test_checkpoints_are_saved_when_due_and_once(tmp_path):
    state, merged = RunState(), []
    store = CheckpointStore(tmp_path, keep=10)
    weights = variable(0.0)
    callback = saver(
        store, state, weights, merged, every_epochs=2, every_steps=3, is_last=lambda done: done == 3
    )
    for epoch in range(3):
        for _ in range(4):
            state.step += 1
            weights.assign([float(state.step)])
            callback.after_step(0.0, asked=state.step == 7)
        state.finished_epochs = state.recorded_at = epoch + 1
        callback.after_epoch(epoch + 1)
    callback.finish()
    # Every third step, by request at 7, after epoch 2 (step 8) and after the last epoch (step 12, a
    # second time).
    assert merged == [3, 6, 7, 8, 9, 12, 12]
    assert [p.name for p in store.paths()] == [f"step-{s:09d}.npz" for s in (12, 9, 8, 7, 6, 3)]
    newest = store.paths()[0]
    assert archive.read_meta(newest)["state"]["finished_epochs"] == 3
    assert archive.read(newest).arrays["w"] == [12.0]


def test_each_best_epoch_is_saved_and_the_best_of_them_kept(tmp_path):
    state, merged = RunState(), []
    store = CheckpointStore(tmp_path, keep=1, keep_best=True)
    options = {"every_epochs": 5, "every_steps": None, "is_last": lambda done: done == 6}
    callback = saver(store, state, variable(0.0), merged, **options, save_best=True)
    for epoch, top1 in enumerate([0.3, 0.2, 0.6, 0.6, 0.5, None]):
        state.step += 4
        state.finished_epochs, state.cursor = epoch + 1, Cursor(epoch + 1, 0)
        if top1 is not None:
            judge(state, top1, epoch + 1)
        callback.after_epoch(epoch + 1, top1)
    callback.finish()
    assert merged == [4, 12, 20, 24]  # the best so far after epochs 1 and 3, the fifth, the last
    assert [p.name for p in store.paths()] == ["step-000000024.npz", "step-000000012.npz"]
    assert store.best_valid().meta["val_top1"] == 0.6
    merged.clear()
    state.best_epoch, state.step = 7, 28
    saver(store, state, variable(0.0), merged, **options).after_epoch(7, 0.9)
    assert merged == []  # --nokeep_best
