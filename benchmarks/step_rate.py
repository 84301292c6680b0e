"""Measures the training step of a ResNet, in images per second.

Each implementation runs in a process that is warmed up first. Then they take turns, a few steps
each, so that other load on the machine slows all of them. The figure is the median over the rounds.
`hybrid-imagenet bench scaling --ranks=1` times the step of a run with its flags.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks._step_protocol import MARK
from benchmarks.turns import wait_for_turn
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.cluster.environment import choose_onednn
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.depths import DEPTHS, STEMS, VERSION_1, WIDTH

_EPILOG = """\
Examples:
Compare with Keras and PyTorch:
  python -m benchmarks step
Measure this program alone:
  python -m benchmarks step --peers= --batch=32 --precision=float32 --json=step.json"""

OURS = "hybrid"
_PROGRAM = "benchmarks._step_program"
PEERS = {
    "keras": "benchmarks.peers.step_keras",
    "torch": "benchmarks.peers.step_torch",
    "torch_compiled": "benchmarks.peers.step_torch",
    "jax": "benchmarks.peers.step_jax",
    "jax_full": "benchmarks.peers.step_jax_full",
    "jax_full_bytes": "benchmarks.peers.step_jax_full",
}
SETTINGS = ("batch", "image_size", "precision", "threads", "model", "width", "stem", "num_classes")
_ROOT = pathlib.Path(__file__).parents[1]


class Implementation:
    """A process that runs steps when told to."""

    def __init__(
        self, name: str, python: str, settings: dict[str, Any], module: str = _PROGRAM
    ) -> None:
        """Starts the process and waits until it is warmed up.

        Args:
          name: Name of the implementation.
          python: Interpreter that has the framework which `module` needs.
          settings: What to measure, by name.
          module: The program of the process.

        Raises:
          UserError: If the process cannot be started, or ends.
        """
        self.batch = settings["batch"]
        environment = _environment(module, settings["threads"])
        self.name = name
        try:
            self.process = subprocess.Popen(
                [python, "-m", module, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
        except OSError as error:
            raise UserError(
                f"The interpreter {python} for {name} cannot be run ({error.strerror}). Pass the"
                " path of another one."
            ) from None
        self.rounds: list[float] = []
        self.cpu_rounds: list[float] = []
        self.peak_bytes = 0
        self.description = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line[len(MARK) :])
        raise UserError(
            f"The implementation {self.name} ended with exit code {self.process.wait()}. Correct"
            " its error above, or omit the implementation."
        )

    def run(self, steps: int) -> None:
        """Runs some steps and keeps the seconds per step."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.peak_bytes = max(self.peak_bytes, answer["peak_bytes"])
        self.rounds.append(answer["seconds"] / steps)
        self.cpu_rounds.append(answer["cpu_seconds"] / steps)

    def end(self) -> None:
        """Lets the process finish, or kills it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()

    def result(self) -> dict[str, Any]:
        """Returns the measured figures."""
        median = statistics.median(self.rounds)
        return {
            "batch": self.batch,
            "images_per_second": self.batch / median,
            "seconds_per_step": median,
            "best_seconds_per_step": min(self.rounds),
            "cpu_seconds_per_step": statistics.median(self.cpu_rounds),
            "peak_bytes": self.peak_bytes,
            "version": self.description["version"],
        }


def _environment(module: str, threads: int) -> dict[str, str]:
    """Returns the environment variables for the process of an implementation."""
    environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3", OMP_NUM_THREADS=str(threads))
    # The memory of a GPU is for all implementations. The first variable is for TensorFlow, the
    # second for JAX.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if module == _PROGRAM:
        # This program sets these variables itself. The others run with their defaults.
        choose_onednn(environment)
        gpus.prefer_fast_kernels(environment)
    search_path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{search_path}" if search_path else str(_ROOT)
    return environment


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = command_line.Parser(
        prog="python -m benchmarks step",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--batch",
        type=command_line.positive_int,
        default=16,
        help="images per step (default: %(default)s)",
    )
    parser.add_argument(
        "--image_size",
        type=command_line.positive_int,
        default=224,
        help="height and width of the images in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        default="resnet50",
        choices=sorted(set(DEPTHS) - set(VERSION_1)),
        help="network (default: %(default)s)",
    )
    parser.add_argument(
        "--model_width",
        dest="width",
        type=command_line.positive_int,
        default=WIDTH,
        help="channels of the first stage (default: %(default)s)",
    )
    parser.add_argument(
        "--stem", default="imagenet", choices=STEMS, help="first layers (default: %(default)s)"
    )
    parser.add_argument(
        "--num_classes",
        type=command_line.positive_int,
        default=1000,
        help="number of classes (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        default="mixed_bfloat16",
        choices=("float32", "mixed_float16", "mixed_bfloat16"),
        help="type to compute in (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=command_line.positive_int,
        default=3,
        help="steps per turn (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=5,
        help="turns of each implementation (default: %(default)s)",
    )
    parser.add_argument(
        "--threads",
        type=command_line.positive_int,
        default=len(os.sched_getaffinity(0)),
        help="threads per implementation (default: the number of processors, %(default)s)",
    )
    parser.add_argument(
        "--peers",
        default="keras,torch",
        metavar="NAME,...",
        help=f"other implementations, out of {', '.join(PEERS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--torch_python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python that has PyTorch or JAX (default: this one)",
    )
    command_line.add_json_argument(parser)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark and prints the table.

    Raises:
      UserError: For a command line that cannot be used, or an implementation that fails.
    """
    options = parse(argv)
    settings = {name: getattr(options, name) for name in SETTINGS}
    implementations: list[Implementation] = []
    running: list[Implementation] = []
    try:
        for name, module in _compared(options).items():
            python = options.torch_python if name.startswith(("torch", "jax")) else sys.executable
            implementation = Implementation(name, python, settings | settings_of(name), module)
            implementations.append(implementation)
            if "skipped" in implementation.description:
                print(f"{name}: skipped, {implementation.description['skipped']}")
            else:
                running.append(implementation)
        wait_for_turn()
        for _ in range(options.rounds):
            for implementation in running:
                implementation.run(options.steps)
    finally:
        for implementation in implementations:
            implementation.end()
    report = summarize(running, settings)
    print_table(report)
    command_line.write_json(options.json, report)
    return 0


def settings_of(name: str) -> dict[str, bool]:
    """Returns the settings in which implementations of one module differ."""
    return {"compiled": name == "torch_compiled", "byte_pooling": name == "jax_full_bytes"}


def _compared(options: argparse.Namespace) -> dict[str, str]:
    """Returns the modules to run by name, first that of this program."""
    names = command_line.parse_names("--peers", options.peers, PEERS)
    return {OURS: _PROGRAM} | {name: PEERS[name] for name in names}


def summarize(running: Sequence[Implementation], settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the result as a JSON-ready object.

    Our figures are at the top, the others under `peers` with our advantage as `ratio`.
    """
    results = {implementation.name: implementation.result() for implementation in running}
    ours = results.pop(OURS)
    for peer in results.values():
        peer["ratio"] = ours["images_per_second"] / peer["images_per_second"]
    return {
        "benchmark": "step",
        **settings,
        **ours,
        "peers": results,
        "machine": f"{platform.machine()}, {processor()}, {os.cpu_count()} cores",
        "date": datetime.date.today().isoformat(),
    }


def processor() -> str:
    """Returns the name of the processor that the kernel reports."""
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def print_table(report: dict[str, Any]) -> None:
    """Prints one line per implementation."""
    print(f"step of {report['model']}, width {report['width']}, stem {report['stem']}")
    print(
        f"batch {report['batch']}, {report['image_size']} px, {report['precision']},"
        f" {report['threads']} threads: {report['machine']}"
    )
    for name, row in {"ours": report, **report["peers"]}.items():
        ratio = f"ours is {row['ratio']:.2f} times as fast" if "ratio" in row else ""
        print(
            f"{name:>15} {row['images_per_second']:8.2f} images/s"
            f" {row['cpu_seconds_per_step']:7.3f} core-s/step {row['peak_bytes'] / 2**30:6.2f} GiB"
            f" peak  {ratio}"
        )
