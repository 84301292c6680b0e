"""`hybrid-imagenet report RUN [RUN ...]`: a report on one or several runs, as HTML and PNG."""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Sequence

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.report import load, page, png


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "report",
        "Writes DIR/index.html, one file that needs no network, and a PNG of each plot.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="the directory of a run, finished or not")
    parser.add_argument("--out", metavar="DIR", help="default RUN/report for one run, ./report for several")
    parser.add_argument("--title", metavar="TEXT", help="of the page")
    return parser


def _run(arguments: Sequence[str]) -> None:
    parsed = _parser().parse_args(arguments)
    for path in write(parsed.runs, parsed.out, parsed.title):
        print(path)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code (see `hybrid_imagenet.errors`)."""
    return command_line.run(_run, arguments)


def write(paths: Sequence[str], out: str | None = None, title: str | None = None) -> list[pathlib.Path]:
    """Writes a report on runs; returns its files, the page first.

    Raises:
      UserError: if a run cannot be read or the report not be written.
    """
    runs = load.load_all(paths)
    directory = pathlib.Path(out or (pathlib.Path(paths[0]) / "report" if len(paths) == 1 else "report"))
    text = page.build(runs, title or "Training report: " + ", ".join(run.name for run in runs))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "index.html").write_text(text, encoding="utf-8")
        written = [directory / "index.html"]
        if png.available():
            written += png.draw(itertools.chain(*page.charts(runs).values()), runs, directory)
        else:
            print("no PNG: matplotlib is not installed; pip install matplotlib", file=sys.stderr)
    except OSError as error:
        raise UserError(f"--out={directory}: {error.strerror or error}") from None
    return written
