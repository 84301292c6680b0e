"""Implements `hybrid-imagenet report`, which writes a report on runs as HTML."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator, Sequence

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.commands.report import classes, findings, load, page
from hybrid_imagenet.errors import UserError

_EPILOG = """\
Examples:
  hybrid-imagenet report runs/NAME
Compare two runs:
  hybrid-imagenet report runs/one runs/other --out=comparison
Print a summary in the terminal:
  hybrid-imagenet report runs/NAME --text"""


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "report",
        "Writes a page with charts on one or several runs: results, where the time was spent, and"
        " what to try next. The page is one file, DIR/index.html, which needs no network.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help=f"{command_line.RUN_HELP}, finished or not"
    )
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="directory of the page (default: RUN/report for one run, ./report for several)",
    )
    parser.add_argument(
        "--text", action="store_true", help="print a summary of each run instead of writing files"
    )
    return parser


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parsed = _parser().parse_args(arguments)
    if parsed.out and parsed.text:
        raise UserError(
            f"--out={parsed.out} has no effect, because --text writes no files. Omit --out"
            " or --text."
        )
    if parsed.text:
        for number, run in enumerate(load.load_runs(parsed.runs)):
            if number:
                print()
            command_line.print_escaped(*summary_lines(run))
        return
    command_line.print_escaped(str(write(parsed.runs, parsed.out)))


def summary_lines(run: load.LoadedRun) -> Iterator[str]:
    """Yields the first part of the page about a run as lines of text."""
    assessment = findings.assess(run)
    yield f"{run.name}: {run.state}"
    yield assessment.outcome
    for text in (assessment.reference_comparison, assessment.handover_note, run.next_step):
        if text:
            yield text
    yield f"{assessment.causes_heading}:"
    for cause in assessment.causes:
        yield f"- {cause}"
    suggestions = findings.suggestions(run)
    if suggestions:
        yield "What to try next:"
        for suggestion in suggestions:
            yield f"- {suggestion.change}: {suggestion.reason}"
    if run.image_results is not None:
        yield from classes.text_lines(run.image_results)


def write(paths: Sequence[str], out: str | None = None) -> pathlib.Path:
    """Writes a report on runs.

    Args:
      paths: Run directories.
      out: Directory of the report. Without it, the report of one run is in its directory, and the
        report of several runs in ./report.

    Returns:
      The path of the page.

    Raises:
      UserError: If a run cannot be read or the report cannot be written.
    """
    runs = load.load_runs(paths)
    if out:
        directory = files.output_path("--out", out)
    elif len(paths) == 1:
        directory = files.output_path("--out", pathlib.Path(paths[0]) / "report")
    else:
        directory = files.output_path("--out", "report")
    title = "Training report: " + ", ".join(run.name for run in runs)
    html = page.build(runs, title)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "index.html").write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"--out={directory} could not be written: {error.strerror or error}. Choose another"
            " directory."
        ) from None
    return directory / "index.html"
