"""Trains ResNet-50 of legacy Keras with Horovod's own Keras optimizer by `model.fit`.

The images are synthetic and in memory.

One rank of a job. The settings are the first argument, as JSON; rank 0 prints a marked line. As in
Horovod's own synthetic benchmark, precision is float32 and gradients travel as they are, unless the
settings say otherwise.
"""

import json
import os
import statistics
import sys
import time
from typing import Any

import tensorflow as tf  # its keras stays unloaded until TF_USE_LEGACY_KERAS is set

MARK = "scaling-result "
os.environ["TF_USE_LEGACY_KERAS"] = "1"


def say(**values: Any) -> None:
    """Prints one marked line."""
    print(MARK + json.dumps(values), flush=True)


try:
    import tf_keras as keras
except ImportError:
    say(
        skipped=(
            "legacy Keras is not installed: run pip install -e '.[peers]' in the checkout, or put"
            " tf_keras on PYTHONPATH"
        )
    )
    sys.exit(0)


class EpochTimes(keras.callbacks.Callback):
    """Keeps the seconds of each epoch."""

    def __init__(self) -> None:
        """Starts with no epoch measured."""
        super().__init__()
        self.seconds: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        self.start = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops the clock."""
        self.seconds.append(time.perf_counter() - self.start)


def main() -> None:
    """Trains for some epochs of `steps` steps, the first of which does not count."""
    options = json.loads(sys.argv[1])
    if options["threads"]:
        tf.config.threading.set_intra_op_parallelism_threads(options["threads"])
    import horovod.tensorflow.keras as hvd

    hvd.init()
    keras.mixed_precision.set_global_policy(options["precision"])
    size, batch = options["image_size"], options["batch"]
    model = keras.applications.ResNet50(
        weights=None, input_shape=(size, size, 3), classes=options["classes"]
    )
    compression = hvd.Compression.fp16 if options["compression"] == "fp16" else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.01 * hvd.size()), compression=compression
    )
    model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer)
    images = tf.random.uniform([batch, size, size, 3])
    labels = tf.random.uniform([batch], maxval=options["classes"], dtype=tf.int32)
    data = tf.data.Dataset.from_tensors((images, labels)).cache().repeat()
    times = EpochTimes()
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), times]
    model.fit(
        data,
        steps_per_epoch=options["steps"],
        epochs=options["rounds"] + 1,
        callbacks=callbacks,
        verbose=0,
    )
    seconds = statistics.median(times.seconds[1:]) / options["steps"]
    if hvd.rank() == 0:
        say(
            name=f"peers/horovod_keras_{hvd.size()}",
            ranks=hvd.size(),
            precision=options["precision"],
            compression=options["compression"],
            batch_per_rank=batch,
            step_seconds=seconds,
            images_per_second=hvd.size() * batch / seconds,
            version=f"tf_keras {keras.__version__}, tensorflow {tf.__version__}",
        )


main()
