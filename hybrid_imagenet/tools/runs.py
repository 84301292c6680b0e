"""`hybrid-imagenet runs [DIR]`, `status RUN` and `stop RUN`: runs as a table, how one stands, and
asking it to stop.
"""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError, printable
from hybrid_imagenet.runlog import state
from hybrid_imagenet.runlog.summary import format_duration, format_epochs, last_throughput
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.report import findings, load
from hybrid_imagenet.tools.report.tables import DASH, number, percent, text

_HEAD = ("run", "recipe", "data", "state", "top-1", "epochs", "images/s", "when")
_DAMAGED = "damaged"
_RIGHT = ("top-1", "epochs", "images/s")
_LOOK_SECONDS = 0.5


def _parser() -> command_line.Parser:
    parser = command_line.Parser("runs", "Lists the runs in a directory, the newest last.")
    parser.add_argument(
        "directory", nargs="?", default="runs", metavar="DIR", help="holds runs (default: runs)"
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar="RUN",
        help="instead: the flags in which these two runs differ, in two columns",
    )
    return parser


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs `runs`."""
    parsed = _parser().parse_args(arguments)
    if parsed.diff:
        one, other = (load.load_run(path) for path in parsed.diff)
        rows = [(name, *map(text, values)) for name, values in load.differing_flags([one, other])]
        command_line.print_escaped(
            table(("flag", *parsed.diff), rows) if rows else "All flags are the same."
        )
        return
    directory = pathlib.Path(parsed.directory)
    found = _runs_in(directory)
    if not found:
        raise UserError(f"{directory}: no runs there; give the directory that holds them")
    rows = [row(path) for path in found]
    if any(line[-1] for line in rows):
        command_line.print_escaped(table((*_HEAD, "problem"), rows))
    else:
        command_line.print_escaped(table(_HEAD, [line[:-1] for line in rows]))


def _runs_in(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the runs in a directory, the newest last: each directory with a config.json, of
    whatever kind it is.
    """
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    return sorted(
        (path for path in entries if os.path.lexists(path / "config.json")), key=state.last_write
    )


def row(directory: pathlib.Path) -> tuple[str, ...]:
    """Returns a run in the columns of the table, and in the last cell why it cannot be read, if
    so.
    """
    when = _date(state.last_write(directory))
    try:
        run = load.load_run(directory)
        planned = f"/{format_epochs(run.epochs_planned)}" if run.epochs_planned else ""
        return (
            directory.name,
            text(run.flags.get("recipe")),
            text(run.flags.get("dataset")),
            run.state,
            percent(run.summary.get("best_val_top1")),
            f"{format_epochs(run.summary.get('epochs') or 0)}{planned}",
            number(run.summary.get("steady_images_per_second") or last_throughput(run.epochs)),
            when,
            "",
        )
    except UserError as error:
        problem = str(error)
    except Exception as error:
        # One run whose damage no check has foreseen must not hide all others.
        problem = f"{type(error).__name__}: {error}"
    return directory.name, DASH, DASH, _DAMAGED, DASH, DASH, DASH, when, problem


def _date(seconds: float) -> str:
    """Returns a time in seconds since 1970 as a date of this place; a dash for one that no calendar
    has.
    """
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return DASH


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts in aligned columns, the figures to the right."""
    lines = [list(map(printable, line)) for line in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    forms = [
        f"{{:{'>' if name in _RIGHT else '<'}{width}}}"
        for name, width in zip(head, widths, strict=True)
    ]
    return "\n".join("  ".join(forms).format(*line).rstrip() for line in lines)


def _directory(program: str, description: str, arguments: Sequence[str]) -> pathlib.Path:
    """The argument of a command on one run."""
    parser = command_line.Parser(program, description)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help=command_line.RUN_HELP)
    return pathlib.Path(parser.parse_args(arguments).run)


@command_line.command
def status(arguments: Sequence[str]) -> None:
    """Runs `status`."""
    directory = _directory(
        "status", "Prints the state of a run, and how to continue or stop it.", arguments
    )
    command_line.print_escaped(_standing(directory))


@command_line.command
def stop(arguments: Sequence[str]) -> None:
    """Runs `stop`."""
    directory = _directory(
        "stop", "Asks a run on this host to save and stop, and waits until it has.", arguments
    )
    if files.lock_holder(directory) is None:
        raise UserError(_nothing_to_stop(directory))
    state.stop(directory)
    while files.lock_holder(directory) is not None:
        time.sleep(_LOOK_SECONDS)
    command_line.print_escaped(_standing(directory))


def _nothing_to_stop(directory: pathlib.Path) -> str:
    """Returns why a run whose lock is free cannot be stopped.

    Raises:
      UserError: if there is no run.
    """
    run = load.load_run(directory)
    epochs = f"epoch {max((record.get('epoch') or 0 for record in run.epochs), default=0):g}"
    if run.state == state.FINISHED:
        return f"{directory}: finished at {epochs}, so there is nothing to stop"
    if run.state == state.UNKNOWN:
        hosts = ", ".join(dict.fromkeys(run.environment.get("hosts", ()))) or "another host"
        return f"{directory}: does not run on this host. It was started on {hosts}: stop it there"
    verb = "diverged" if run.state == state.DIVERGED else f"was {run.state}"
    return (
        f"{directory}: {verb} at {epochs} and no longer runs, so there is nothing to stop."
        f" {run.next_step}"
    )


def _standing(directory: pathlib.Path) -> str:
    """The state of a run, its results so far, and the command that continues or stops it."""
    run = load.load_run(directory)
    recorded = (record.get("step") or 0 for record in (*run.steps, *run.epochs))
    last = max([run.summary.get("steps") or 0, *recorded])  # a run may end between two records
    age = format_duration(max(time.time() - state.last_write(directory), 0.0))
    found = [
        f"{directory}: {run.state}, step {last}, last record {age} ago",
        findings.assess(run).outcome,
    ]
    return "\n".join([*found, *filter(None, [run.next_step])])
