"""`hybrid-imagenet runs [DIR]`, `status RUN` and `stop RUN`: lists, describes and stops runs."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Sequence

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.commands.report import findings, load
from hybrid_imagenet.commands.report.tables import DASH, percent_cell, rate_cell, value_cell
from hybrid_imagenet.errors import UserError, printable
from hybrid_imagenet.runlog import state
from hybrid_imagenet.runlog.summary import format_duration, format_epochs, last_throughput

_COLUMNS = ("run", "recipe", "data", "state", "top-1", "epochs", "images/s", "when")
_RIGHT_ALIGNED = ("top-1", "epochs", "images/s")
_DAMAGED = "damaged"
_POLL_SECONDS = 0.5
_RUNS_EPILOG = """\
Examples:
  hybrid-imagenet runs
  hybrid-imagenet runs /shared/experiments
  hybrid-imagenet runs --diff runs/one runs/other"""
_STATUS_EPILOG = """\
Examples:
  hybrid-imagenet status runs/NAME
Look at it every minute:
  watch -n 60 hybrid-imagenet status runs/NAME"""
_STOP_EPILOG = """\
Examples:
  hybrid-imagenet stop runs/NAME
Stop it, and continue on four ranks:
  hybrid-imagenet stop runs/NAME && hybrid-imagenet resume runs/NAME -np 4"""


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs `runs`."""
    options = _runs_parser().parse_args(arguments)
    if options.diff:
        _print_difference(options.diff)
    else:
        _print_runs(pathlib.Path(options.directory))


@command_line.command
def status(arguments: Sequence[str]) -> None:
    """Runs `status`."""
    directory = _parse_directory(
        "status",
        "Prints the state of a run (running, finished, stopped, failed, killed or diverged), its"
        " results so far, and the command that continues or stops it.",
        _STATUS_EPILOG,
        arguments,
    )
    command_line.print_escaped(*_describe(directory))


@command_line.command
def stop(arguments: Sequence[str]) -> None:
    """Runs `stop`."""
    directory = _parse_directory(
        "stop",
        "Asks a run on this host to save a checkpoint and stop, and waits until it has. Use it to"
        " free the GPUs; hybrid-imagenet resume continues the run.",
        _STOP_EPILOG,
        arguments,
    )
    if files.lock_holder(directory) is None:
        raise UserError(_nothing_to_stop_message(directory))
    state.stop(directory)
    while files.lock_holder(directory) is not None:
        time.sleep(_POLL_SECONDS)
    command_line.print_escaped(*_describe(directory))


def _runs_parser() -> command_line.Parser:
    parser = command_line.Parser(
        "runs",
        "Lists the runs in a directory with their state, accuracy and speed, the newest last. With"
        " --diff, compares the flags of two runs.",
        epilog=_RUNS_EPILOG,
    )
    parser.add_argument(
        "directory",
        nargs="?",
        default="runs",
        metavar="DIR",
        help="directory that contains runs (default: %(default)s)",
    )
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar="RUN",
        help="list the flags in which these two runs differ, instead of the runs in a directory",
    )
    return parser


def _parse_directory(
    command_name: str, description: str, epilog: str, arguments: Sequence[str]
) -> pathlib.Path:
    """Parses the arguments of a command on one run; returns the run's directory."""
    parser = command_line.Parser(command_name, description, epilog=epilog)
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help=command_line.RUN_HELP)
    return pathlib.Path(parser.parse_args(arguments).run)


def _print_difference(paths: Sequence[str]) -> None:
    runs = [load.load_run(path) for path in paths]
    rows = []
    for name, values in load.differing_flags(runs):
        rows.append((name, *(value_cell(value) for value in values)))
    if rows:
        command_line.print_escaped(*format_table(("flag", *paths), rows))
    else:
        command_line.print_escaped("All flags are the same.")


def _print_runs(directory: pathlib.Path) -> None:
    run_directories = _runs_in(directory)
    if not run_directories:
        raise UserError(f"{directory} contains no runs. Pass the directory that contains them.")
    rows = [run_row(run_directory) for run_directory in run_directories]
    has_problems = any(row[-1] for row in rows)
    if has_problems:
        table = format_table((*_COLUMNS, "problem"), rows)
    else:
        table = format_table(_COLUMNS, [row[:-1] for row in rows])
    command_line.print_escaped(*table)


def _runs_in(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the runs in a directory, the newest last.

    A run is a directory with a config.json, even if that is not a regular file: the table then
    shows what is wrong.
    """
    try:
        entries = list(directory.iterdir())
    except OSError:
        return []
    runs = [entry for entry in entries if os.path.lexists(entry / "config.json")]
    return sorted(runs, key=state.last_write)


def run_row(directory: pathlib.Path) -> tuple[str, ...]:
    """Returns the cells of a run in the table.

    The last cell is the reason why the run cannot be read, or "".
    """
    last_write = _format_date(state.last_write(directory))
    try:
        run = load.load_run(directory)
        epochs = format_epochs(run.summary.get("epochs") or 0)
        if run.epochs_planned:
            epochs += f"/{format_epochs(run.epochs_planned)}"
        throughput = run.summary.get("steady_images_per_second") or last_throughput(run.epochs)
        return (
            directory.name,
            value_cell(run.flags.get("recipe")),
            value_cell(run.flags.get("dataset")),
            run.state,
            percent_cell(run.summary.get("best_val_top1")),
            epochs,
            rate_cell(throughput),
            last_write,
            "",
        )
    except UserError as error:
        problem = str(error)
    except Exception as error:
        # One run with damage that no check has foreseen must not hide all other runs.
        problem = f"{type(error).__name__}: {error}"
    return directory.name, DASH, DASH, _DAMAGED, DASH, DASH, DASH, last_write, problem


def _format_date(seconds: float) -> str:
    """Formats seconds since 1970 as local time; returns a dash for a time without a date."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):
        return DASH


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns lines with aligned columns; columns of numbers are aligned to the right."""
    lines = [[printable(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    formatted = []
    for line in lines:
        cells = []
        for name, width, cell in zip(head, widths, line, strict=True):
            cells.append(cell.rjust(width) if name in _RIGHT_ALIGNED else cell.ljust(width))
        formatted.append("  ".join(cells).rstrip())
    return formatted


def _nothing_to_stop_message(directory: pathlib.Path) -> str:
    """Returns why a run whose lock is free cannot be stopped.

    Raises:
      UserError: If there is no run.
    """
    run = load.load_run(directory)
    last_epoch = max((record.get("epoch") or 0 for record in run.epochs), default=0)
    if run.state == state.FINISHED:
        return f"{directory} finished at epoch {last_epoch:g}, so there is nothing to stop."
    if run.state == state.UNKNOWN:
        hosts = ", ".join(dict.fromkeys(run.environment.get("hosts", ()))) or "another host"
        return (
            f"{directory} does not run on this host. It was started on {hosts}, so stop it there."
        )
    ended_itself = run.state in (state.DIVERGED, state.FAILED)
    end = run.state if ended_itself else f"was {run.state}"
    return (
        f"{directory} {end} at epoch {last_epoch:g} and no longer runs, so there is nothing to"
        f" stop. {run.next_step}"
    )


def _describe(directory: pathlib.Path) -> list[str]:
    """Returns lines: the state of a run, its results, and the command to continue or stop it."""
    run = load.load_run(directory)
    # A run may end between two records; then only its summary has the last step.
    last_step = run.summary.get("steps") or 0
    for record in (*run.steps, *run.epochs):
        last_step = max(last_step, record.get("step") or 0)
    age = format_duration(max(time.time() - state.last_write(directory), 0.0))
    lines = [
        f"{directory}: {run.state}, step {last_step}, last record {age} ago",
        findings.assess(run).outcome,
    ]
    if run.next_step:
        lines.append(run.next_step)
    return lines
