"""Measures the training step of one other implementation, in images per second.

`step` times implementations in turns with this program's. This benchmark times a single one,
so that an arm of `arms` can be compared with other arms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.step_rate import PEERS, SETTINGS, Implementation, settings_of
from benchmarks.turns import wait_for_turn
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_OK
from hybrid_imagenet.models.depths import WIDTH

_EPILOG = """\
Examples:
  python -m benchmarks peer --peer=keras
  python -m benchmarks peer --peer=jax --python=/opt/jax/bin/python --batch=128"""

_NETWORK = {"model": "resnet50", "width": WIDTH, "stem": "imagenet", "num_classes": 1000}


def main(argv: Sequence[str]) -> int:
    """Times the implementation and prints the result.

    Raises:
      UserError: If the implementation fails.
    """
    options = _parse(argv)
    settings = dict(_NETWORK)
    for name in SETTINGS:
        if name not in _NETWORK:
            settings[name] = getattr(options, name)
    settings |= settings_of(options.peer)
    implementation = Implementation(options.peer, options.python, settings, PEERS[options.peer])
    row: dict[str, Any] = {"benchmark": "peer", "peer": options.peer, **settings}
    try:
        if "skipped" in implementation.description:
            row["skipped"] = implementation.description["skipped"]
            print(f"{options.peer}: skipped, {row['skipped']}")
        else:
            wait_for_turn()
            for _ in range(options.rounds):
                implementation.run(options.steps)
            row |= implementation.result()
            row["step_seconds"] = row["seconds_per_step"]
            print(f"{options.peer}: {row['images_per_second']:,.1f} images/s")
    finally:
        implementation.end()
    command_line.write_json(options.json, row)
    return EXIT_OK


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m benchmarks peer",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--peer",
        required=True,
        metavar="NAME",
        choices=PEERS,
        help=f"implementation to measure: {', '.join(PEERS)}",
    )
    parser.add_argument(
        "--python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python that has the framework of the implementation (default: this one)",
    )
    parser.add_argument(
        "--batch",
        type=command_line.positive_int,
        default=256,
        help="images per step (default: %(default)s)",
    )
    parser.add_argument(
        "--image_size",
        type=command_line.positive_int,
        default=224,
        help="height and width of the images in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        default="mixed_float16",
        choices=("float32", "mixed_float16", "mixed_bfloat16"),
        help="type to compute in (default: %(default)s)",
    )
    scaling.add_round_options(parser, steps=20, rounds=3)
    parser.add_argument(
        "--threads",
        type=command_line.positive_int,
        default=2,
        help="threads of the implementation on a CPU (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    return parser.parse_args(list(argv))
