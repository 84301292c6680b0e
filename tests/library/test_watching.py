"""StallWatchdog reports the progress of `fit` to its watchdog, and stops it at the end."""

import random
from unittest import mock

import keras
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import stall_watchdog
from tests.library import models


def test_stall_watchdog_counts_steps_and_validation_and_stops_with_fit(tmp_path):
    model = models.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True)
    x, y = models.data(1)
    half = slice(0, len(x) // 2)
    watch = hi.callbacks.StallWatchdog(7)
    notes = []
    with mock.patch.object(stall_watchdog, "Watchdog") as watchdog_class:
        dog = watchdog_class.return_value
        dog.record_progress.side_effect = notes.append
        for name in "ab":
            callbacks = [
                *hi.callbacks.default_callbacks(),
                hi.callbacks.Checkpoint(tmp_path / name),
                watch,
            ]
            arguments = {
                "validation_data": (x[half], y[half]),
                "validation_batch_size": models.BATCH,
            }
            model.fit(x, y, models.BATCH, 2, 0, callbacks, **arguments)
    assert watchdog_class.call_args.args[1] == 7
    assert not watchdog_class.call_args.kwargs["has_long_steps"]
    calls = [name for name, _, _ in dog.method_calls]
    assert [name for name in calls if not name.startswith("record")] == ["start", "stop"] * 2
    assert "record_stop" not in calls
    # Each call of fit counts steps over both epochs.
    steps = [*range(1, 2 * models.STEPS + 1)] * 2
    assert [n for n in notes if n is not None] == steps
    assert [call.args[0] for call in dog.record_begin.call_args_list] == steps
    # Each epoch has two batches of validation and an end.
    assert notes.count(None) == 2 * 2 * (2 + 1)


@pytest.mark.parametrize("validates", [False, True])
def test_stall_watchdog_records_a_stop_before_a_rank_would_wait_for_others(validates):
    model = models.compiled(hi.DistributedOptimizer("sgd"), steps_per_execution=2)
    x, y = models.data(1)
    order = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

        def on_test_begin(self, logs=None):
            order.append("validation")

        def on_epoch_end(self, epoch, logs=None):
            order.append("end")

    with mock.patch.object(stall_watchdog, "Watchdog") as watchdog_class:
        dog = watchdog_class.return_value
        dog.record_stop.side_effect = lambda: order.append("stop")
        data = {"validation_data": (x, y)} if validates else {}
        callbacks = [hi.callbacks.StallWatchdog(7), Stop()]
        model.fit(x, y, models.BATCH, 2, 0, callbacks, **data)
    assert order[:2] == ["stop", "validation" if validates else "end"]
    # The first execution of two batches was the last one.
    assert [call.args[0] for call in dog.record_begin.call_args_list] == [1]
    assert watchdog_class.call_args.kwargs["has_long_steps"]


def test_stall_watchdog_stops_if_fit_raises_and_starts_again(capfd):
    model = models.compiled(hi.DistributedOptimizer("sgd"), run_eagerly=True)
    x, y = models.data(1)
    watch = hi.callbacks.StallWatchdog(1)
    state = random.getstate()
    fails = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / (1 - batch))
    # The traceback keeps the frames of `fit` alive until the end of this test.
    with pytest.raises(ZeroDivisionError):
        model.fit(x, y, models.BATCH, callbacks=[watch, fails])
    # A user's program may draw the shares of ranks from this generator.
    assert random.getstate() == state
    thread = watch._watchdog._thread
    thread.join(5)
    assert not thread.is_alive()
    model.fit(x, y, models.BATCH, callbacks=[watch])
    assert "stall" not in capfd.readouterr().err
