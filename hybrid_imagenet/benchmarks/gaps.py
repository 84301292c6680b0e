"""Lists the longest gaps between a GPU's kernels in some training steps, from a profile.

    hybrid-imagenet bench gaps --json=gaps.json -- --per_gpu_batch=256 --precision=mixed_float16

A gap that ends before the host's call of a step has returned may be a wait for a copy; one after
all calls returned is the GPU's own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.errors import EXIT_OK
from hybrid_imagenet.tools import command_line

_EPILOG = """\
Examples:
  hybrid-imagenet bench gaps
  hybrid-imagenet bench gaps --steps=20 --json=gaps.json -- --per_gpu_batch=64
Words after -- are flags of training."""

_CALL = "call of a step"
_LISTED = 10


def main(argv: Sequence[str]) -> int:
    """Profiles steps, prints the gaps and writes --json."""
    parser = command_line.Parser("bench gaps", (__doc__ or "").split("\n")[0], epilog=_EPILOG)
    parser.add_argument(
        "--steps",
        type=command_line.positive_int,
        default=8,
        help="steps to profile (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    words, flags = scaling.split_arguments(argv)
    options: argparse.Namespace = parser.parse_args(words)
    found = _profiled(options.steps, flags)
    print(text(found))
    command_line.write_json(options.json, found)
    return EXIT_OK


def _profiled(steps: int, flags: Sequence[str]) -> dict[str, Any]:
    from hybrid_imagenet import comm
    from hybrid_imagenet import config as configuration
    from hybrid_imagenet.config import derived

    config = configuration.resolve(flags, 1)
    communicator = comm.start(
        derived.communication(config), persistent_batch_norm=config.network.persistent_batch_norm
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
      device: `gpu`, or `cpu` where the profile has no GPU and the threads of the CPU stand for its
      streams.
      kernels: how many ran.
      busy: their share of the time from the first to the last.
      calls: when each call of a step began and returned; all times are milliseconds from the first
      call.
      gaps: the longest, with `start`, `length`, and the kernels `before` and `after` it.
    """
    planes = [plane for plane in space.planes if plane.name.startswith("/device:GPU:")]
    host = next(plane for plane in space.planes if plane.name == "/host:CPU")
    calls = sorted((b, e) for b, e, name in _events(host, "") if name == _CALL)
    kernels = [k for plane in planes for k in _events(plane, "Stream")] or _events(host, "tf_")
    kernels = sorted((max(b, calls[0][0]), e, name) for b, e, name in kernels if e > calls[0][0])
    found, idle, (_, end, before) = [], 0.0, kernels[0]
    for begin, ended, name in kernels[1:]:
        if begin > end:
            found.append({"start": end, "length": begin - end, "before": before, "after": name})
            idle += begin - end
        if ended > end:
            end, before = ended, name
    first = calls[0][0]
    for gap in found:
        gap["start"] -= first  # type: ignore[operator]
    return {
        "device": "gpu" if planes else "cpu",
        "kernels": len(kernels),
        "busy": 1 - idle / (end - kernels[0][0]),
        "calls": [(begin - first, end - first) for begin, end in calls],
        "gaps": sorted(found, key=lambda gap: -gap["length"])[:_LISTED],  # type: ignore[operator]
    }


def _events(plane: Any, lines: str) -> list[tuple[float, float, str]]:
    """Returns begin and end in milliseconds and the name of the events of a plane.

    Only lines of the plane count whose name starts as asked.
    """
    return [
        (begin, begin + event.duration_ps / 1e9, plane.event_metadata[event.metadata_id].name)
        for line in plane.lines
        if line.name.startswith(lines)
        for event in line.events
        for begin in [line.timestamp_ns / 1e6 + event.offset_ps / 1e9]
    ]


def text(found: dict[str, Any]) -> str:
    """The result as lines."""
    calls = ", ".join(f"{begin:.1f} to {end:.1f}" for begin, end in found["calls"])
    lines = [
        (
            f"{found['device']}: {found['kernels']:,} kernels, busy {found['busy']:.1%}; times in"
            " ms from the first call"
        ),
        f"calls of a step: {calls}",
    ]
    lines += [
        f"{g['start']:9.2f}  idle {g['length']:7.3f}  {g['before']} -> {g['after']}"
        for g in found["gaps"]
    ]
    return "\n".join(lines)
