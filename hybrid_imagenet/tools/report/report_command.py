"""`hybrid-imagenet report RUN [RUN ...]`: a report on one or several runs, as HTML."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.report import classes, findings, load, page


def _parser() -> command_line.Parser:
    parser = command_line.Parser("report", "Writes DIR/index.html, one file that needs no network.")
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help=f"{command_line.RUN_HELP}, finished or not"
    )
    parser.add_argument(
        "--out", metavar="DIR", help="default: RUN/report for one run, ./report for several"
    )
    parser.add_argument(
        "--text", action="store_true", help="write nothing; print the summary of each run"
    )
    return parser


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parsed = _parser().parse_args(arguments)
    if parsed.out and parsed.text:
        raise UserError(f"--out={parsed.out}: --text writes nothing; omit --out")
    if parsed.text:
        runs = load.load_all(parsed.runs)
        command_line.print_escaped("\n\n".join("\n".join(text(run)) for run in runs))
        return
    command_line.print_escaped(str(write(parsed.runs, parsed.out)))


def text(run: load.Run) -> Iterator[str]:
    """Yields what the page says first about a run, as lines of text."""
    found = findings.answers(run)
    yield f"{run.name}: {run.state}"
    yield from filter(None, (found.outcome, found.compared, found.handover, run.following))
    yield f"{found.heading}:"
    yield from (f"- {line}" for line in found.held_back)
    changes = findings.suggestions(run)
    if changes:
        yield "What to try next:"
        yield from (f"- {change.change}: {change.why}" for change in changes)
    if run.images is not None:
        yield from classes.lines(run.images)


def write(paths: Sequence[str], out: str | None = None) -> pathlib.Path:
    """Writes a report on runs; returns the path of its page.

    Raises:
      UserError: if a run cannot be read or the report not be written.
    """
    runs = load.load_all(paths)
    directory = files.output_path(
        "--out", out or (pathlib.Path(paths[0]) / "report" if len(paths) == 1 else "report")
    )
    text = page.build(runs, "Training report: " + ", ".join(run.name for run in runs))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "index.html").write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out={directory}: {error.strerror or error}") from None
    return directory / "index.html"
