"""Runs a rank of `hybrid-imagenet bench scaling` whose steps are timed when its turn begins.

It is an arm of `python -m benchmarks arms`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.turns import wait_for_turn
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.cluster.environment import restart_with_huge_pages
from hybrid_imagenet.commands import command_line


def main(argv: Sequence[str]) -> int:
    """Runs the rank; rank 0 prints the result."""
    words, flags = scaling.split_arguments(argv)
    options = scaling.make_parser().parse_args(words)
    return scaling.run_worker(options, flags, wait_for_turn)


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(command_line.run_command(main, sys.argv[1:]))
