"""Runs `hybrid-imagenet bench input`, then the pipelines of other libraries on the same files.

python -m benchmarks input_peers
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from hybrid_imagenet.benchmarks import input as packaged
from hybrid_imagenet.benchmarks import photographs
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_OK

PEERS = {
    name: Path(__file__).parent / "peers" / f"input_{name}.py"
    for name in ("official", "pillow", "dali")
}


def main(argv: list[str]) -> int:
    """Runs the benchmark; prints a table and writes --json."""
    parser = packaged.make_parser()
    parser.prog = "python -m benchmarks input_peers"
    parser.add_argument(
        "--peers",
        default=",".join(PEERS),
        metavar="NAME,...",
        help="other libraries to measure (default: %(default)s)",
    )
    parser.add_argument(
        "--dali_python",
        default=sys.executable,
        metavar="PYTHON",
        help="Python that has nvidia-dali-cuda120 (default: this one)",
    )
    arguments = parser.parse_args(argv)
    chosen = command_line.parse_names("--peers", arguments.peers, PEERS)
    if arguments.source:
        chosen = []
    rows = list(packaged.measure_all(arguments))
    for name in chosen:
        row = _measured(name, arguments)
        packaged.print_row(row)
        rows.append(row)
    packaged.write_results(arguments, rows)
    return EXIT_OK


def _measured(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one peer's script, whose last line is {"images", "seconds", "cpu_seconds"}."""
    python = arguments.dali_python if name == "dali" else sys.executable
    shard_directory = str(photographs.photograph_shards(None))
    values = [
        photographs.photograph_folder() / "train",
        shard_directory,
        arguments.batch,
        arguments.threads,
        arguments.seconds,
    ]
    command = [python, str(PEERS[name]), *map(str, values), str(arguments.image_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"name": name, "error": f"did not run: {reason[:150]}"}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return packaged.make_row(
        name, result["images"], result["seconds"], result["cpu_seconds"], arguments.threads
    )
