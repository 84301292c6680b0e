"""`hybrid-imagenet status RUN`: how a run stands, and how to continue or stop it."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Sequence

from hybrid_imagenet.runlog import state
from hybrid_imagenet.runlog.summary import duration
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.report import findings, load


def directory_of(program: str, description: str, arguments: Sequence[str]) -> pathlib.Path:
    """The argument of a command on one run."""
    parser = command_line.Parser(program, description)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help="the directory of a run")
    return pathlib.Path(parser.parse_args(arguments).run)


def _status(arguments: Sequence[str]) -> None:
    directory = directory_of("status", "Says how a run stands, and how to continue or stop it.", arguments)
    print("\n".join(lines(directory)))


def lines(directory: pathlib.Path) -> list[str]:
    """The state of a run, its results so far, and the command that continues or stops it."""
    run = load.load(directory)
    records = [*run.steps, *run.epochs]
    last = max((record.get("step") or 0 for record in records), default=0)
    age = duration(max(time.time() - state.last_write(directory), 0.0))
    found = [f"{directory}: {run.state}, step {last}, last record {age} ago", findings.answers(run).outcome]
    return [*found, *filter(None, [run.following])]


def main(arguments: Sequence[str]) -> int:
    """Runs `status`; returns the exit code (see `hybrid_imagenet.errors`)."""
    return command_line.run(_status, arguments)
