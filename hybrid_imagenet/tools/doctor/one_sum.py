"""A rank of the doctor's trial of NCCL: adds up a vector over all ranks, on the GPU where there is
one.

Started by `trials.run` under a launcher, with NCCL_DEBUG=INFO.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_imagenet import comm
from hybrid_imagenet.errors import EXIT_OK, SharedError
from hybrid_imagenet.tools import command_line

_ELEMENTS = 1 << 20  # 4 MiB: a bucket of gradients


def add(arguments: Sequence[str] = ()) -> int:
    """Adds rank + 1 over all ranks and prints one line on each.

    Raises:
      SharedError: if the sum is wrong.
    """
    communicator = comm.start()
    import tensorflow as tf

    place = "GPU" if tf.config.get_visible_devices("GPU") else "CPU"
    with tf.device(f"{place}:0"):
        total = communicator.allreduce_sum(
            tf.fill([_ELEMENTS], float(communicator.rank + 1)), "sum"
        )
    found = float(tf.reduce_max(total)), float(tf.reduce_min(total))
    expected = communicator.size * (communicator.size + 1) / 2
    communicator.shutdown()
    if found != (expected, expected):
        raise SharedError(
            f"{communicator.size} ranks gave a sum from {found[1]:g} to {found[0]:g}, not"
            f" {expected:g}"
        )
    print(
        f"rank {communicator.rank} of {communicator.size}: the sum is right, on the {place}",
        flush=True,
    )
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(command_line.run_command(add, sys.argv[1:]))
