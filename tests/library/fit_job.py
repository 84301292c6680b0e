"""Fits three epochs with the arguments KIND LIMIT FOLDER, and prints each epoch.

Each rank saves its final weights in FOLDER. Rank 0 uses BackupAndRestore, CSVLogger and, if it is
installed, TensorBoard. KIND selects the disturbance. In the second epoch rank 1 `waits`, is
`stopped`, is `killed`, `raises` an error, sets `stop_training` in the kind `ends`, or has `fewer`
batches; or it comes `late` to `fit`. The
kind `slow` makes steps slow enough for a signal, and `whole` disturbs nothing. LIMIT is the
watchdog's limit in seconds.
"""

import importlib.util
import os
import pathlib
import signal
import sys
import time

import hybrid_imagenet as hi

hi.init(1)
# Keras and TensorFlow may be imported only after init.
import keras  # noqa: E402
import numpy as np  # noqa: E402

from tests.library import models  # noqa: E402

kind = sys.argv[1]
limit = float(sys.argv[2])
folder = pathlib.Path(sys.argv[3])


class Disturb(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        print(f"epoch {epoch}", flush=True)

    def on_train_batch_begin(self, batch, logs=None):
        if kind == "slow":
            time.sleep(0.2)
        if (hi.rank(), self.epoch, batch) == (1, 1, 2) and kind in (
            "waits",
            "stopped",
            "killed",
            "raises",
        ):
            self.fail()

    def on_train_batch_end(self, batch, logs=None):
        if (hi.rank(), self.epoch, batch) == (1, 1, 1) and kind == "ends":
            self.model.stop_training = True

    def fail(self):
        if kind == "raises":
            raise RuntimeError("of rank 1")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stopped":
            # A heartbeat has to report this line first.
            time.sleep(4)
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)


def batches(x, y):
    """Yields batches without a known length."""
    for number in range(3 * models.STEPS):
        if kind == "fewer" and hi.rank() == 1 and number == 1.5 * models.STEPS:
            return
        part = slice(
            number % models.STEPS * models.BATCH, (number % models.STEPS + 1) * models.BATCH
        )
        yield x[part], y[part]


model = models.compiled(hi.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=3 + hi.rank())
x, y = hi.data.shard(models.data(hi.size()), hi.rank(), hi.size())
first_rank = [
    keras.callbacks.BackupAndRestore(folder / "backup"),
    keras.callbacks.CSVLogger(folder / "log.csv", append=True),
]
if importlib.util.find_spec("tensorboard") is not None:
    first_rank.append(keras.callbacks.TensorBoard(folder / "events"))
callbacks = [*hi.callbacks.default_callbacks(*first_rank, stall_timeout=limit), Disturb()]
data = {"x": x, "y": y, "batch_size": models.BATCH}
if kind == "fewer":
    data = {"x": batches(x, y), "steps_per_epoch": models.STEPS}
if kind == "late" and hi.rank() == 1:
    time.sleep(600)
model.fit(**data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
np.save(
    folder / f"weights-{hi.rank()}.npy", np.concatenate([np.ravel(w) for w in model.get_weights()])
)
