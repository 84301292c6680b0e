"""Default callbacks: rejected arguments, and the end of a run whose ranks drift apart."""

import importlib.util
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import compare_ranks, train_function
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers import compiled_model
from tests.library import models, programs
from tests.library.evaluated import Largest
from tests.support.fake_run import FakeRun, attach


def test_default_callbacks_reject_callbacks_that_rank_0_must_not_run_alone(tmp_path):
    class Gentle(keras.callbacks.ReduceLROnPlateau):
        pass

    class WithVariables(hi.callbacks.TrainingCallback):
        def variables(self):
            return {}

    for callback in (
        Gentle(),
        WithVariables(),
        keras.callbacks.EarlyStopping(),
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.1),
        hi.callbacks.Checkpoint(tmp_path),
        hi.callbacks.StopAtTarget(0.9),
        hi.callbacks.DivergenceGuard(),
        hi.callbacks.SwapAveragedWeights(hi.optimizers.WeightAverage(0.9)),
    ):
        with pytest.raises(
            UserError,
            match=rf"pass it to every rank.*default_callbacks\(\.\.\.\), {type(callback).__name__}",
        ):
            hi.callbacks.default_callbacks(callback)
    with pytest.raises(UserError, match="omit it, because all ranks skip"):
        hi.callbacks.default_callbacks(keras.callbacks.TerminateOnNaN())
    files = [
        keras.callbacks.CSVLogger(tmp_path / "log"),
        keras.callbacks.ModelCheckpoint(tmp_path / "m.keras"),
    ]
    assert [c for c in hi.callbacks.default_callbacks(*files) if c in files] == files


def test_checkpoint_of_weights_that_are_not_validated_is_rejected(tmp_path):
    def fit(*callbacks):
        model = models.compiled(hi.DistributedOptimizer(keras.optimizers.SGD(0.1, use_ema=True)))
        x, y = models.vectors(8)
        model.fit(x, y, 4, verbose=0, callbacks=callbacks)

    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "m.keras")
    with pytest.raises(UserError, match="so it would save other weights than those that were"):
        fit(*hi.callbacks.default_callbacks(checkpoint), swap)
    fit(*hi.callbacks.default_callbacks(), swap, *hi.callbacks.on_rank_zero(checkpoint))
    assert (tmp_path / "m.keras").exists()


def test_callback_that_writes_before_the_averages_is_rejected(tmp_path):
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    first = [*hi.callbacks.on_rank_zero(log), *hi.callbacks.default_callbacks()]

    def check(callbacks, others):
        ranks = mock.Mock(allgather_object=lambda names: [names, others])
        compare_ranks._check_averages_are_written(callbacks, ranks)

    with pytest.raises(UserError, match=r"CSVLogger comes before default_callbacks\(\), so it"):
        check(first, [])
    check(first, ["CSVLogger"])
    check(hi.callbacks.default_callbacks(log), [])
    check([*hi.callbacks.default_callbacks(), log], [])
    check([log], [])


def test_metric_of_unknown_states_warns_once_that_it_is_a_mean_over_ranks(caplog):
    average = hi.callbacks.MetricAverage()
    for metric in (Largest(sums_over_ranks=False), Largest(), Largest()):
        average._warn_of_mean(metric)
    (record,) = caplog.records
    assert "The metric largest is averaged over ranks with equal weight" in record.message
    assert "states of the class Largest may not be sums" in record.message


def test_optimizers_of_a_model_share_the_sum_of_requests():
    model = models.plain(1)
    model.first = hi.DistributedOptimizer("sgd")
    model.second = hi.DistributedOptimizer("adam")
    for _ in range(2):
        train_function._sum_requests(model)
        shared = compiled_model.request_sum(model)
        assert shared is not None
        assert model.first.reducer.request_sum is shared
        assert model.second.reducer.request_sum is shared


def test_on_rank_zero_without_the_tensorboard_package_is_rejected(tmp_path):
    board = keras.callbacks.TensorBoard(tmp_path)
    with (
        mock.patch.object(importlib.util, "find_spec", return_value=None),
        pytest.raises(UserError, match="install"),
    ):
        hi.callbacks.on_rank_zero(board)
    with mock.patch.object(importlib.util, "find_spec"):
        assert hi.callbacks.on_rank_zero(board) == [board]


@pytest.mark.parametrize(("size", "frequency", "warns"), [(2, 3, 1), (2, "epoch", 0), (1, 3, 0)])
def test_model_checkpoint_within_an_epoch_warns_with_several_ranks(
    size, frequency, warns, tmp_path, capsys
):
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "a.keras", save_freq=frequency)
    with mock.patch.object(process, "size", lambda: size):
        hi.callbacks.default_callbacks(checkpoint)
    assert capsys.readouterr().err.count("warning: ModelCheckpoint(save_freq=3)") == warns


def test_default_callbacks_watch_several_ranks_for_stalls():
    def limits(**arguments):
        watches = [
            c
            for c in hi.callbacks.default_callbacks(**arguments)
            if isinstance(c, hi.callbacks.StallWatchdog)
        ]
        return [watch._stall_seconds for watch in watches]

    assert limits() == []
    with mock.patch.object(process, "size", lambda: 2):
        assert (limits(), limits(stall_timeout=7), limits(stall_timeout=0)) == ([600], [7], [])


def trained_on_nan(count, **settings):
    """Trains on NaN, and returns the message of the error."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)]
    )
    optimizer = hi.DistributedOptimizer(keras.optimizers.SGD(), **settings)
    model.compile(optimizer, "mse", run_eagerly=True)
    # The ReLU hides the NaN from the loss.
    x = np.full((count, 1), np.nan, np.float32)
    with pytest.raises(UserError) as caught:
        model.fit(x, x[:, 0] * 0, 1, verbose=0, callbacks=hi.callbacks.default_callbacks())
    return str(caught.value)


def test_fit_that_skips_all_steps_ends_with_a_remedy():
    for count, what in ((5, "all steps"), (60, "the last 50 steps")):
        message = trained_on_nan(count)
        assert message.startswith(f"optimizer: {what}")
        assert message.endswith("look for NaN in the data, or scale large targets")


def test_fit_that_skips_all_steps_is_not_advised_to_repeat_a_setting():
    in_fp16 = trained_on_nan(2, compression="fp16")
    assert in_fp16.endswith('or scale large targets, or set compression="none"')
    fixed = trained_on_nan(2, loss_scale=8)
    assert fixed.endswith('or scale large targets, or set loss_scale="dynamic"')


def test_fit_that_skips_all_steps_on_equal_data_names_the_data_first(pools):
    first, second = pools[2].call(programs.all_steps_skipped)
    assert first == second
    assert first["same"].startswith(
        "All ranks had the same loss, so they seem to have the same data. Give each rank"
    )
    assert "optimizer: all steps were skipped, because" in first["same"]
    assert first["different"].startswith("optimizer: all steps were skipped, because")


def test_schedule_without_the_default_callbacks_is_warned_about(caplog):
    for callbacks, warnings in ((hi.callbacks.default_callbacks(), 0), ([], 1)):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        schedule = hi.schedules.cosine(peak=0.01, epochs=1, warmup_epochs=0)
        model.compile(
            hi.DistributedOptimizer(hi.optimizers.SGD(), schedule=schedule), "mse", run_eagerly=True
        )
        model.fit(np.ones((4, 1)), np.ones(4), verbose=0, callbacks=callbacks)
        assert caplog.text.count("does nothing without default_callbacks()") == warnings


@pytest.mark.parametrize("kind", ["keras", "hi"])
def test_compare_ranks_rejects_an_optimizer_that_is_not_distributed(kind):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd" if kind == "keras" else hi.optimizers.SGD(0.1), "mse")
    callback = next(
        c for c in hi.callbacks.default_callbacks() if isinstance(c, hi.callbacks.CompareRanks)
    )
    callback.set_model(model)
    callback.set_params({"epochs": 1, "steps": 1})
    callback.on_train_begin()
    two = mock.Mock(return_value=mock.Mock(size=2))
    with (
        mock.patch.object(process, "communicator", two),
        pytest.raises(UserError, match="DistributedOptimizer"),
    ):
        callback.on_train_begin()


@pytest.fixture
def restored_compare_ranks():
    """Returns the callback after another one has restored a state whose last step was skipped."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(hi.DistributedOptimizer("sgd"), "mse")
    callback = attach(hi.callbacks.CompareRanks(), FakeRun(model=model))
    callback.set_model(model)
    callback.on_train_begin()
    model.optimizer.iterations.assign(7)
    model.optimizer.loss_scale.skipped_in_a_row.assign(1)
    return callback


def test_compare_ranks_in_a_resumed_run_that_skips_all_steps_raises(restored_compare_ranks):
    restored_compare_ranks.on_epoch_begin(1)
    with pytest.raises(UserError, match="all steps were skipped"):
        restored_compare_ranks.on_train_end()


def test_compare_ranks_in_a_resumed_run_without_epochs_left_passes(restored_compare_ranks):
    restored_compare_ranks.model.optimizer.iterations.assign(0)
    restored_compare_ranks.on_train_end()


def test_logs_of_a_custom_train_step_keep_its_loss():
    class FixedLoss(keras.Model):
        def train_step(self, data):
            return {"loss": tf.constant(3.5), "mae": tf.constant(1.5)}

    image = keras.Input((1,))
    model = FixedLoss(image, keras.layers.Dense(1)(image))
    model.compile(hi.DistributedOptimizer(keras.optimizers.SGD()), run_eagerly=True)
    logs = model.fit(
        np.ones((4, 1)), np.ones(4), verbose=0, callbacks=hi.callbacks.default_callbacks()
    ).history
    assert (logs["loss"], logs["mae"]) == ([3.5], [1.5])


def test_compare_ranks_names_the_differences_that_a_callback_made(pools):
    first, second = pools[2].call(programs.callback_differences)
    assert (first.pop("same data"), second.pop("same data")) == ([1, 0, 0], [0, 0, 0])
    assert first == second
    assert "optimizer.learning_rate (0.5 on rank 0; 0.01" in first["learning rate"]
    assert "weights (" in first["weights"] and "learning_rate (" not in first["weights"]
    assert "what comes next (training ends on rank 0; epoch 3 begins on rank 1)" in first["stop"]
    assert (
        "what comes next (validation on rank 0; the end of the epoch on rank 1)"
        in first["validation"]
    )
    writers = (
        "ModelCheckpoint('never.keras') on 2 ranks would write the same files: pass it to"
        " hybrid_imagenet."
    )
    assert first.pop("writers").startswith(writers)
    assert first.pop("early writer").startswith("CSVLogger comes before default_callbacks()")
    assert all("to every rank" in text and "\n" not in text for text in first.values())


def test_fit_that_skips_many_steps_warns_once(capsys):
    class CountSkippedSteps(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.loss_scale.skipped_steps.assign_add(20)

    model = models.compiled(hi.DistributedOptimizer("sgd"))
    x, y = models.data(1)
    callbacks = [*hi.callbacks.default_callbacks(), CountSkippedSteps()]
    model.fit(x, y, models.BATCH, 3, 0, callbacks)
    lines = [line for line in capsys.readouterr().err.splitlines() if "were skipped" in line]
    steps = models.STEPS
    assert lines == [
        f"warning: optimizer: 20 of {20 + steps} steps were skipped, because their gradients are"
        " not finite in FP16. Batches with large losses are lost. Clip or scale the loss, or"
        " compute in FP32 or BF16."
    ]
