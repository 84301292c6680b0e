"""`python -m benchmarks NAME [options]`, from a checkout: the package's benchmarks beside others, and more."""

from __future__ import annotations

import functools
import importlib
import pathlib
import sys
from collections.abc import Callable, Sequence

from hybrid_imagenet.benchmarks import __main__ as packaged
from hybrid_imagenet.comm.environment import restart_with_huge_pages
from hybrid_imagenet.resilience import interrupts, lasting_output

_PEERS = pathlib.Path(__file__).parent / "peers"
BENCHMARKS = {
    "step": "images/s of a training step beside other frameworks",
    "loop": "the whole training loop beside the bare step",
    "optimizer": "the update of each optimizer beside Keras's",
    "start": "seconds to the first training step",
    "compare": "two JSON files of one benchmark: each measure with its change",
}
# Benchmarks that other implementations join, and what their main takes for it.
PEERS = {
    "step": {
        "keras": "benchmarks.peers.step_keras",
        "torch": "benchmarks.peers.step_torch",
        "torch_compiled": "benchmarks.peers.step_torch",
    },
    "input": {name: _PEERS / f"input_{name}.py" for name in ("official", "pillow", "dali")},
    "scaling": _PEERS / "scaling_horovod.py",
}


def _entry(name: str) -> Callable[[Sequence[str]], int | None]:
    package = "benchmarks" if name in BENCHMARKS else "hybrid_imagenet.benchmarks"
    main = importlib.import_module(f"{package}.{name}").main
    return functools.partial(main, **{"peer" if name == "scaling" else "peers": PEERS[name]}) if name in PEERS else main


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark that the first argument names with the rest of the arguments; returns its exit code."""
    return packaged.run(argv, "python -m benchmarks", packaged.BENCHMARKS | BENCHMARKS, _entry)


if __name__ == "__main__":
    restart_with_huge_pages()
    lasting_output.install()
    sys.exit(interrupts.ended_by_one_line(lambda: main(sys.argv[1:])))
