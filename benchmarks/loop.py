"""Compares the whole training loop with the bare step, in one process.

    python -m benchmarks loop --json=loop.json -- --per_gpu_batch=16 --precision=float32

A run is put together as the training program does it: JPEG shards (made photographs, unless the
flags after `--` name a dataset), metrics, all callbacks, progress and records. Then its loop and
the bare step take turns: some steps of the loop, and as many of the same compiled step on a batch
that stays in memory, with the input pipeline idle. Figures are medians over the rounds. Afterwards
the loop saves a checkpoint while it continues, and validation is timed.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet import comm, run_plan
from hybrid_imagenet import config as configuration
from hybrid_imagenet.benchmarks import photographs, scaling
from hybrid_imagenet.commands import command_line

_EPILOG = """\
Examples:
  python -m benchmarks loop
  python -m benchmarks loop --steps=50 --json=loop.json -- --per_gpu_batch=64
Words after -- are flags of training."""


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark, prints the figures and writes --json."""
    words, training_flags = scaling.split_arguments(argv)
    options = _parser().parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            "--model=resnet50",
            "--per_gpu_batch=16",
            f"--log_every_steps={options.steps}",
            "--progress=plain",
            f"--run_dir={folder}/run",
            "--epochs=90",
        ]
        if not any(word.lstrip("-").startswith("dataset=") for word in training_flags):
            flags += [
                "--dataset=tfrecord",
                f"--data_dir={photographs.photograph_shards(None)}",
                "--num_classes=1000",
            ]
        config = configuration.resolve(flags + training_flags, comm.read_placement().size)
        communicator = comm.start(
            run_plan.make(config).communication,
            persistent_batch_norm=config.network.persistent_batch_norm,
        )
        # It imports TensorFlow, which must be loaded after `comm.start`.
        from benchmarks._alternation import measure

        report = measure(config, communicator, options.steps, options.rounds)
    print_report(report)
    command_line.write_json(options.json, report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m benchmarks loop",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--steps",
        type=command_line.positive_int,
        default=10,
        help="steps per turn, and between records (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=3,
        help="turns of each (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    return parser


def print_report(report: dict[str, Any]) -> None:
    """Prints the figures."""
    ratios = ", ".join(f"{100 * ratio:.1f}" for ratio in report["ratios"])
    checkpoint = report["checkpoint"]
    validation = report["validation"]
    lines = (
        f"{report['model']}, batch {report['batch']}, {report['image_size']} px,"
        f" {report['precision']}, {report['threads']} threads: {report['machine']}",
        f"loop {report['images_per_second']:.2f} images/s, bare step"
        f" {report['bare_images_per_second']:.2f}: {100 * report['ratio']:.1f} %"
        f" (rounds {ratios})",
        f"host {report['host_milliseconds']:.2f} ms per step between calls of the step and"
        f" {report['dispatch_milliseconds']:.2f} ms to call it; step traced {report['traces']}"
        f" time(s); waiting for input {100 * report['data_wait_fraction']:.2f} %",
        f"checkpoint: training waited {checkpoint['blocked_seconds']:.2f} s; the file was complete"
        f" after {checkpoint['seconds']:.2f} s and {checkpoint['steps_meanwhile']} steps",
        f"validation: {1e3 * validation['seconds_per_image']:.1f} ms per image,"
        f" {validation['share_of_training']:.2f} of training",
    )
    print("\n".join(lines))
