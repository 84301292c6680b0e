"""Lists the longest gaps between a GPU's kernels in some training steps, from a profile.

    python -m benchmarks gaps --json=gaps.json -- --per_gpu_batch=256 --precision=mixed_float16

A gap that ends before the host's call of a step has returned may be a wait for a copy. After all
calls have returned, the host no longer causes gaps.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_OK

_EPILOG = """\
Examples:
  python -m benchmarks gaps
  python -m benchmarks gaps --steps=20 --json=gaps.json -- --per_gpu_batch=64
Words after -- are flags of training."""

_CALL = "call of a step"
_MAX_LISTED_GAPS = 10


class _Event(NamedTuple):
    """An event of a profile; times are milliseconds."""

    begin: float
    end: float
    name: str


def main(argv: Sequence[str]) -> int:
    """Profiles steps, prints the gaps and writes --json."""
    parser = command_line.Parser(
        prog="python -m benchmarks gaps",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--steps",
        type=command_line.positive_int,
        default=8,
        help="steps to profile (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    words, flags = scaling.split_arguments(argv)
    options: argparse.Namespace = parser.parse_args(words)
    report = _profiled(options.steps, flags)
    print(text(report))
    command_line.write_json(options.json, report)
    return EXIT_OK


def _profiled(steps: int, flags: Sequence[str]) -> dict[str, Any]:
    """Runs some steps of training with flags, and returns the summary of their profile."""
    from hybrid_imagenet import comm, run_plan
    from hybrid_imagenet import config as configuration

    config = configuration.resolve(flags, 1)
    communicator = comm.start(
        run_plan.make(config).communication,
        persistent_batch_norm=config.network.persistent_batch_norm,
    )
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    from hybrid_imagenet.training import hardware

    precision = hardware.choose_precision(config.network.precision, config.network.model)
    step = scaling.training_step(config, communicator, communicator, precision, 1000)
    for _ in range(3):
        step.call()
    step.wait()
    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            for _ in range(steps):
                with tf.profiler.experimental.Trace(_CALL):
                    step.call()
            step.wait()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return gaps(xplane_pb2.XSpace.FromString(file.read_bytes()))


def gaps(space: Any) -> dict[str, Any]:
    """Summarizes a profile (an XSpace).

    Returns:
      Device: `gpu`, or `cpu` where the profile has no GPU and the threads of the CPU stand for its
      streams.
      kernels: how many ran.
      busy: fraction of the time from the first to the last kernel in which one ran.
      calls: when each call of a step began and returned; all times are milliseconds from the first
        call.
      gaps: the longest, with `start`, `length`, and the kernels `before` and `after` it.
    """
    gpus = [plane for plane in space.planes if plane.name.startswith("/device:GPU:")]
    host = next(plane for plane in space.planes if plane.name == "/host:CPU")
    calls = sorted(event for event in _events(host, "") if event.name == _CALL)
    first_call = calls[0].begin
    kernels: list[_Event] = []
    for gpu in gpus:
        kernels += _events(gpu, "Stream")
    if not kernels:
        kernels = _events(host, "tf_")
    kernels = sorted(
        kernel._replace(begin=max(kernel.begin, first_call))
        for kernel in kernels
        if kernel.end > first_call
    )
    all_gaps = _gaps_between(kernels, first_call)
    idle = sum(gap["length"] for gap in all_gaps)
    elapsed = max(kernel.end for kernel in kernels) - kernels[0].begin
    return {
        "device": "gpu" if gpus else "cpu",
        "kernels": len(kernels),
        "busy": 1 - idle / elapsed,
        "calls": [(call.begin - first_call, call.end - first_call) for call in calls],
        "gaps": sorted(all_gaps, key=lambda gap: -gap["length"])[:_MAX_LISTED_GAPS],
    }


def _gaps_between(kernels: Sequence[_Event], origin: float) -> list[dict[str, Any]]:
    """Returns the times at which no kernel runs.

    Args:
      kernels: Kernels in the order of their begin.
      origin: The time from which `start` of a gap counts.
    """
    gaps = []
    # Of the kernels so far, the one that ends last.
    previous = kernels[0]
    for kernel in kernels[1:]:
        if kernel.begin > previous.end:
            gaps.append(
                {
                    "start": previous.end - origin,
                    "length": kernel.begin - previous.end,
                    "before": previous.name,
                    "after": kernel.name,
                }
            )
        if kernel.end > previous.end:
            previous = kernel
    return gaps


def _events(plane: Any, prefix: str) -> list[_Event]:
    """Returns the events in the lines of a plane whose names begin with a prefix."""
    events = []
    for line in plane.lines:
        if not line.name.startswith(prefix):
            continue
        for event in line.events:
            begin = line.timestamp_ns / 1e6 + event.offset_ps / 1e9
            end = begin + event.duration_ps / 1e9
            events.append(_Event(begin, end, plane.event_metadata[event.metadata_id].name))
    return events


def text(report: dict[str, Any]) -> str:
    """Returns the lines that show a result of `gaps`."""
    calls = ", ".join(f"{begin:.1f} to {end:.1f}" for begin, end in report["calls"])
    lines = [
        f"{report['device']}: {report['kernels']:,} kernels, busy {report['busy']:.1%}; times in"
        " ms from the first call",
        f"calls of a step: {calls}",
    ]
    for gap in report["gaps"]:
        lines.append(
            f"{gap['start']:9.2f}  idle {gap['length']:7.3f}  {gap['before']} -> {gap['after']}"
        )
    return "\n".join(lines)
