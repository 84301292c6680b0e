"""`python -m benchmarks NAME [options]`, from a checkout: runs one benchmark for developers."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hybrid_imagenet.benchmarks.selection import run_selected
from hybrid_imagenet.cluster.environment import restart_with_huge_pages
from hybrid_imagenet.resilience import interrupts, lossy_stream

# The module of each benchmark, and its description.
BENCHMARKS = {
    "step": (
        "benchmarks.step_rate",
        "images/s of a training step, compared with other frameworks",
    ),
    "peer": ("benchmarks.peer", "images/s of one other implementation of a training step"),
    "input_peers": ("benchmarks.input_peers", "bench input, compared with other libraries"),
    "scaling_peers": (
        "benchmarks.scaling_peers",
        "bench scaling, compared with Horovod's Keras",
    ),
    "arms": ("benchmarks.arms", "all measurements of one GPU within a few minutes"),
    "loop": ("benchmarks.loop", "the whole training loop, compared with the bare step"),
    "gaps": ("benchmarks.gaps", "the longest gaps between a GPU's kernels"),
    "optimizer": ("benchmarks.optimizer", "the update of each optimizer, compared with Keras's"),
    "start": ("benchmarks.start", "seconds to the first training step"),
    "compare": (
        "benchmarks.compare",
        "two JSON files of one benchmark: each measure with its change",
    ),
}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names.

    Returns:
      The exit code (see `hybrid_imagenet.errors`).
    """
    return run_selected(
        argv,
        program="python -m benchmarks",
        description="Compares this program with other implementations, and measures its parts.",
        benchmarks=BENCHMARKS,
        examples=(
            "python -m benchmarks step --peers=keras --json=new.json",
            "python -m benchmarks compare old.json new.json",
        ),
    )


if __name__ == "__main__":
    restart_with_huge_pages()
    lossy_stream.install()
    sys.exit(interrupts.run_interruptible(lambda: main(sys.argv[1:])))
