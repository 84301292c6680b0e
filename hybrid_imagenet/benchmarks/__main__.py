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
    """Runs the benchmark that the first argument names.

    Args:
      argv: name of the benchmark, and its arguments.
      program: the command, for the usage message.
      benchmarks: description of each benchmark.
      entry: returns the main function of a benchmark.

    Returns:
      The exit code.
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(_usage(program, benchmarks))
        return EXIT_OK
    if name not in benchmarks:
        if name:
            suggestion = did_you_mean(name, benchmarks)
            print(f"error: {name}: no such benchmark{suggestion}", file=sys.stderr)
        print(_usage(program, benchmarks), file=sys.stderr)
        return EXIT_USAGE
    return command_line.run_command(lambda words: entry(name)(words), argv[1:])


def _usage(program: str, benchmarks: Mapping[str, str]) -> str:
    width = max(map(len, benchmarks))
    lines = [f"usage: {program} NAME [--name=value ...]   (NAME --help describes its options)", ""]
    lines += [f"  {name:<{width}}  {description}" for name, description in benchmarks.items()]
    return "\n".join(lines)


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
