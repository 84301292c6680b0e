"""Runs `hybrid-imagenet bench scaling`, and another implementation for comparison.

    python -m benchmarks scaling_peers

The other implementation is ResNet-50 of legacy Keras with Horovod's optimizer for it. It has the
same batch and number of threads.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet import config as configuration
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import pluralize

PEER = Path(__file__).parent / "peers" / "scaling_horovod.py"


def main(argv: Sequence[str]) -> int:
    """Starts the jobs of both implementations, and prints the table and the comparison."""
    words, flags = scaling.split_arguments(argv)
    options = parser().parse_args(words)
    rows = scaling.run_jobs(options, flags)
    peers = []
    if options.peers:
        for ranks in scaling.parse_rank_counts(options.ranks):
            peers.append(peer_job(ranks, options, flags))
    print_peers(rows, peers)
    command_line.write_json(options.json, rows + peers)
    return 0


def parser() -> argparse.ArgumentParser:
    """Returns a parser with the options of `bench scaling` and --peers."""
    result = scaling.make_parser()
    result.prog = "python -m benchmarks scaling_peers"
    result.add_argument(
        "--peers",
        choices=("horovod",),
        metavar="NAME",
        help="other implementation to measure: horovod (default: none)",
    )
    return result


def peer_job(ranks: int, options: argparse.Namespace, flags: Sequence[str]) -> scaling.Row:
    """Returns the output of the peer's rank 0, with our number of threads per rank."""
    config = configuration.resolve(flags)
    settings = {
        "batch": config.optimization.per_gpu_batch,
        "image_size": config.network.image_size,
        # The default of Keras.
        "precision": "float32",
        "compression": "none",
        "threads": options.threads or max(1, len(os.sched_getaffinity(0)) // ranks),
        "steps": options.steps,
        "rounds": options.rounds,
        "classes": options.classes,
    }
    command = scaling.job_command([json.dumps(settings)], ranks, options.hosts, options, str(PEER))
    return scaling.run_job(command, ranks, options.timeout)


def print_peers(rows: Sequence[scaling.Row], peers: Sequence[scaling.Row]) -> None:
    """Prints one line for each job of the peer, and gives its row our advantage as `ratio`."""
    for ours, peer in zip(rows, peers, strict=False):
        if "skipped" in peer:
            print(f"horovod: skipped, {peer['skipped']}")
            continue
        peer["ratio"] = ours["images_per_second"] / peer["images_per_second"]
        print(
            f"Horovod with legacy Keras, {peer['precision']}, {pluralize(peer['ranks'], 'rank')}: "
            f"{peer['images_per_second']:.1f} images/s; ours is {peer['ratio']:.2f} times as fast"
        )
