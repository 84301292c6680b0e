"""`hybrid-imagenet report RUN [RUN ...]`: a report on one or several runs, as HTML and PNG."""

from __future__ import annotations

import itertools
import pathlib
import sys
from collections.abc import Sequence

from hybrid_imagenet.errors import EXIT_OK, UserError
from hybrid_imagenet.tools.report import load, page, png

USAGE = """usage: hybrid-imagenet report RUN [RUN ...] [--out=DIR] [--title=TEXT]

Writes DIR/index.html, one file that needs no network, and a PNG of each plot. RUN is the directory of a run, finished
or not. DIR is RUN/report for one run and ./report for several."""


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns the exit code."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return EXIT_OK if arguments else UserError.exit_code
    try:
        for path in write(*_parse(arguments)):
            print(path)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return EXIT_OK


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


def _parse(arguments: Sequence[str]) -> tuple[list[str], str | None, str | None]:
    paths: list[str] = []
    options: dict[str, str | None] = {"out": None, "title": None}
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("-"):
            paths.append(argument)
        elif name in options and equals and value:
            options[name] = value
        else:
            raise UserError(f"{argument}: not an option; give --out=DIR or --title=TEXT")
    if not paths:
        raise UserError("no run given; name the directory of a run")
    return paths, options["out"], options["title"]
