"""`fit` under the eyes of StallWatchdog; in the second epoch rank 1 hangs: KIND (`waits` or `stopped`) LIMIT."""

import os
import signal
import sys
import time

import hybrid_imagenet as hi

hi.init(1)
import keras  # noqa: E402 - after init, as everywhere

from tests.library import models  # noqa: E402


class Hang(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (hi.rank(), self.epoch, batch) == (1, 1, 2):
            self.hang()

    def hang(self):
        if sys.argv[1] == "stopped":
            time.sleep(4)  # until a beat has told of this line
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)


model = models.plain(3)
models.compile_model(model, hi.DistributedOptimizer("sgd"))
x, y, _ = models.data("plain", 1)
model.fit(x, y, models.BATCH, 3, 0, [*hi.callbacks.default_callbacks(stall_timeout=float(sys.argv[2])), Hang()])
