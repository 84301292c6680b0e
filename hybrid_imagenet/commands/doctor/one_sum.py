"""Sums a vector over all ranks, on the GPU if there is one: a rank of the doctor's NCCL trial.

`trials.run_trial` starts it under a launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_imagenet import comm
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_OK, SharedError

# 4 MiB of float32, like a bucket of gradients.
_ELEMENTS = 1 << 20


def main(arguments: Sequence[str] = ()) -> int:
    """Sums rank + 1 over all ranks, and prints one line on each rank.

    Raises:
      SharedError: If the sum is wrong.
    """
    communicator = comm.start()
    # Imported late: TensorFlow starts with the threads that comm sets.
    import tensorflow as tf

    device = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    with tf.device(f"{device}:0"):
        total = communicator.allreduce_sum(
            tf.fill([_ELEMENTS], float(communicator.rank + 1)), "sum"
        )
    largest = float(tf.reduce_max(total))
    smallest = float(tf.reduce_min(total))
    expected = communicator.size * (communicator.size + 1) / 2
    communicator.shutdown()
    if (largest, smallest) != (expected, expected):
        raise SharedError(
            f"{communicator.size} ranks computed a sum from {smallest:g} to {largest:g} instead of"
            f" {expected:g}"
        )
    print(
        f"rank {communicator.rank} of {communicator.size}: the sum is right, on the {device}",
        flush=True,
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(command_line.run_command(main, sys.argv[1:]))
