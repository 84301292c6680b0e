"""`hybrid-imagenet demo`: trains a small network on handwritten digits, in less than a minute.

It shows that an installation works and what a run looks like. It is `hybrid-imagenet run`, or
`train` where ranks cannot be started, with a flag file that comes with the program.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet import files
from hybrid_imagenet import main as training
from hybrid_imagenet.commands import command_line, mpirun, run
from hybrid_imagenet.errors import EXIT_OK, UserError, pluralize
from hybrid_imagenet.runlog import run_dir

# A small network instead of the flag file's ResNet-50, which takes some minutes on two cores.
_FLAGS = (
    "--flagfile=digits",
    "--model=resnet8",
    "--model_width=16",
    "--target_top1=0.95",
)
_EPILOG = """\
Examples:
  hybrid-imagenet demo
  hybrid-imagenet demo --run_dir=runs/first"""
_NEXT_STEPS = """
The installation works. What to try next, besides the commands above:
  hybrid-imagenet train --dataset=folder --data_dir=photos --val_fraction=0.2
      trains ResNet-50 on your own images, with a directory for each class in photos/
  cp {example} . && {run} keras_fit.py
      trains a Keras model by model.fit on {ranks}; put your own model in its place
  hybrid-imagenet doctor
      checks this host, its GPUs and its network before a long run"""


@command_line.command
def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code of the training."""
    parser = command_line.Parser(
        "demo",
        "Trains a small network on handwritten digits, which come with the program: on two CPU"
        " ranks, or on one if there is no Open MPI. It takes less than a minute. Use it after an"
        " installation, to see that everything works and what a run looks like.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        help="a new directory for the results (default: runs/demo, or runs/demo-2 and so on)",
    )
    options = parser.parse_args(arguments)
    directory = options.run_dir or run_dir.free_name(Path("runs", "demo"))
    flags = [*_FLAGS, f"--run_dir={directory}"]
    num_ranks = _choose_num_ranks()
    # GPUs would only add the time that their libraries need to start.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if num_ranks > 1:
        exit_code = run.main(["-np", str(num_ranks), "--", *flags])
    else:
        exit_code = training.main(flags)
    if exit_code == EXIT_OK:
        _print_next_steps(num_ranks)
    return exit_code


def _choose_num_ranks() -> int:
    try:
        mpirun.find()
    except UserError as error:
        print(f"training on one rank instead of two: {error}", file=sys.stderr)
        return 1
    if importlib.util.find_spec("mpi4py") is None:
        print("training on one rank instead of two: mpi4py is not installed", file=sys.stderr)
        return 1
    return 2


def _print_next_steps(num_ranks: int) -> None:
    next_steps = _NEXT_STEPS.format(
        example=shlex.quote(str(files.shipped_directory("examples") / "keras_fit.py")),
        run="python" if num_ranks == 1 else f"hybrid-imagenet run -np {num_ranks}",
        ranks=pluralize(num_ranks, "rank"),
    )
    command_line.print_escaped(*next_steps.splitlines())
