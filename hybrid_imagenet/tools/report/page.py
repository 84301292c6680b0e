"""Puts a report together: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import pathlib
import re
import string
from collections.abc import Iterable, Sequence

from hybrid_imagenet.analysis import forecast
from hybrid_imagenet.numerics import mlperf
from hybrid_imagenet.tools.report import figures, svg, tables
from hybrid_imagenet.tools.report.load import Run

_SHADES = range(svg.COLORS)
# What no HTML file may hold, and what a terminal that prints one would obey; names of runs and flags may have them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TEMPLATE = pathlib.Path(__file__).with_name("page.html")


def charts(runs: Sequence[Run]) -> dict[str, list[figures.Chart]]:
    """The charts with lines, by section."""
    return {
        "accuracy": _present(figures.curves(runs, what, by) for what in ("top1", "loss") for by in ("epoch", "hours")),
        "rates": _present(
            [*(figures.learning_rate(run, number) for number, run in enumerate(runs, 1)), figures.relative_steps(runs)]
        ),
        "speed": [*_present([figures.throughput(runs)]), *figures.scaling(runs)],
        "input": figures.input_output(runs),
    }


def build(runs: Sequence[Run], title: str) -> str:
    """The whole page."""
    drawn = charts(runs)
    sections = [
        tables.overview(runs),
        _section("Accuracy and loss", _note(runs), _grid(drawn["accuracy"])),
        _section("Learning rate and relative step", "", _grid(drawn["rates"]) or _missing("learning rates")),
        _section("LARS trust ratios", "", _trust(runs)),
        _section("Speed", _speed_note(runs), _grid(drawn["speed"]) or _missing("throughput")),
        _section("Where the time goes", "", _time(runs)),
        _section("Input", "", _grid(drawn["input"]) or _missing("bytes read and reads")),
        _section("Criteria", _comparison_note(runs), tables.criteria(runs) + _gate(runs)),
        _section("Configuration", "", tables.flag_differences(runs) + tables.all_flags(runs)),
        _section("Environment", "", tables.environment(runs)),
    ]
    rules = (
        f".c{n}{{stroke:var(--c{n})}}.key .c{n}{{border-color:var(--c{n})}}.f{n}{{fill:var(--c{n})}}" for n in _SHADES
    )
    colors = "".join(rules)
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.substitute(title=html.escape(title), colors=colors, body="\n".join(sections), count=svg.COLORS)
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _present(found: Iterable[figures.Chart | None]) -> list[figures.Chart]:
    return [chart for chart in found if chart is not None]


def _section(title: str, note: str, content: str) -> str:
    lead = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{title}</h2>{lead}{content}</section>"


def _missing(what: str) -> str:
    return f'<p class="note">No {what} in these records.</p>'


def _grid(found: Sequence[figures.Chart]) -> str:
    if not found:
        return ""
    drawings = (
        svg.line_chart(
            c.title, c.series, c.x_label, c.y_label, log_x=c.log_x, log_y=c.log_y, zero=c.zero, stops=c.stops
        )
        for c in found
    )
    return f'<div class="charts">{"".join(drawings)}</div>'


def _note(runs: Sequence[Run]) -> str:
    return "Solid: validation. Dashed: training." if len(runs) > 1 else ""


def _speed_note(runs: Sequence[Run]) -> str:
    if figures.scaling(runs):
        used = ", ".join(run.name for run in figures.comparable(runs))
        return f"By number of GPUs: {used}, which do the same work per GPU."
    return "Efficiency by number of GPUs needs runs of at least two sizes with the same work per GPU."


def _trust(runs: Sequence[Run]) -> str:
    maps = [(run, figures.trust_ratios(run)) for run in runs]
    drawn = [svg.heat_map(f"Trust ratios, {run.name}", *found) for run, found in maps if found is not None]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else _missing("trust ratios")


def _time(runs: Sequence[Run]) -> str:
    drawn = []
    for title, rows, unit in (
        ("Run", figures.run_time(runs), "s"),
        ("Average step after the first epoch", figures.step_time(runs), "ms"),
    ):
        if rows:
            used = {
                part: color
                for part, color in figures.CAUSES.items()
                if any(parts.get(part, 0) > 0 for _, parts in rows)
            }
            drawn.append(svg.stacked_bars(title, rows, unit, used))
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else _missing("times")


def _on_imagenet(run: Run) -> bool:
    return "imagenet" in str(run.flags.get("dataset", "")).lower() or run.summary.get("images_per_epoch") == 1_281_167


def _comparison_note(runs: Sequence[Run]) -> str:
    lead = "Published figures as printed (ResNet-50 on ImageNet; some contradict each other, see docs/criteria.md)."
    others = sorted({str(run.flags.get("dataset", "another data set")) for run in runs if not _on_imagenet(run)})
    if not others:
        return lead
    return f"{lead} Runs on {', '.join(others)} show the same criteria and are not comparable with them."


def _gate(runs: Sequence[Run]) -> str:
    """The runs beside MLPerf's reference convergence, where it applies."""
    lines = []
    for run in runs:
        batch = tables.global_batch(run)
        epochs, values = run.series("val_top1")
        if not _on_imagenet(run) or not epochs:
            continue
        horizon = float(run.flags.get("epochs") or epochs[-1])
        prediction = forecast.forecast(epochs, values, mlperf.TARGET, horizon)
        gate = forecast.gate(batch, prediction)
        if gate is not None:
            ahead = "" if gate.ahead_epochs is None else f" by {abs(gate.ahead_epochs):.1f} epochs"
            lines.append(
                f"{run.name}: MLPerf's reference needs {gate.reference_epochs:.1f} epochs to 75.9 % at batch {batch}; "
                f"this run is {gate.verdict}{ahead}."
            )
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)
