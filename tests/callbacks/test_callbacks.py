"""Callbacks of the program, event by event."""

import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import optimizers
from hybrid_imagenet.callbacks import callback_state
from hybrid_imagenet.callbacks.save_checkpoints import SaveCheckpoints
from hybrid_imagenet.callbacks.skipped_steps_guard import SkippedStepsGuard
from hybrid_imagenet.callbacks.stop_at_target import StopAtTarget
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.callbacks.trust_ratio_log import TrustRatioLog
from hybrid_imagenet.callbacks.weight_check import WeightCheck
from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.errors import NumericsError, UserError
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.training.accumulators import ClassificationSums, sum_over_ranks
from hybrid_imagenet.training.delayed_readback import DelayedReadback
from tests.checkpoints import support
from tests.support.fake_run import FakeRun, attach


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
def test_trust_ratio_log_adds_ratios_if_lars_runs(name, arguments, recorded):
    inner = optimizers.create(name, **arguments)
    variables = [keras.Variable(np.ones((2, 2), np.float32), name="kernel"), variable(1.0)]
    inner.build(variables)
    log = TrustRatioLog(inner, variables)
    inner.hyperparameters.assign({"phase": 0.0})
    logs = {}
    log.on_epoch_end(0, logs)
    assert logs == {}
    inner.hyperparameters.assign({"phase": 1.0})
    log.on_epoch_end(1, logs)
    assert logs == ({"trust_ratios": {"kernel": 1.0}} if recorded else {})


def test_metric_average_divides_sums_of_all_ranks_once():
    others = np.array([10.0, 1.0, 2.0, 30.0])
    means = sum_over_ranks(
        ClassificationSums(2.0, 3.0, 4.0, 6.0), lambda vector, name: vector + others
    ).means("train")
    assert means == {"train_loss": 12 / 36, "train_top1": 4 / 36, "train_top5": 6 / 36}


def test_skipped_steps_guard_stops_a_run_that_only_skips():
    optimizer = DistributedOptimizer(
        optimizers.create("sgd", weight_decay=0.0, learning_rate=0.1),
        loss_scale=1,
        communicator=SingleProcess(),
    )
    weights = [keras.Variable(np.ones(1, np.float32), name=name) for name in ("stem", "head")]
    optimizer.build(weights)
    guard = SkippedStepsGuard(optimizer, 3)
    run = attach(guard, FakeRun()).run
    run.read = DelayedReadback(optimizer.telemetry_variables(), 0).read
    for step in (1, 2):
        optimizer.apply([tf.constant([1.0]), tf.constant([np.nan])])
        logs = {"step": step, "train_loss": float("nan")}
        guard.on_train_batch_end(step, logs)
        assert logs["skipped_steps"] == step
    optimizer.apply([tf.constant([1.0]), tf.constant([np.nan])])
    # Without logs, nothing was read from the device.
    guard.on_train_batch_end(3, None)
    with pytest.raises(NumericsError, match=r"step 3: the last 3 steps .*; in head, last"):
        guard.on_train_batch_end(3, {"step": 3, "train_loss": float("nan")})


def test_weight_check_names_the_rank_whose_weights_differ():
    def check(gather, *values):
        communicator = types.SimpleNamespace(allgather_object=gather)
        log = attach(WeightCheck([variable(*values)]), FakeRun(communicator=communicator))
        log.on_epoch_end(0)

    def checksum(*values):
        checksums = []
        check(lambda value: checksums.append(value) or [value], *values)
        return checksums[0]

    assert checksum(1.0, 2.0) == checksum(1.0, 2.0)
    assert checksum(1.0, 2.0) != checksum(1.0, np.nextafter(np.float32(2.0), np.float32(3.0)))
    check(lambda value: [value] * 4, 1.0)
    with pytest.raises(NumericsError, match="weights of rank 2 differ"):
        check(lambda value: [value, value, value + 1, value], 1.0)


def end_epoch(state, top1, epochs, target=None):
    """Ends an epoch with the result of a validation, and returns whether training stops."""
    callback = attach(StopAtTarget(target, monitor="val_top1"), FakeRun(state))
    callback.on_epoch_end(0, {"val_top1": top1, "epoch": epochs})
    return bool(state.stop)


def test_stop_at_target_keeps_the_first_best_and_stops_at_the_target():
    state = RunState()
    for epochs, top1, stop in [(1, 0.5, ""), (3, 0.4, ""), (4, 0.5, ""), (5, 0.9, "target")]:
        assert end_epoch(state, top1, epochs, 0.9) == bool(stop)
        assert state.stop == stop
        assert (state.best_top1, state.best_epoch) == ((0.9, 5) if stop else (0.5, 1))
    end_epoch(first := RunState(), 0.0, 1)
    assert first.best_epoch == 1


class WeightCheckpoints(SaveCheckpoints):
    """Saves one variable, and notes the steps at which it is saved."""

    def __init__(self, weights, **options):
        super().__init__(**options)
        self.saved_steps = []
        self._weights = weights

    def trained_variables(self):
        return {"w": self._weights}

    def describe(self):
        self.saved_steps.append(self.run.state.step)
        return support.meta(0)


def test_save_checkpoints_saves_when_due_and_once(tmp_path):
    state = RunState()
    store = CheckpointStore(tmp_path, keep=10)
    weights = variable(0.0)
    run = FakeRun(state, is_at_end=lambda: state.finished_epochs == 3)
    callback = attach(WeightCheckpoints(weights, every_epochs=2, every_steps=3), run)
    callback.start(store, [], {})
    for epoch in range(3):
        for batch in range(4):
            state.step += 1
            run.save_requested = state.step == 7
            weights.assign([float(state.step)])
            callback.on_train_batch_end(batch)
        state.finished_epochs = epoch + 1
        state.recorded_at = epoch + 1
        callback.on_epoch_end(epoch, {"epoch": epoch + 1})
    callback.on_train_end()
    # It saves after every third step, by request at step 7, after epoch 2 (step 8) and after the
    # last epoch (step 12, for the second time).
    assert callback.saved_steps == [3, 6, 7, 8, 9, 12, 12]
    assert [p.name for p in store.paths()] == [f"step-{s:09d}.npz" for s in (12, 9, 8, 7, 6, 3)]
    latest = store.paths()[0]
    assert archive.read_meta(latest)["state"]["finished_epochs"] == 3
    assert archive.read(latest).arrays["w"] == [12.0]


def test_save_checkpoints_for_two_reasons_at_one_step_saves_once(tmp_path):
    state = RunState()
    callback = WeightCheckpoints(variable(0.0), every_epochs=0.5, every_steps=4)
    attach(callback, FakeRun(state, position=lambda: state.step / 8))
    callback.start(CheckpointStore(tmp_path, keep=10), [], {})
    for batch in range(6):
        state.step += 1
        callback.on_train_batch_end(batch)
    # Step 4 is half an epoch. Nothing is due at step 5.
    assert callback.saved_steps == [4]
    callback.finish()


def test_save_checkpoints_saves_each_best_epoch_and_the_store_keeps_the_best(tmp_path):
    state = RunState()
    store = CheckpointStore(tmp_path, keep=1, keep_best=True)
    run = FakeRun(state, is_at_end=lambda: state.finished_epochs == 6)
    callback = attach(WeightCheckpoints(variable(0.0), every_epochs=5, save_best=True), run)
    callback.start(store, [], {})
    for epoch, top1 in enumerate([0.3, 0.2, 0.6, 0.6, 0.5, None]):
        state.step += 4
        state.finished_epochs = epoch + 1
        state.cursor = Cursor(epoch + 1, 0)
        if top1 is not None:
            end_epoch(state, top1, epoch + 1)
        callback.on_epoch_end(epoch, {"epoch": epoch + 1, "val_top1": top1})
    callback.on_train_end()
    # It saves the best so far after epochs 1 and 3, the fifth epoch, and the last.
    assert callback.saved_steps == [4, 12, 20, 24]
    assert [p.name for p in store.paths()] == ["step-000000024.npz", "step-000000012.npz"]
    assert store.best_valid().meta["val_top1"] == 0.6
    state.best_epoch = 7
    state.step = 28
    state.recorded_at = 6.0
    without_best = attach(WeightCheckpoints(variable(0.0), every_epochs=5), FakeRun(state))
    without_best.start(store, [], {})
    state.step = 32
    without_best.on_epoch_end(6, {"epoch": 7, "val_top1": 0.9})
    assert without_best.saved_steps == []


class WithState(TrainingCallback):
    """Has a variable with a given name, and a state with a given value."""

    def __init__(self, name, value=0):
        super().__init__()
        self._name = name
        self._value = value

    def variables(self):
        return {self._name: variable(0.0)}

    def state_dict(self):
        return {"value": self._value}

    def load_state_dict(self, state):
        self._value = state["value"]


def test_save_checkpoints_restores_callbacks_after_they_began_and_before_their_epoch():
    saved = callback_state.states_of([WithState("a", 1), WithState("b", 2)])
    assert saved == {"WithState#0": {"value": 1}, "WithState#1": {"value": 2}}
    before, after = WithState("a"), WithState("b")
    callback = attach(WeightCheckpoints(variable(0.0), every_epochs=1), FakeRun())
    callback.start(None, [before, callback, after], saved)
    callback.on_train_begin()
    assert (before.state_dict(), after.state_dict()) == ({"value": 1}, {"value": 0})
    callback.on_epoch_begin(0)
    assert (before.state_dict(), after.state_dict()) == ({"value": 1}, {"value": 2})


def test_variables_of_two_callbacks_with_one_name_are_rejected():
    with pytest.raises(UserError, match=r"WithState and WithState both save .* the name ema/a"):
        callback_state.saved_variables([WithState("ema/a"), WithState("ema/a")])
    # `fit` compares only the beginning of such names.
    with pytest.raises(UserError, match="the name ema/0001"):
        callback_state.saved_variables([WithState("ema/0001/mean"), WithState("ema/0001/variance")])


@pytest.mark.parametrize("name", ["model/0000/kernel", "callbacks/x"])
def test_variables_of_callbacks_with_names_of_other_parts_are_rejected(name):
    with pytest.raises(UserError, match=f"name {name}, which another part of a checkpoint uses"):
        callback_state.saved_variables([WithState(name)])


def test_state_that_json_cannot_represent_is_rejected_with_the_class():
    with pytest.raises(UserError, match=r"state_dict\(\) of WithState .* float32"):
        callback_state.states_of([WithState("a", np.float32(1))])
