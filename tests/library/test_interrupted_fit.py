"""A `fit` that was interrupted within an epoch, or that has ended, continues as if it had not."""

import contextlib
import errno
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.errors import UserError
from tests.library import models, saving
from tests.support import program


class Interrupt(keras.callbacks.Callback):
    """Raises KeyboardInterrupt after a batch of an epoch."""

    def __init__(self, epoch, batch=0):
        super().__init__()
        self._interrupted_epoch = epoch
        self._batch = batch

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self._epoch, batch) == (self._interrupted_epoch, self._batch):
            raise KeyboardInterrupt


def compiled(optimizer=None):
    keras.utils.set_random_seed(3)
    inner = optimizer or keras.optimizers.SGD(0.1, momentum=0.9)
    return saving.compiled(hi.DistributedOptimizer(inner), run_eagerly=True)


def fit(folder, epochs, *, before=(), after=(), interrupt=None, optimizer=None, **options):
    """Trains with a checkpoint in a folder; returns the model."""
    model = compiled(optimizer() if optimizer else None)
    checkpoint = hi.callbacks.Checkpoint(folder, **options)
    stop = [] if interrupt is None else [Interrupt(*interrupt)]
    with contextlib.suppress(KeyboardInterrupt):
        saving.fit(model, epochs, more=[*before, checkpoint, *after, *stop])
    return model


def halve(epoch, rate):
    return rate / 2


@pytest.mark.parametrize("place", ["before", "after"])
def test_learning_rate_scheduler_halves_once_per_epoch_in_an_interrupted_fit(tmp_path, place):
    whole = fit(tmp_path / "whole", 4, **{place: [keras.callbacks.LearningRateScheduler(halve)]})
    for interrupt in ((2, 0), None):
        scheduler = keras.callbacks.LearningRateScheduler(halve)
        model = fit(tmp_path / "again", 4, **{place: [scheduler]}, interrupt=interrupt)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1 / 2**4)
    assert saving.weights(model) == saving.weights(whole)


@pytest.mark.parametrize("place", ["before", "after"])
def test_learning_rate_scheduler_halves_once_in_an_epoch_that_continues(tmp_path, place):
    """Keras calls `on_epoch_begin` again, with the rate that is halved already."""
    scheduler = {place: [keras.callbacks.LearningRateScheduler(halve)]}
    whole = fit(tmp_path / "whole", 4, **scheduler)
    fit(tmp_path / "again", 4, **scheduler, interrupt=(2, 1), every_seconds=1e-9)
    again = fit(tmp_path / "again", 4, **scheduler)
    assert float(again.optimizer.learning_rate) == pytest.approx(0.1 / 2**4)
    assert saving.weights(again) == saving.weights(whole)


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, hi.optimizers.SGD])
def test_optimizer_created_with_another_rate_continues_with_it_and_a_line(tmp_path, capsys, kind):
    for epochs, rate, line in (
        (1, 0.1, ""),
        (2, 0.05, "learning_rate 0.05 instead of 0.1, because it was created with 0.05 instead of"),
        (3, 0.05, ""),
    ):
        optimizer = fit(tmp_path / "a", epochs, optimizer=functools.partial(kind, rate)).optimizer
        assert float(optimizer.learning_rate) == pytest.approx(rate)
        output = capsys.readouterr().err
        assert line in output
        assert ("instead of" in output) == bool(line)


def test_halved_rate_stays_halved_if_the_optimizer_is_created_with_another_one(tmp_path):
    for epochs, rate in ((2, 0.1), (4, 0.3)):
        model = fit(
            tmp_path / "a",
            epochs,
            after=[keras.callbacks.LearningRateScheduler(halve)],
            optimizer=functools.partial(keras.optimizers.SGD, rate),
        )
        assert float(model.optimizer.learning_rate) == pytest.approx(rate / 2**epochs)


def test_optimizer_created_with_another_momentum_continues_with_it(tmp_path, capsys):
    for epochs, momentum in ((1, 0.9), (2, 0.5)):
        sgd = functools.partial(hi.optimizers.SGD, 0.1, momentum=momentum)
        optimizer = fit(tmp_path / "a", epochs, optimizer=sgd).optimizer
        assert optimizer.inner.hyperparameters["momentum"] == pytest.approx(momentum)
    assert "momentum 0.5 instead of 0.9" in capsys.readouterr().err


def test_rate_set_on_a_trained_optimizer_gives_way_to_the_checkpoint_with_a_line(tmp_path, capsys):
    model = fit(tmp_path / "a", 1)
    model.optimizer.learning_rate = 0.01
    saving.fit(model, 2, more=[hi.callbacks.Checkpoint(tmp_path / "a")])
    assert float(model.optimizer.learning_rate) == pytest.approx(0.1)
    line = "optimizer: learning_rate 0.1 as in the checkpoint, instead of 0.01\n"
    assert line in capsys.readouterr().err


def test_early_stopping_waits_again_in_a_fit_with_another_number_of_epochs(tmp_path):
    for epochs, expected in ((8, [0, 1, 2]), (9, [3, 4])):
        log = EpochLog()
        # No improvement is large enough.
        stopping = keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=2)
        fit(tmp_path / "a", epochs, after=[stopping, log])
        assert log.epochs == expected


def test_callback_that_monitors_another_value_begins_again_with_a_line(tmp_path, capsys):
    """The worst value of the first `fit` would be the best one of the second."""
    for epochs, monitor, best in ((1, "accuracy", 0.0), (3, "loss", 0.1)):
        stopping = keras.callbacks.EarlyStopping(monitor, patience=1, mode="min")
        logs = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: logs.update(accuracy=0.0, loss=0.3 - 0.1 * epoch)
        )
        fit(tmp_path / "a", epochs, before=[logs, stopping])
        assert stopping.best == pytest.approx(best)
    line = "EarlyStopping begins again, because it monitors loss instead of accuracy\n"
    assert line in capsys.readouterr().err


def test_other_number_of_accumulation_steps_starts_the_accumulation_again(tmp_path, capsys):
    """Each gradient is 1 and the rate is 1, so each update is -1."""
    for steps, epochs, expected in ((3, 1, -1), (2, 2, -3)):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), layer])
        optimizer = hi.DistributedOptimizer(
            keras.optimizers.SGD(1.0), gradient_accumulation_steps=steps
        )
        model.compile(optimizer, lambda label, score: score)
        ones = np.ones((4, 1), np.float32)
        checkpoint = hi.callbacks.Checkpoint(tmp_path / "a")
        callbacks = [*hi.callbacks.default_callbacks(), checkpoint]
        model.fit(ones, ones, 1, epochs, 0, callbacks)
        assert layer.kernel.numpy().item() == expected
    line = (
        "optimizer: the gradients of 1 of 3 batches are lost, because gradient_accumulation_steps"
        " is 2 now\n"
    )
    assert line in capsys.readouterr().err


def ema():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5)


@pytest.mark.parametrize("place", ["before", "after"])
def test_averages_that_are_swapped_each_epoch_are_not_trained_after_a_resume(tmp_path, place):
    def run(folder, interrupt=None):
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        return fit(folder, 4, **{place: [swap]}, interrupt=interrupt, optimizer=ema)

    whole = run(tmp_path / "whole")
    run(tmp_path / "again", interrupt=(2, 0))
    again = run(tmp_path / "again")
    # Keras swaps by additions, which round.
    for ours, expected in zip(again.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-6)


def test_more_epochs_continue_from_the_trained_weights_and_not_from_averages(tmp_path):
    whole = fit(tmp_path / "whole", 4, optimizer=ema)
    for epochs in (2, 4):
        model = fit(tmp_path / "again", epochs, optimizer=ema)
    assert saving.weights(model) == saving.weights(whole)


def early_stopping():
    # The loss always falls, so the worst epoch by this measure is the last, and the first is best.
    return keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=9, restore_best_weights=True, start_from_epoch=0
    )


@pytest.mark.parametrize("place", ["before", "after"])
def test_more_epochs_continue_from_the_trained_weights_and_not_from_the_best(tmp_path, place):
    whole = fit(tmp_path / "whole", 4, **{place: [early_stopping()]})
    for epochs in (2, 4):
        model = fit(tmp_path / "again", epochs, **{place: [early_stopping()]})
    assert saving.weights(model) == saving.weights(whole)
    # Nothing is left to train, and the best weights are there again.
    model = fit(tmp_path / "again", 4, **{place: [early_stopping()]})
    assert saving.weights(model) == saving.weights(whole)


class StopAfterFirstBatch(keras.callbacks.Callback):
    """Stops training within an epoch, like a limit of time."""

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= self._epoch == 1


def test_epoch_that_was_stopped_within_is_trained_again(tmp_path, capsys):
    whole = fit(tmp_path / "whole", 3)
    fit(tmp_path / "again", 3, after=[StopAfterFirstBatch()])
    assert "epoch 2 ended after 1 of 4 batches and is not saved" in capsys.readouterr().err
    assert saving.weights(fit(tmp_path / "again", 3)) == saving.weights(whole)


def test_epochs_before_one_that_was_stopped_within_are_not_saved_with_its_weights(tmp_path, capsys):
    whole = fit(tmp_path / "whole", 3)
    fit(tmp_path / "again", 3, after=[StopAfterFirstBatch()], every_epochs=3)
    assert list((tmp_path / "again").glob("step-*")) == []
    assert "is not saved: a resumed fit continues in epoch 1" in capsys.readouterr().err
    assert saving.weights(fit(tmp_path / "again", 3, every_epochs=3)) == saving.weights(whole)


def test_epoch_of_unknown_length_that_was_stopped_within_is_trained_again(tmp_path, capsys):
    x, y = models.data(1)
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(models.BATCH)
    # A filter hides the number of batches.
    batches = batches.filter(lambda x, y: True)

    def run(folder, *more):
        model = compiled()
        checkpoint = hi.callbacks.Checkpoint(folder)
        callbacks = [*hi.callbacks.default_callbacks(), checkpoint, *more]
        model.fit(batches, epochs=3, verbose=0, callbacks=callbacks)
        return saving.weights(model)

    whole = run(tmp_path / "whole")
    run(tmp_path / "again", StopAfterFirstBatch())
    assert "epoch 2 ended after 1 batches and is not saved" in capsys.readouterr().err
    assert run(tmp_path / "again") == whole


class StopAfterEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training |= epoch == 1


class StopAfterLastBatch(StopAfterFirstBatch):
    """Stops training after the last batch of an epoch, which is whole then."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.stop_training |= self._epoch == 1 and batch == models.STEPS - 1


def no_improvement():
    # No improvement is large enough. The best weights are those after the first epoch.
    return keras.callbacks.EarlyStopping(
        "loss", min_delta=10.0, patience=1, restore_best_weights=True
    )


class EpochLog(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize(
    "stop",
    [
        no_improvement,
        lambda: hi.callbacks.StopAtTarget(-100.0, monitor="loss"),
        StopAfterEpoch,
        StopAfterLastBatch,
    ],
    ids=["EarlyStopping", "StopAtTarget", "end of an epoch", "last batch of an epoch"],
)
def test_fit_that_a_callback_has_ended_trains_no_epoch_when_it_starts_again(
    tmp_path, capsys, stop, place
):
    log = EpochLog()
    first = fit(tmp_path / "run", 5, every_epochs=2, **{place: [stop(), log]})
    num_epochs = len(log.epochs)
    assert num_epochs < 5
    for _ in range(2):
        log = EpochLog()
        again = fit(tmp_path / "run", 5, every_epochs=2, **{place: [stop(), log]})
        assert log.epochs == []
        assert saving.weights(again) == saving.weights(first)
        line = f"ended this training after epoch {num_epochs}. To train it further, pass another"
        assert line in capsys.readouterr().err


def test_fit_that_a_callback_has_ended_continues_with_another_number_of_epochs(tmp_path):
    whole = fit(tmp_path / "whole", 4)
    fit(tmp_path / "again", 3, after=[StopAfterEpoch()])
    log = EpochLog()
    model = fit(tmp_path / "again", 4, after=[log])
    assert log.epochs == [2, 3]
    assert saving.weights(model) == saving.weights(whole)


@pytest.mark.parametrize(
    ("saved", "setting", "expected"),
    [
        ("dynamic", "dynamic", 64.0),
        (1, "dynamic", 2.0**15),
        ("dynamic", 1, 1.0),
        (8, 4, 4.0),
    ],
)
def test_resumed_fit_keeps_the_loss_scale_only_if_it_is_set_as_before(
    tmp_path, capsys, saved, setting, expected
):
    def run(loss_scale, epochs, scale=None):
        keras.utils.set_random_seed(3)
        layers = [keras.Input((6,)), keras.layers.Dense(3, dtype="mixed_float16")]
        model = keras.Sequential(layers)
        optimizer = hi.DistributedOptimizer("sgd", loss_scale=loss_scale)
        model.compile(optimizer, models.loss(), run_eagerly=True)
        change = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: scale and optimizer.loss_scale.scale.assign(scale)
        )
        saving.fit(model, epochs, more=[hi.callbacks.Checkpoint(tmp_path / "run"), change])
        return float(optimizer.loss_scale.scale.numpy())

    run(saved, 1, scale=64.0)
    assert run(setting, 2) == expected
    has_changed = saved != setting
    assert ("the loss scale starts again at" in capsys.readouterr().err) == has_changed


def test_fit_without_a_valid_checkpoint_does_not_start_from_zero(tmp_path):
    folder = tmp_path / "checkpoints"
    fit(folder, 1, keep=1)
    (file,) = folder.glob("step-*.npz")
    file.write_bytes(file.read_bytes()[:-100])
    for _ in range(2):
        with pytest.raises(UserError, match=r"None of the checkpoints in .* can be used"):
            fit(folder, 2)
    # Another process may use the directory.
    hi.callbacks.Checkpoint(folder)._lock()


def test_checkpoints_of_the_program_are_rejected(tiny_data, tmp_path):
    done = program.train_here(tiny_data, tmp_path / "run", "--recipe=hybrid", "--max_steps=1")
    assert done.returncode == 0, done.stderr
    with pytest.raises(UserError, match=r"saved by the training program, not by fit\."):
        fit(tmp_path / "run" / "checkpoints", 1)


def test_failed_write_names_how_a_script_continues(tmp_path, monkeypatch):
    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "write", fail)
    with pytest.raises(UserError, match=r"No space left .* then start the same command again"):
        fit(tmp_path / "checkpoints", 1)


def test_failed_write_on_rank_0_ends_all_ranks_with_the_same_error(pools, tmp_path):
    first, second = pools[2].call(saving.failed_write, str(tmp_path))
    assert "disk full" in first
    assert second == first


def test_state_of_a_callback_that_only_rank_0_has_is_not_given_to_other_ranks(pools, tmp_path):
    results = pools[2].call(saving.private_callback, str(tmp_path))
    assert [result["counts"] for result in results] == [[2, 102], [2]]
    for result in results:
        assert "has 1 callback of the class Counter, and rank 0 has 2" in result["error"]


def test_average_begins_at_the_weights_of_rank_0_on_all_ranks(pools):
    first, second = pools[2].call(saving.first_average)
    assert first
    assert second == first


class TwoOptimizers(keras.Model):
    """Trains with one of its two optimizers; the other one would be used later."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.first = hi.DistributedOptimizer("sgd")
        self.second = hi.DistributedOptimizer("adam")

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = models.loss()(y, self(x, training=True))
        variables = self.trainable_variables
        self.first.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


def test_optimizer_that_was_not_used_yet_does_not_prevent_a_resume(tmp_path):
    for epochs in (1, 2):
        model = TwoOptimizers()
        model(np.zeros((1, 6)))
        model.compile(run_eagerly=True)
        saving.fit(model, epochs, more=[hi.callbacks.Checkpoint(tmp_path / "checkpoints")])
        assert not model.second.built
    assert int(model.first.iterations) == 2 * models.STEPS


def averaging():
    return hi.DistributedOptimizer(hi.optimizers.SGD(0.1), average=hi.optimizers.WeightAverage(0.9))


def averages(model):
    return [v.numpy() for v in model.optimizer.average.variables]


def test_average_begins_at_the_weights_with_which_fit_begins():
    model = saving.compiled(averaging(), run_eagerly=True)
    model.optimizer.build(model.trainable_variables)
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    hi.broadcast_model(model)
    assert all((average == 1).all() for average in averages(model))


def test_average_that_no_checkpoint_contains_begins_at_the_restored_weights(tmp_path):
    for epochs in (1, 1):
        model = saving.compiled(averaging(), run_eagerly=True)
        saving.fit(model, epochs, more=[hi.callbacks.Checkpoint(tmp_path / "checkpoints")])
    for average, weight in zip(averages(model), model.get_weights(), strict=True):
        np.testing.assert_array_equal(average, weight)


@pytest.mark.parametrize("options", [{"keep": 0}, {"every_epochs": 0}])
def test_checkpoint_with_an_impossible_number_is_rejected(tmp_path, options):
    with pytest.raises(UserError, match=f"{next(iter(options))}=0 must be 1 or more"):
        hi.callbacks.Checkpoint(tmp_path, **options)


def test_model_with_bfloat16_weights_continues(tmp_path):
    def run(folder, epochs):
        keras.utils.set_random_seed(3)
        layers = [keras.Input((6,)), keras.layers.Dense(3, dtype="bfloat16")]
        model = keras.Sequential(layers)
        model.compile(hi.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.loss())
        return saving.fit(model, epochs, more=[hi.callbacks.Checkpoint(folder)])

    whole = run(tmp_path / "whole", 3)
    for epochs in (1, 3):
        model = run(tmp_path / "again", epochs)
    assert model.weights[0].dtype == "bfloat16"
    for ours, expected in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_best_weights_of_a_bfloat16_model_continue(tmp_path):
    def run(folder, epochs):
        keras.utils.set_random_seed(3)
        layers = [keras.Input((6,)), keras.layers.Dense(3, dtype="bfloat16")]
        model = keras.Sequential(layers)
        model.compile(hi.DistributedOptimizer(keras.optimizers.SGD(0.1)), models.loss())
        return saving.fit(model, epochs, more=[hi.callbacks.Checkpoint(folder), early_stopping()])

    whole = run(tmp_path / "whole", 2)
    for epochs in (1, 2):
        model = run(tmp_path / "again", epochs)
    for ours, expected in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_file_name_counts_no_batches_beyond_the_epoch_with_steps_per_execution(tmp_path):
    model = saving.compiled(hi.DistributedOptimizer("sgd"), steps_per_execution=3)
    saving.fit(model, 1, more=[hi.callbacks.Checkpoint(tmp_path / "checkpoints")])
    (file,) = (tmp_path / "checkpoints").glob("step-*.npz")
    assert file.name == f"step-{models.STEPS:09d}.npz"
