"""Tries everything that a run does, in a few steps: training, validation, checkpoint, resume and report."""

from __future__ import annotations

import subprocess
import sys

from hybrid_imagenet.config import Config
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import run_dir

STEPS = (3, 5)
"""Updates after which the first part ends, and the second, which resumes it."""


def parts(config: Config) -> list[Config]:
    """Returns the configurations of the two parts, which share a directory of their own; the second resumes the first.

    Raises:
      UserError: if the directory that is asked for holds something.
    """
    path = run_dir.chosen(config.run_dir, "fast_dev_run", config.dataset)
    first, second = (
        config.replace(
            {},
            run_dir=str(path),
            max_steps=steps,
            resume=number > 0,
            log_every_steps=1,
            checkpoint_every_steps=None,
            eval_offset_epochs=0,
        )
        for number, steps in enumerate(STEPS)
    )
    return [first, second]


def report(config: Config) -> str:
    """Writes the report of a part's run; returns a line that says so. For rank 0.

    Raises:
      UserError: if that fails.
    """
    path = str(config.run_dir)
    # A program of its own: the commands stand on top of training, and this one runs beside a connected rank.
    command = [sys.executable, "-m", "hybrid_imagenet", "report", path]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        raise UserError(
            f"--fast_dev_run: the report failed: {made.stderr.strip().splitlines()[-1:] or made.returncode}"
        )
    return f"--fast_dev_run: trained, validated, saved, resumed and reported: {made.stdout.split()[0]}"
