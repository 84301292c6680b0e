"""Runs a benchmark by name, from a checkout: `python -m benchmarks NAME [options]`.

These are the benchmarks of the package compared with other implementations, and more.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence

from hybrid_imagenet.benchmarks import __main__ as packaged
from hybrid_imagenet.comm.environment import restart_with_huge_pages
from hybrid_imagenet.resilience import interrupts, lossy_stream

BENCHMARKS = {
    "step": "images/s of a training step, compared with other frameworks",
    "peer": "images/s of one other implementation of a training step",
    "loop": "the whole training loop, compared with the bare step",
    "gaps": "the longest gaps between a GPU's kernels",
    "optimizer": "the update of each optimizer, compared with Keras's",
    "start": "seconds to the first training step",
    "input": "images/s of reading and decoding, compared with other libraries",
    "scaling": "images/s on 1, 2, ... ranks, compared with Horovod's Keras",
    "arms": "all measurements of one GPU within a few minutes (bench gpu --arms)",
    "compare": "two JSON files of one benchmark: each measure with its change",
}


def _entry(name: str) -> Callable[[Sequence[str]], int | None]:
    package = "benchmarks" if name in BENCHMARKS else "hybrid_imagenet.benchmarks"
    return importlib.import_module(f"{package}.{name}").main


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names with the rest of the arguments; returns its
    exit code.
    """
    return packaged.run(argv, "python -m benchmarks", packaged.BENCHMARKS | BENCHMARKS, _entry)


if __name__ == "__main__":
    restart_with_huge_pages()
    lossy_stream.install()
    sys.exit(interrupts.run_interruptible(lambda: main(sys.argv[1:])))
