"""StallWatchdog: it tells its watchdog how `fit` advances, and ends with it."""

import random
from unittest import mock

import keras
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import stall_watchdog
from tests.library import models


def test_every_step_and_validation_counts_as_progress_and_the_watch_ends_with_fit(tmp_path):
    model = models.made(hi.DistributedOptimizer("sgd"), run_eagerly=True)
    x, y = models.data(1)
    half = slice(0, len(x) // 2)
    watch = hi.callbacks.StallWatchdog(7)
    notes = []
    with mock.patch.object(stall_watchdog, "Watchdog") as made:
        dog = made.return_value
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
    assert made.call_args.args[1] == 7
    assert [name for name, _, _ in dog.method_calls if name != "record_progress"] == [
        "start",
        "stop",
    ] * 2
    steps = [*range(1, 2 * models.STEPS + 1)] * 2  # over both epochs, in each call of fit
    assert [n for n in notes if n is not None] == steps
    assert notes.count(None) == 2 * 2 * (2 + 1)  # batches of validation and the end of the epoch


def test_an_exception_that_ends_fit_ends_the_watch_and_fit_can_go_on(capfd):
    model = models.made(hi.DistributedOptimizer("sgd"), run_eagerly=True)
    x, y = models.data(1)
    watch = hi.callbacks.StallWatchdog(1)
    state = random.getstate()
    fails = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / (1 - batch))
    with pytest.raises(
        ZeroDivisionError
    ):  # its traceback holds the frames of `fit` until the end of this test
        model.fit(x, y, models.BATCH, callbacks=[watch, fails])
    assert random.getstate() == state  # ranks of a program may draw their shares by it
    thread = watch._watchdog._thread
    thread.join(5)
    assert not thread.is_alive()
    model.fit(x, y, models.BATCH, callbacks=[watch])
    assert "stall" not in capfd.readouterr().err
