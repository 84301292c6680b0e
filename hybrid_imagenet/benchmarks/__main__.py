"""`python -m hybrid_imagenet.benchmarks NAME [options]`: runs one benchmark of this package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence

from hybrid_imagenet.comm.environment import restart_with_huge_pages
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, did_you_mean
from hybrid_imagenet.tools import command_line

BENCHMARKS = {
    "input": "images/s of reading and decoding",
    "allreduce": "seconds and bandwidth of each all-reduce, by size",
    "scaling": "images/s and exposed communication on 1, 2, ... ranks",
    "gpu": "from one GPU to the cluster: what is slow, and why",
}


def run(
    argv: Sequence[str],
    program: str,
    benchmarks: Mapping[str, str],
    entry: Callable[[str], Callable[[Sequence[str]], int | None]],
) -> int:
    """Runs the benchmark that the first argument names with the rest of the arguments; returns its
    exit code.
    """
    name = argv[0] if argv else ""
    if name not in benchmarks:
        wanted = name in ("-h", "--help")
        width = max(map(len, benchmarks))
        lines = [
            f"usage: {program} NAME [--name=value ...]   (NAME --help describes its options)",
            "",
        ]
        lines += [f"  {each:<{width}}  {text}" for each, text in benchmarks.items()]
        if name and not wanted:
            lines = [f"error: {name}: no such benchmark{did_you_mean(name, benchmarks)}", *lines]
        print("\n".join(lines), file=sys.stdout if wanted else sys.stderr)
        return EXIT_OK if wanted else EXIT_USAGE
    return command_line.run_command(lambda words: entry(name)(words), argv[1:])


def main(argv: Sequence[str]) -> int:
    """Runs `hybrid-imagenet bench`; returns the exit code (see `hybrid_imagenet.errors`)."""
    return run(
        argv,
        "hybrid-imagenet bench",
        BENCHMARKS,
        lambda name: importlib.import_module(f"hybrid_imagenet.benchmarks.{name}").main,
    )


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))
