"""Lists measures that became slower or larger between two runs of a benchmark.

Where both files hold the same peers' rates (step, loop, input), the machine's own drift is taken
out first. The exit code is 1 when anything is worse by more than the tolerance.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import UserError

_EPILOG = """\
Examples:
  python -m benchmarks compare old.json new.json
  python -m benchmarks compare old.json new.json --tolerance=0.1"""

HIGHER_IS_BETTER = ("images_per_second", "bytes_per_second", "operations_per_second", "busbw_gb_s")
LOWER_IS_BETTER = (
    "milliseconds",
    "host_milliseconds",
    "step_seconds",
    "seconds_per_image",
    "cpu_seconds_per_step",
    "peak_bytes",
)
SETTINGS = ("benchmark", "batch", "image_size", "precision", "threads", "ranks", "model")


def measures(report: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yields the measured numbers in a report with their paths.

    A member of a list is identified by its `name` if it has one, else by its index.
    """
    if isinstance(report, list):
        for index, item in enumerate(report):
            name = item.get("name", index) if isinstance(item, dict) else index
            yield from measures(item, f"{path}{name}/")
    elif isinstance(report, dict):
        for key, value in report.items():
            if isinstance(value, dict | list):
                yield from measures(value, f"{path}{key}/")
            elif key in HIGHER_IS_BETTER + LOWER_IS_BETTER and isinstance(value, int | float):
                yield path + key, float(value)


def drift(old: dict[str, float], new: dict[str, float]) -> float:
    """Estimates how much faster the machine was in the new run.

    This is the median change of the peers' rates, or 1 without peers.
    """
    shared = [
        p for p in old if p.startswith("peers/") and p.endswith("images_per_second") and p in new
    ]
    return statistics.median(new[p] / old[p] for p in shared) if shared else 1.0


def compare(old: Any, new: Any) -> list[tuple[str, float, float, float]]:
    """Rows (path, old, new, gain) for all measures of ours that both reports hold, peers left out.

    The gain is the factor by which the new value is better, after the machine's drift: under 1 is
    worse.

    Raises:
      UserError: If the reports are of different benchmarks or settings, or share no measure.
    """
    for key in SETTINGS:
        if isinstance(old, dict) and isinstance(new, dict) and old.get(key) != new.get(key):
            raise UserError(
                f"{key} is {old.get(key)} in OLD and {new.get(key)} in NEW. Pass two files of the"
                " same benchmark and settings."
            )
    before, after = dict(measures(old)), dict(measures(new))
    factor = drift(before, after)
    rows = []
    for path, value in before.items():
        if path.startswith("peers/") or path not in after or not value or not after[path]:
            continue
        gain = after[path] / value
        name = path.rpartition("/")[2]
        if name in LOWER_IS_BETTER:
            gain = 1 / gain
        if name == "images_per_second":
            gain /= factor
        rows.append((path, value, after[path], gain))
    if not rows:
        raise UserError(
            "OLD and NEW have no measure in common. Pass two files of the same benchmark."
        )
    return rows


def load(path: str) -> Any:
    """Reads a report.

    Raises:
      UserError: If the file cannot be read or is not JSON.
    """
    remedy = "Pass a file that --json of a benchmark has written."
    try:
        return json.loads(pathlib.Path(path).read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. {remedy}") from None
    except ValueError:
        raise UserError(f"{path} is not a JSON file. {remedy}") from None


def main(argv: Sequence[str]) -> int:
    """Prints the table and tells by the exit code whether anything became worse."""
    parser = command_line.Parser(
        prog="python -m benchmarks compare",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument("old", metavar="OLD", help="JSON file of the earlier run")
    parser.add_argument("new", metavar="NEW", help="JSON file of the later run")
    parser.add_argument(
        "--tolerance",
        type=command_line.number,
        default=0.05,
        help="fraction by which a measure may be worse (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    rows = compare(load(options.old), load(options.new))
    worse = 0
    for path, old, new, gain in rows:
        slower = gain < 1 - options.tolerance
        worse += slower
        print(
            f"{path:50} {old:14.5g} {new:14.5g}  {100 * (gain - 1):+6.1f}"
            f" %{'  WORSE' if slower else ''}"
        )
    print(f"{worse} of {len(rows)} measures worse by more than {100 * options.tolerance:g} %")
    return 1 if worse else 0
