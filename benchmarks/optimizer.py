"""Measures milliseconds per update of ResNet-50's 161 tensors, compared with Keras's optimizers.

All implementations are built in one process and take turns, so other work of the machine disturbs
all of them alike. Gradients are on the device. Our optimizers also add up their squares, to see
whether they are finite; the table has a separate line for that cost.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.cluster.quiet import import_tensorflow
from hybrid_imagenet.commands import command_line

if TYPE_CHECKING:
    import tensorflow as tf

_EPILOG = """\
Examples:
  python -m benchmarks optimizer
  python -m benchmarks optimizer --rounds=100 --json=optimizer.json"""

BASELINE = "keras SGD"


def resnet50_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of ResNet-50's 161 trainable tensors, 25,557,032 numbers."""
    from hybrid_imagenet.models import factory

    network = factory.create("resnet50", num_classes=1000, image_size=224)
    return [tuple(variable.shape) for variable in network.trainable_variables]


class OptimizerImplementation:
    """A compiled update with its own variables and state."""

    def __init__(self, name: str, update: Callable[[], Any]) -> None:
        """Compiles `update` and runs it once, which is timed as `first_seconds`."""
        import tensorflow as tf

        self.name = name
        self._function = tf.function(update, autograph=False)
        self.seconds: list[float] = []
        self.first_seconds = self._time()
        self._time()

    def run(self) -> None:
        """Makes one update and records its time."""
        self.seconds.append(self._time())

    def _time(self) -> float:
        start = time.perf_counter()
        result = self._function()
        if result is not None:
            # This waits for a GPU.
            result.numpy()
        return time.perf_counter() - start


def implementations(
    gradients: Sequence[tf.Variable], weights: Sequence[Any]
) -> list[OptimizerImplementation]:
    """Returns Keras's SGD with momentum and Adam, and the optimizers of this program.

    Args:
      gradients: Gradients of all tensors.
      weights: Initial values of all tensors; each implementation has its own variables.
    """
    import keras
    import tensorflow as tf

    from hybrid_imagenet import optimizers
    from hybrid_imagenet.optimizers import kinds

    def variables() -> list[keras.Variable]:
        return [keras.Variable(weight) for weight in weights]

    def implementation(
        name: str, optimizer: keras.optimizers.Optimizer, variables: list[keras.Variable]
    ) -> OptimizerImplementation:
        def update() -> tf.Tensor:
            optimizer.apply([gradient.read_value() for gradient in gradients], variables)
            return optimizer.iterations.value.read_value()

        return OptimizerImplementation(name, update)

    def peer(name: str, optimizer: keras.optimizers.Optimizer) -> OptimizerImplementation:
        own_variables = variables()
        optimizer.build(own_variables)
        return implementation(name, optimizer, own_variables)

    def ours(name: str, phase: float, **arguments: Any) -> OptimizerImplementation:
        optimizer = optimizers.create(**arguments)
        own_variables = variables()
        optimizer.set_kinds(kinds.classify_by_rank(own_variables))
        optimizer.build(own_variables)
        optimizer.hyperparameters.assign({"phase": phase})
        return implementation(name, optimizer, own_variables)

    return [
        peer(BASELINE, keras.optimizers.SGD(1e-3, momentum=0.9)),
        peer("keras Adam", keras.optimizers.Adam(1e-3)),
        ours("sgd", 1.0, optimizer="sgd", weight_decay=1e-4),
        ours("lars", 1.0, optimizer="lars", trust_coefficient=0.001),
        ours("hybrid, SGD with LARS", 1.0, optimizer="hybrid", trust_coefficient=0.001),
        ours("hybrid, AdaBound warmup", 0.0, optimizer="hybrid", trust_coefficient=0.001),
        ours("adabound", 1.0, optimizer="adabound"),
        OptimizerImplementation(
            "square sums of gradients",
            lambda: tf.stack([tf.nn.l2_loss(gradient) for gradient in gradients]),
        ),
    ]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line.Parser(
        prog="python -m benchmarks optimizer",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=20,
        help="updates of each implementation (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=command_line.positive_int,
        default=len(os.sched_getaffinity(0)),
        help="threads of TensorFlow (default: the number of processors, %(default)s)",
    )
    command_line.add_json_argument(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and prints the table."""
    options = parse(argv)
    import_tensorflow()
    import numpy as np
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(options.threads)
    tf.config.threading.set_inter_op_parallelism_threads(options.threads)
    random = np.random.default_rng(0)
    shapes = resnet50_shapes()
    gradients = [
        tf.Variable(random.normal(0, 0.01, shape).astype(np.float32), trainable=False)
        for shape in shapes
    ]
    weights = [random.normal(0, 0.05, shape).astype(np.float32) for shape in shapes]
    measured = implementations(gradients, weights)
    for _ in range(options.rounds):
        for implementation in measured:
            implementation.run()
    report = summarize(measured, options.threads)
    print_table(report)
    command_line.write_json(options.json, report)
    return 0


def summarize(measured: Sequence[OptimizerImplementation], threads: int) -> dict[str, Any]:
    """Returns the result as a JSON object.

    `ratio` is the median time divided by that of Keras's SGD with momentum.
    """
    medians = {
        implementation.name: statistics.median(implementation.seconds)
        for implementation in measured
    }
    rows = {}
    for implementation in measured:
        name = implementation.name
        rows[name] = {
            "milliseconds": 1e3 * medians[name],
            "best_milliseconds": 1e3 * min(implementation.seconds),
            "first_seconds": implementation.first_seconds,
            "ratio": medians[name] / medians[BASELINE],
        }
    return {
        "benchmark": "optimizer",
        "threads": threads,
        "implementations": rows,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
    }


def print_table(report: dict[str, Any]) -> None:
    """Prints one line per implementation."""
    print(f"ResNet-50 update, 161 tensors, {report['threads']} threads: {report['machine']}")
    for name, row in report["implementations"].items():
        print(
            f"{name:>26} {row['milliseconds']:7.1f} ms (best {row['best_milliseconds']:6.1f}) "
            f"{row['ratio']:5.2f} x {BASELINE}  first call {row['first_seconds']:5.2f} s"
        )
