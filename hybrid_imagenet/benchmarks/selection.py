"""Runs the benchmark that the first argument of a command names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence

from hybrid_imagenet.commands import command_line
from hybrid_imagenet.config.help import filled
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, did_you_mean, printable
from hybrid_imagenet.options import SPELLING


def run_selected(
    argv: Sequence[str],
    *,
    program: str,
    description: str,
    benchmarks: Mapping[str, tuple[str, str]],
    examples: Sequence[str],
) -> int:
    """Runs a benchmark, or prints the list of benchmarks.

    Args:
      argv: The words after the command's name; the first one names the benchmark.
      program: How a user starts the command, such as `hybrid-imagenet bench`.
      description: What the benchmarks do, as a sentence.
      benchmarks: The module of each benchmark, and its description.
      examples: Command lines for the help.

    Returns:
      The exit code (see `hybrid_imagenet.errors`).
    """
    name = argv[0] if argv else ""
    if name in benchmarks:
        module_name, _ = benchmarks[name]
        # Imported here, because some benchmarks import TensorFlow.
        module = importlib.import_module(module_name)
        return command_line.run_command(module.main, argv[1:])
    if name and name not in ("-h", "--help"):
        print(
            f"error: There is no benchmark {printable(name)}{did_you_mean(name, benchmarks)}."
            f" Choose one of {', '.join(benchmarks)}.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    print(
        _usage(program, description, benchmarks, examples), file=sys.stdout if name else sys.stderr
    )
    return EXIT_OK if name else EXIT_USAGE


def _usage(
    program: str,
    description: str,
    benchmarks: Mapping[str, tuple[str, str]],
    examples: Sequence[str],
) -> str:
    columns = command_line.width()
    width = max(map(len, benchmarks))
    lines = [f"usage: {program} NAME [--name=value ...]", "", filled(description, columns), ""]
    indent = " " * (width + 4)
    for name, (_, text) in benchmarks.items():
        lines.append(f"  {name:<{width}}  {filled(text, columns, indent).lstrip()}")
    lines += [
        "",
        filled(f"{program} NAME --help describes the options of a benchmark.", columns),
        "",
        "Examples:",
        *(f"  {example}" for example in examples),
        "",
        filled(SPELLING, columns),
    ]
    return "\n".join(lines)
