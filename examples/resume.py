"""Trains from a `tf.data` pipeline, and continues after a stop on any number of ranks.

    hybrid-imagenet run -np 2 examples/resume.py --epochs=3
    hybrid-imagenet run -np 4 examples/resume.py --epochs=6      # continues with epoch 4

The program saves after each epoch. If a rank hangs, it is reported after 30 s, and the job stops
with code 4 after --stall_timeout seconds. Then start it again.
"""

import argparse

import hybrid_imagenet as hi

# Call this before importing Keras, because it assigns this rank its GPU and threads.
hi.init()

import keras  # noqa: E402
import tensorflow as tf  # noqa: E402


def batches(pixels, digits, batch: int) -> tf.data.Dataset:
    """Returns the batches of this rank, in another order in each epoch.

    All ranks have the same number of batches.
    """
    shard = hi.data.shard(
        tf.data.Dataset.from_tensor_slices((pixels, digits)), hi.rank(), hi.size()
    )
    return (
        shard.shuffle(len(pixels), seed=hi.rank())
        .batch(batch, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )


def main() -> None:
    """Trains up to --epochs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--folder", default="digits-checkpoints", help="directory of the checkpoints of one run"
    )
    parser.add_argument("--stall_timeout", type=float, default=300, help="time limit in seconds")
    options = parser.parse_args()

    (pixels, digits), _ = hi.data.digits()
    data = batches(pixels.reshape(-1, 64).astype("float32") / 16, digits, batch=32)
    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)]
    )
    optimizer = hi.DistributedOptimizer(keras.optimizers.AdamW(learning_rate=1e-3))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    callbacks = [
        # The watchdog, which ends the job if a rank hangs, is one of the default callbacks.
        *hi.callbacks.default_callbacks(stall_timeout=options.stall_timeout),
        # All ranks need this callback, after the others. Only rank 0 writes.
        hi.callbacks.Checkpoint(options.folder),
    ]
    history = model.fit(data, epochs=options.epochs, callbacks=callbacks)
    if hi.rank() == 0:
        print(f"epochs trained in this start: {len(history.epoch)} of {options.epochs}")


if __name__ == "__main__":
    main()
