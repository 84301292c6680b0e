"""Puts a report together: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import pathlib
import re
import string
from collections.abc import Iterable, Sequence

from hybrid_imagenet.runlog.summary import format_accuracy, format_duration
from hybrid_imagenet.tools.report import classes, figures, findings, svg, tables
from hybrid_imagenet.tools.report.load import Run

# What no HTML file may hold, and what a terminal that prints one would obey; names of runs and
# flags may have them.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TEMPLATE = pathlib.Path(__file__).with_name("page.html")


def build(runs: Sequence[Run], title: str) -> str:
    """The whole page."""
    format_accuracy = [
        figures.curves(runs, what, by)
        for by in ("epoch", "step", "hours")
        for what in ("top1", "loss")
    ]
    rates = _grid([figures.learning_rates(runs), figures.relative_steps(runs)])
    sections = [
        _answers(runs),
        _legend(runs),
        _section("Results", "", tables.overview(runs)),
        _section("Accuracy and loss", _note(runs), _grid(format_accuracy)),
        _section("Learning rate and relative step", "", rates or _missing("learning rates")),
        _section("Speed", "", _grid([figures.throughput(runs)]) or _missing("throughput")),
        _section("Where the time goes", "", _time(runs)),
        _section(
            "Input", "", _grid(figures.input_output(runs)) or _missing("bytes read and reads")
        ),
        *_classes(runs),
        _section("Criteria", _comparison_note(runs), tables.criteria(runs)),
        _section("Configuration", "", tables.flag_differences(runs) + tables.all_flags(runs)),
        _section("Environment", "", tables.environment(runs)),
    ]
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    text = template.substitute(
        title=html.escape(title), colors=svg.style(), body="\n".join(sections), count=svg.COLORS
    )
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


_SIGNS = {findings.GOOD: "✓", findings.BAD: "✗", findings.OPEN: "•"}


def _answers(runs: Sequence[Run]) -> str:
    """A card for each run: how it went, what held it back, what to change."""
    cards = []
    for run in runs:
        found = findings.answers(run)
        name = f"<h3>{html.escape(run.name)}</h3>" if len(runs) > 1 else ""
        compared = "".join(
            f"<p>{html.escape(text)}</p>" for text in (found.compared, found.handover) if text
        )
        if run.following:
            what, _, command = run.following.partition(": ")
            compared += f"<p>{what}: <code>{html.escape(command)}</code></p>"
        cards.append(
            f'<article class="answer {found.verdict}">{name}<p class="verdict"><b'
            ' aria-hidden="true">'
            f"{_SIGNS[found.verdict]}</b> {html.escape(found.outcome)}</p>{compared}"
            f"<h4>{found.heading}</h4>"
            f"{_list(html.escape(line) for line in found.held_back)}{_next(run)}</article>"
        )
    heading = "Did it go well?" if len(runs) == 1 else "Did they go well?"
    return _section(heading, _best(runs), f'<div class="answers">{"".join(cards)}</div>')


def _next(run: Run) -> str:
    found = findings.suggestions(run)
    if not found:
        return ""
    lines = (f"<code>{html.escape(s.change)}</code>: {html.escape(s.why)}" for s in found)
    return f"<h4>What to try next</h4>{_list(lines)}"


def _list(lines: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{line}</li>" for line in lines) + "</ul>"


def _legend(runs: Sequence[Run]) -> str:
    """The runs as the charts draw them, as buttons that hide and show their lines."""
    if len(runs) == 1:
        return ""
    buttons = (
        f'<button type="button" class="key" aria-pressed="true" data-hides="{number}">'
        f"{svg.key(run.name, number, shape=number)}</button>"
        for number, run in enumerate(runs)
    )
    return f'<nav class="runs" aria-label="runs">{"".join(buttons)}</nav>'


def _best(runs: Sequence[Run]) -> str:
    """Which of several runs on the same images was the best, and which the first at a target that
    they share.
    """
    ranked = sorted(
        (run for run in runs if run.summary.get("best_val_top1") is not None),
        key=lambda r: -r.summary["best_val_top1"],
    )
    if len(ranked) < 2:
        return ""
    apart = ("dataset", "data_dir", "val_fraction", "tuning_split")
    if len({(*map(run.flags.get, apart), run.summary.get("val_split")) for run in ranked}) > 1:
        return "These runs were validated on different images: their accuracies are not comparable."
    top = ranked[0].summary["best_val_top1"]
    text = (
        f"Best top-1: {' and '.join(r.name for r in ranked if r.summary['best_val_top1'] == top)}"
    )
    text += f" ({format_accuracy(top)})."
    hits = [
        (goal["seconds"], goal["target"], run.name)
        for run in runs
        for goal in run.summary.get("targets", [])
        if goal["metric"] == "val_top1"
        and goal.get("seconds")
        and (run.target_asked or run.imagenet)
    ]
    shared = [
        target for target in {t for _, t, _ in hits} if sum(t == target for _, t, _ in hits) > 1
    ]
    for target in sorted(shared):
        seconds, _, name = min(hit for hit in hits if hit[1] == target)
        text += f" First at {format_accuracy(target)}: {name}, after {format_duration(seconds)}."
    return text


def _section(title: str, note: str, content: str) -> str:
    lead = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{title}</h2>{lead}{content}</section>"


def _missing(what: str) -> str:
    return f'<p class="note">No {what} in these records.</p>'


def _grid(charts: Sequence[svg.Chart | None]) -> str:
    drawn = [svg.line_chart(chart) for chart in charts if chart is not None]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _note(runs: Sequence[Run]) -> str:
    words = (
        ["Solid: validation. Dashed: training. The buttons above hide a run's lines."]
        if len(runs) > 1
        else []
    )
    words.append(
        "The axis of accuracy starts at the level after a third of a run; earlier values lie"
        " below it."
    )
    if any(run.diverged for run in runs) and len(runs) > 1:
        words.append(
            "A run that diverged leaves the chart where its values lie far from the others'."
        )
    return " ".join(words)


def _time(runs: Sequence[Run]) -> str:
    whole = figures.run_time(runs)
    divisor, unit = figures.unit_of_time(
        max((sum(parts.values()) for _, parts in whole), default=0.0)
    )
    scaled = [
        (name, {part: seconds / divisor for part, seconds in parts.items()})
        for name, parts in whole
    ]
    if not scaled:
        return _missing("times")
    used = {
        c: color
        for c, color in figures.CAUSES.items()
        if any(parts.get(c, 0) > 0 for _, parts in scaled)
    }
    return f'<div class="charts">{svg.stacked_bars("Run", scaled, unit, used)}</div>'


def _classes(runs: Sequence[Run]) -> list[str]:
    """A section on the classes and images of each run that kept what its last validation found."""
    return [
        _section(f"Classes and images of {html.escape(run.name)}", "", classes.section(run.images))
        for run in runs
        if run.images is not None
    ]


def _comparison_note(runs: Sequence[Run]) -> str:
    if not any(run.imagenet for run in runs):
        return (
            "The measures of Lu et al. for the targets that were asked for; published figures stand"
            " beside ImageNet."
        )
    lead = (
        "Published figures as printed (ResNet-50 on ImageNet; some contradict each other, see"
        " docs/dev/criteria.md)."
    )
    others = sorted(
        {str(run.flags.get("dataset", "another dataset")) for run in runs if not run.imagenet}
    )
    if not others:
        return lead
    return (
        f"{lead} Runs on {', '.join(others)} show the same criteria and are not comparable with"
        " them."
    )
