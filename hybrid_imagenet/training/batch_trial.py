"""Tries training steps with growing batches in a process of its own, for --per_gpu_batch=auto.

Reads one JSON object from the standard input, the arguments of `prepare`, and answers with an empty object. Then each
line is a batch; the answer is a line with the peak memory of a step in bytes, or null if there was not enough.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import pathlib
import resource
import sys
from collections.abc import Callable
from typing import Any

from hybrid_imagenet import comm
from hybrid_imagenet.config import from_values


def main() -> int:
    """Answers each request for a trial until the standard input ends."""
    wanted = json.loads(sys.stdin.readline())
    measure = prepare(**wanted)
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(int(line))), flush=True)
    return 0


def prepare(settings: dict[str, Any], classes: int, precision: str, alone: bool) -> Callable[[int], float | None]:
    """Builds the network and its step.

    Args:
      settings: the run's.
      classes: of the data set.
      precision: the compute type.
      alone: whether the run has one rank; otherwise memory is held for the exchange of gradients: their sums and means.

    Returns:
      A function that gives the peak memory of a step with a batch, in bytes, or None if there was not enough.
    """
    config, ranks = from_values(settings), comm.start()
    import tensorflow as tf

    from hybrid_imagenet.config import derived
    from hybrid_imagenet.numerics import augment
    from hybrid_imagenet.training import build

    model = build.model(config, precision, classes, ranks)
    step = build.train_step(config, precision, model, build.optimizer(config, precision, model, ranks), ranks)
    pixels = max(side for _, side in derived.sizes(config).stages)
    side = augment.host_stage(config.augmentation, pixels).side
    image = tf.TensorSpec([None, side, side, 3], tf.uint8)
    spec = {"image": image, "label": tf.TensorSpec([None], tf.int64), "seed": tf.TensorSpec([None, 2], tf.int64)}
    control, held = tf.zeros([2], tf.int32), [] if alone else [tf.ones([2, model.count_params()])]
    # One graph for all batches. Accumulated gradients are as large as the gradients of the last micro-batch.
    if config.gradient_accumulation_steps > 1:
        step.prepare_accumulation()
        run = step.last.get_concrete_function(spec, control, tf.TensorSpec([], tf.float32))
        more = [tf.constant(2.0)]
    else:
        run, more = step.single.get_concrete_function(spec, control), []

    def once(images: int) -> float | None:
        batch = {
            "image": tf.zeros([images, side, side, 3], tf.uint8),
            "label": tf.zeros([images], tf.int64),
            "seed": tf.zeros([images, 2], tf.int64),
        }
        peak = _Peak(bool(tf.config.get_visible_devices("GPU")))
        try:
            for _ in range(2):
                run(batch, control, *more)
            step.optimizer.grad_norm.numpy()  # waits for the device
        except tf.errors.ResourceExhaustedError:
            return None
        return peak.read() if held is not None else None

    return once


class _Peak:
    """Measures the highest memory use from its creation on: of the GPU's allocator, or of this process."""

    def __init__(self, gpu: bool):
        self._gpu = gpu
        if gpu:
            import tensorflow as tf

            tf.config.experimental.reset_memory_stats("GPU:0")
            return
        ctypes.CDLL(None).malloc_trim(0)
        with contextlib.suppress(OSError):  # the peak then counts from the start: too high after a larger batch
            pathlib.Path("/proc/self/clear_refs").write_text("5")

    def read(self) -> float:
        """Returns bytes."""
        if self._gpu:
            import tensorflow as tf

            return float(tf.config.experimental.get_memory_info("GPU:0")["peak"])
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024.0 * int(line.split()[1])
        return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
