"""`benchmarks roofline`: times the operations of a ResNet-50 step, beside the least time that the machine allows.

    python -m hybrid_imagenet.benchmarks roofline --precision=mixed_bfloat16 --json=roofline.json

One thread, so that the times of operations add up. The bound of a layer's pass is the larger of its floating-point
operations over the rate of a 2048^3 matrix product in the same type and of the bytes that it must read and write over
the rate of a large copy; a tensor counts as often as the pass has to go through it, whatever caches may hold.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import tempfile
import time
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.benchmarks.step import processor
from hybrid_imagenet.comm.environment import prefer_onednn
from hybrid_imagenet.comm.quiet import without_greeting
from hybrid_imagenet.tools import command_line

if typing.TYPE_CHECKING:
    import keras

GROUPS = (
    "convolution, forward",
    "convolution, gradient of input",
    "convolution, gradient of kernel",
    "normalization, forward",
    "normalization, gradient",
    "ReLU, sums, pooling",
    "padding, slices, casts",
    "update",
    "other",
)
_FORWARD, _INPUT, _KERNEL, _NORM, _NORM_GRADIENT, _POINTWISE, _MOVES, _UPDATE, _OTHER = GROUPS


@dataclasses.dataclass(frozen=True)
class Work:
    """The operations and bytes of one pass of one layer."""

    group: str
    flops: float
    bytes: float


def main(argv: Sequence[str]) -> int:
    """Measures, prints the table and writes --json."""
    parser = command_line.Parser("bench roofline", (__doc__ or "").split("\n")[0])
    parser.add_argument("--batch", type=int, default=16, help="images per step (%(default)s)")
    parser.add_argument("--image_size", type=int, default=224, help="pixels (%(default)s)")
    parser.add_argument("--precision", default="mixed_bfloat16", choices=("float32", "mixed_bfloat16"))
    parser.add_argument("--model", default="resnet50", help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="steps to profile (%(default)s)")
    parser.add_argument("--json", help="file for the result")
    options = parser.parse_args(argv)
    report = measure(options.model, options.batch, options.image_size, options.precision, options.steps)
    print(table(report))
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(name: str, batch: int, image_size: int, precision: str, steps: int) -> dict[str, Any]:
    """Profiles the step of a network; the result is a JSON object."""
    prefer_onednn(os.environ)  # the kernels that training runs
    with without_greeting():
        import tensorflow as tf

    from hybrid_imagenet import models

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    compute = precision.removeprefix("mixed_")
    peak, bandwidth = peak_flops(compute), copy_bytes_per_second()
    network = models.create(name, 1000, image_size, precision=precision)
    milliseconds, whole = profiled(network, batch, image_size, compute, steps)
    # Taken before and after, as other work on the machine can only lower them.
    peak, bandwidth = max(peak, peak_flops(compute)), max(bandwidth, copy_bytes_per_second())
    size = tf.as_dtype(compute).size
    rows = {group: {"milliseconds": milliseconds.get(group, 0.0), "flops": 0.0, "bytes": 0.0, "bound": 0.0}
            for group in GROUPS}  # fmt: skip
    for work in works(network, batch, size):
        row = rows[work.group]
        row["flops"] += work.flops
        row["bytes"] += work.bytes
        row["bound"] += 1e3 * max(work.flops / peak, work.bytes / bandwidth)
    return {
        "benchmark": "roofline",
        "model": name,
        "batch": batch,
        "image_size": image_size,
        "precision": precision,
        "threads": 1,
        "peak_flops_per_second": peak,
        "copy_bytes_per_second": bandwidth,
        "step_milliseconds": whole,
        "groups": rows,
        "machine": processor(),
        "date": datetime.date.today().isoformat(),
    }


def peak_flops(compute: str) -> float:
    """Floating-point operations per second of a matrix product."""
    import tensorflow as tf

    side = 2048
    left = tf.cast(tf.random.normal([side, side]), compute)
    product = tf.function(lambda a: tf.matmul(a, a))
    return 2 * side**3 / min(_seconds(lambda: product(left)) for _ in range(8))


def copy_bytes_per_second() -> float:
    """Bytes read and written per second by a copy that no cache holds."""
    import numpy as np

    source = np.ones(64 << 20, np.float32)
    target = np.empty_like(source)
    return 2 * source.nbytes / min(_seconds(lambda: np.copyto(target, source)) for _ in range(8))


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def works(network: keras.Model, batch: int, size: int) -> Iterator[Work]:
    """Counts the operations and bytes of each layer's passes, with activations of `size` bytes per element."""
    import keras
    import numpy as np

    def elements(tensor: Any) -> float:
        return float(batch * np.prod([n for n in tensor.shape if n]))

    first = True
    for layer in network.layers:
        if isinstance(layer, keras.layers.Conv2D | keras.layers.Dense):
            weights = float(np.prod(layer.kernel.shape))
            flops = 2 * elements(layer.output) * weights / layer.kernel.shape[-1]
            moved = size * (elements(layer.input) + elements(layer.output) + weights)
            yield Work(_FORWARD, flops, moved)
            yield Work(_KERNEL, flops, moved)
            if not first:
                yield Work(_INPUT, flops, moved)
            first = False
        elif isinstance(layer, keras.layers.BatchNormalization):
            one = size * elements(layer.input)
            yield Work(_NORM, 0, 3 * one)  # read for the statistics, read again, written
            yield Work(_NORM_GRADIENT, 0, 5 * one)  # x and dy for two sums, both again, dx written
        elif isinstance(layer, keras.layers.ReLU):
            after_sum = isinstance(layer.input._keras_history.operation, keras.layers.Add)
            # Behind a normalization it is part of that kernel; its gradient reads y and dy and writes dx.
            yield Work(_POINTWISE, 0, size * elements(layer.input) * (5 if after_sum else 3))
        elif isinstance(layer, keras.layers.Add):
            yield Work(_POINTWISE, 0, size * elements(layer.output) * 6)  # the sum, and the sum of two gradients
    parameters = sum(float(np.prod(v.shape)) for v in network.trainable_variables)
    yield Work(_UPDATE, 0, 4 * 6 * parameters)  # the norm reads g; then g, w and m are read, w and m written


def profiled(network: keras.Model, batch: int, side: int, compute: str, steps: int) -> tuple[dict[str, float], float]:
    """Milliseconds per step of each group of operations, and of the whole step."""
    import tensorflow as tf

    from hybrid_imagenet import comm, optimizers
    from hybrid_imagenet.data import device
    from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
    from hybrid_imagenet.optimizers.kinds import classify
    from hybrid_imagenet.runlog import profile
    from hybrid_imagenet.training.step import TrainStep

    inner = optimizers.create("sgd", learning_rate=1e-3, momentum=0.9)
    inner.set_kinds(classify(network))
    single = comm.SingleProcess()
    step = TrainStep(
        network, DistributedOptimizer(inner, single), lambda b: device.normalize(b["image"], compute), single
    )
    images = tf.cast(tf.random.uniform([batch, side, side, 3], 0, 256, tf.int32), tf.uint8)
    arguments = ({"image": images, "label": tf.zeros([batch], tf.int32)}, tf.zeros([1], tf.int32))
    for _ in range(2):
        step.single(*arguments)
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            for number in range(steps):
                with tf.profiler.experimental.Trace(profile.STEP, step_num=number, _r=1):
                    step.single(*arguments)
        found = profile.read(Path(folder))
    groups: dict[str, float] = {}
    for category, event in profile.classified(found):
        group = _UPDATE if category == "optimizer" else group_of(event.name)
        groups[group] = groups.get(group, 0.0) + 1e3 * (event.end - event.start) / steps
    whole = sum(e.end - e.start for e in found if e.name == profile.STEP)
    return groups, 1e3 * whole / steps


def group_of(event: str) -> str:
    """The group of an operation's event, `name:Type`.

    The gradients of a product a b are `MatMul` for a and `MatMul_1` for b, the kernel; products without a layer's
    scope belong to the kernel gradient of a 3x3 convolution.
    """
    name, _, kind = event.rpartition(":")
    kind = re.sub(r"^_(Mkl|Fused|Native)+", "", kind)
    if kind.endswith("MatMul"):
        if "/" not in name or re.search(r"MatMul/MatMul_1$", name):
            return _KERNEL
        return _INPUT if name.startswith("gradient_tape") else _FORWARD
    for pattern, group in (
        ("BackpropInput", _INPUT),
        ("BackpropFilter", _KERNEL),
        ("Conv2D", _FORWARD),
        ("BatchNormGrad|BatchNormGradV3", _NORM_GRADIENT),
        ("BatchNorm", _NORM),
        ("Relu|^AddV?2?$|^AddN$|Pool", _POINTWISE),
        ("Pad|Slice|Cast|Transpose|Pack|Reshape|Concat", _MOVES),
    ):
        if re.search(pattern, kind):
            return group
    return _OTHER


def table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = [
        f"{report['model']}, batch {report['batch']}, {report['image_size']} px, {report['precision']}, one thread: "
        f"{report['machine']}",
        f"matrix product {report['peak_flops_per_second'] / 1e9:.0f} GFLOP/s, "
        f"copy {report['copy_bytes_per_second'] / 1e9:.1f} GB/s; step {report['step_milliseconds']:.0f} ms",
        f"{'':34}{'ms':>8}{'GFLOP':>8}{'GB':>7}{'bound ms':>10}{'of bound':>10}",
    ]
    for name, row in report["groups"].items():
        share = f"{100 * row['bound'] / row['milliseconds']:9.0f}%" if row["bound"] and row["milliseconds"] else ""
        lines.append(
            f"{name:34}{row['milliseconds']:8.1f}{row['flops'] / 1e9:8.1f}{row['bytes'] / 1e9:7.2f}"
            f"{row['bound']:10.1f}{share:>10}"
        )
    rows = report["groups"].values()
    lines.append(
        f"{'sum':34}{sum(r['milliseconds'] for r in rows):8.1f}{sum(r['flops'] for r in rows) / 1e9:8.1f}"
        f"{sum(r['bytes'] for r in rows) / 1e9:7.2f}{sum(r['bound'] for r in rows):10.1f}"
    )
    return "\n".join(lines)
