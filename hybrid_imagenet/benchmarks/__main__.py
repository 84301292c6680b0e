"""`python -m hybrid_imagenet.benchmarks NAME [options]`: runs one benchmark of this package."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_imagenet.benchmarks.selection import run_selected
from hybrid_imagenet.cluster.environment import restart_with_huge_pages
from hybrid_imagenet.errors import EXIT_USAGE

# The module of each benchmark, and its description.
BENCHMARKS = {
    "input": ("hybrid_imagenet.benchmarks.input", "images/s of reading and decoding"),
    "allreduce": (
        "hybrid_imagenet.benchmarks.allreduce",
        "seconds and bandwidth of each all-reduce, by size",
    ),
    "scaling": (
        "hybrid_imagenet.benchmarks.scaling",
        "images/s and exposed communication on 1, 2, ... ranks",
    ),
    "gpu": (
        "hybrid_imagenet.benchmarks.gpu",
        "from one GPU to the cluster: what is slow, and why",
    ),
}
# Benchmarks that are only in the repository.
MOVED = (
    "arms",
    "compare",
    "gaps",
    "input_peers",
    "loop",
    "optimizer",
    "peer",
    "scaling_peers",
    "start",
    "step",
)


def main(argv: Sequence[str]) -> int:
    """Runs `hybrid-imagenet bench`; the first argument names the benchmark.

    Returns:
      The exit code (see `hybrid_imagenet.errors`).
    """
    if argv and argv[0] in MOVED:
        print(
            f"error: bench {argv[0]} is no longer in the package. Run python -m benchmarks"
            f" {argv[0]} in a checkout of this program.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return run_selected(
        argv,
        program="hybrid-imagenet bench",
        description="Measures the speed of this machine or cluster.",
        benchmarks=BENCHMARKS,
        examples=(
            "hybrid-imagenet bench input --source=digits --json=input.json",
            "hybrid-imagenet bench gpu",
        ),
    )


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))
