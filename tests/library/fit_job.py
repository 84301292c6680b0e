"""A job that fits three epochs: KIND LIMIT FOLDER. It prints each epoch; the weights of each rank
end in FOLDER.

With BackupAndRestore, CSVLogger and, if it is installed, TensorBoard on rank 0. In the second epoch
rank 1 `waits`, is `stopped`, is `killed`, `raises` an error or has `fewer` batches, or it is `late`
for `fit`; `slow` steps leave time for a signal; `whole` does nothing of that. LIMIT is the
watchdog's, in seconds.
"""

import importlib.util
import os
import pathlib
import signal
import sys
import time

import hybrid_imagenet as hi

hi.init(1)
import keras  # noqa: E402 - after init, as everywhere
import numpy as np  # noqa: E402

from tests.library import models  # noqa: E402

kind, limit, folder = sys.argv[1], float(sys.argv[2]), pathlib.Path(sys.argv[3])


class Act(keras.callbacks.Callback):
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

    def fail(self):
        if kind == "raises":
            raise RuntimeError("of rank 1")
        if kind == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "stopped":
            time.sleep(4)  # until a beat has told of this line
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)


def batches(x, y):
    """A generator whose length nobody knows."""
    for number in range(3 * models.STEPS):
        if kind == "fewer" and hi.rank() == 1 and number == 1.5 * models.STEPS:
            return
        part = slice(
            number % models.STEPS * models.BATCH, (number % models.STEPS + 1) * models.BATCH
        )
        yield x[part], y[part]


model = models.made(hi.DistributedOptimizer(keras.optimizers.Adam(0.01)), seed=3 + hi.rank())
x, y = hi.data.shard(models.data(hi.size()), hi.rank(), hi.size())
own = [
    keras.callbacks.BackupAndRestore(folder / "backup"),
    keras.callbacks.CSVLogger(folder / "log.csv", append=True),
]
if importlib.util.find_spec("tensorboard") is not None:
    own.append(keras.callbacks.TensorBoard(folder / "events"))
callbacks = [*hi.callbacks.default_callbacks(*own, stall_timeout=limit), Act()]
data = {"x": x, "y": y, "batch_size": models.BATCH}
if kind == "fewer":
    data = {"x": batches(x, y), "steps_per_epoch": models.STEPS}
if kind == "late" and hi.rank() == 1:
    time.sleep(600)
model.fit(**data, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
np.save(
    folder / f"weights-{hi.rank()}.npy", np.concatenate([np.ravel(w) for w in model.get_weights()])
)
