"""`python -m hybrid_imagenet.benchmarks NAME [options]`: runs one benchmark of this package."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from hybrid_imagenet.comm.environment import restart_with_huge_pages
from hybrid_imagenet.config.help import filled
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, did_you_mean, printable
from hybrid_imagenet.options import SPELLING
from hybrid_imagenet.tools import command_line

# The module of each benchmark, and its description.
BENCHMARKS = {
    "input": ("input", "images/s of reading and decoding"),
    "input_peers": ("input_peers", "input, compared with other libraries"),
    "allreduce": ("allreduce", "seconds and bandwidth of each all-reduce, by size"),
    "scaling": ("scaling", "images/s and exposed communication on 1, 2, ... ranks"),
    "scaling_peers": ("scaling_peers", "scaling, compared with Horovod's Keras"),
    "gpu": ("gpu", "from one GPU to the cluster: what is slow, and why"),
    "arms": ("arms", "all measurements of one GPU within a few minutes; from a checkout"),
    "step": ("step_rate", "images/s of a training step, compared with other frameworks"),
    "peer": ("peer", "images/s of one other implementation of a training step"),
    "loop": ("loop", "the whole training loop, compared with the bare step"),
    "gaps": ("gaps", "the longest gaps between a GPU's kernels"),
    "optimizer": ("optimizer", "the update of each optimizer, compared with Keras's"),
    "start": ("start", "seconds to the first training step; from a checkout"),
    "compare": ("compare", "two JSON files of one benchmark: each measure with its change"),
}


def main(argv: Sequence[str]) -> int:
    """Runs `hybrid-imagenet bench`; the first argument names the benchmark.

    Returns:
      The exit code (see `hybrid_imagenet.errors`).
    """
    name = argv[0] if argv else ""
    if name in ("-h", "--help"):
        print(_usage())
        return EXIT_OK
    if name not in BENCHMARKS:
        if name:
            suggestion = did_you_mean(name, BENCHMARKS)
            print(
                f"error: There is no benchmark {printable(name)}{suggestion}. Choose one of"
                f" {', '.join(BENCHMARKS)}.",
                file=sys.stderr,
            )
        else:
            print(_usage(), file=sys.stderr)
        return EXIT_USAGE
    module_name, _ = BENCHMARKS[name]
    # Imported here, because some benchmarks import TensorFlow.
    module = importlib.import_module(f"hybrid_imagenet.benchmarks.{module_name}")
    return command_line.run_command(module.main, argv[1:])


def _usage() -> str:
    columns = command_line.width()
    width = max(map(len, BENCHMARKS))
    lines = [
        "usage: hybrid-imagenet bench NAME [--name=value ...]",
        "",
        filled(
            "Measures the speed of this machine or cluster, and compares it with others.", columns
        ),
        "",
    ]
    indent = " " * (width + 4)
    for name, (_, description) in BENCHMARKS.items():
        text = filled(description, columns, indent).lstrip()
        lines.append(f"  {name:<{width}}  {text}")
    lines += [
        "",
        filled("hybrid-imagenet bench NAME --help describes the options of a benchmark.", columns),
        "",
        "Examples:",
        "  hybrid-imagenet bench input --source=digits --json=input.json",
        "  hybrid-imagenet bench gpu",
        "",
        filled(SPELLING, columns),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    restart_with_huge_pages()
    sys.exit(main(sys.argv[1:]))
