"""Builds a report: one HTML file that needs nothing else."""

from __future__ import annotations

import html
import pathlib
import re
import string
from collections.abc import Iterable, Sequence

from hybrid_imagenet.commands.report import classes, figures, findings, svg, tables
from hybrid_imagenet.commands.report.load import LoadedRun
from hybrid_imagenet.runlog.summary import format_accuracy, format_duration

# Control characters must not be in an HTML file, and a terminal that prints the file would obey
# them. Names of runs and flags may contain them.
_CONTROL_CHARACTERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_TEMPLATE = pathlib.Path(__file__).with_name("page.html")
_VERDICT_SIGNS = {findings.GOOD: "✓", findings.BAD: "✗", findings.OPEN: "•"}
# Runs whose values of these flags differ were validated on different images.
_VALIDATION_FLAGS = ("dataset", "data_dir", "val_fraction", "tuning_split")


def build(runs: Sequence[LoadedRun], title: str) -> str:
    """Returns the page as HTML."""
    sections = [
        _assessments(runs),
        _legend(runs),
        _section("Results", tables.overview(runs)),
        _section("Accuracy and loss", _accuracy_and_loss(runs), _accuracy_note(runs)),
        _section("Learning rate", _learning_rates(runs)),
        _section("Speed", _grid([figures.throughput_chart(runs)]) or _missing("throughput")),
        _section("Where the time went", _time_by_cause(runs)),
        _section("Input", _grid(figures.input_charts(runs)) or _missing("bytes read and reads")),
        *_classes(runs),
        _section("Criteria", tables.criteria(runs), _criteria_note(runs)),
        _section("Configuration", tables.flag_differences(runs) + tables.all_flags(runs)),
        _section("Environment", tables.environment(runs)),
    ]
    template = string.Template(_TEMPLATE.read_text(encoding="utf-8"))
    page = template.substitute(
        title=html.escape(title), colors=svg.style(), body="\n".join(sections), count=svg.COLORS
    )
    return _CONTROL_CHARACTERS.sub(_escape_character, page)


def _escape_character(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


def _section(title: str, content: str, note: str = "") -> str:
    note_html = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f"<section><h2>{title}</h2>{note_html}{content}</section>"


def _missing(values: str) -> str:
    return f'<p class="note">No {values} in these records.</p>'


def _grid(charts: Sequence[svg.Chart | None]) -> str:
    """Returns the charts side by side; empty if there are none."""
    drawings = [svg.line_chart(chart) for chart in charts if chart is not None]
    if not drawings:
        return ""
    return f'<div class="charts">{"".join(drawings)}</div>'


def _assessments(runs: Sequence[LoadedRun]) -> str:
    """Returns a card for each run: how it went, what took time, what to try next."""
    heading = "Did it go well?" if len(runs) == 1 else "Did they go well?"
    cards = "".join(_card(run, show_name=len(runs) > 1) for run in runs)
    return _section(heading, f'<div class="answers">{cards}</div>', _best_run(runs))


def _card(run: LoadedRun, *, show_name: bool) -> str:
    assessment = findings.assess(run)
    name = f"<h3>{html.escape(run.name)}</h3>" if show_name else ""
    sign = f'<b aria-hidden="true">{_VERDICT_SIGNS[assessment.verdict]}</b>'
    paragraphs = [f'<p class="verdict">{sign} {html.escape(assessment.outcome)}</p>']
    for text in (assessment.reference_comparison, assessment.handover_note):
        if text:
            paragraphs.append(f"<p>{html.escape(text)}</p>")
    if run.next_step:
        purpose, _, command = run.next_step.partition(": ")
        paragraphs.append(f"<p>{purpose}: <code>{html.escape(command)}</code></p>")
    causes = _list(html.escape(line) for line in assessment.causes)
    return (
        f'<article class="answer {assessment.verdict}">{name}{"".join(paragraphs)}'
        f"<h4>{assessment.causes_heading}</h4>{causes}{_suggestions(run)}</article>"
    )


def _suggestions(run: LoadedRun) -> str:
    suggestions = findings.suggestions(run)
    if not suggestions:
        return ""
    items = _list(
        f"<code>{html.escape(suggestion.change)}</code>: {html.escape(suggestion.reason)}"
        for suggestion in suggestions
    )
    return f"<h4>What to try next</h4>{items}"


def _list(items: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def _best_run(runs: Sequence[LoadedRun]) -> str:
    """Returns which of several runs is best, and which reached targets first.

    Empty for a single validated run.
    """
    validated = [run for run in runs if run.summary.get("best_val_top1") is not None]
    if len(validated) < 2:
        return ""
    if len({_validation_images(run) for run in validated}) > 1:
        return "These runs were validated on different images: their accuracies are not comparable."
    best = max(run.summary["best_val_top1"] for run in validated)
    names = " and ".join(run.name for run in validated if run.summary["best_val_top1"] == best)
    sentences = [f"Best top-1: {names} ({format_accuracy(best)})."]
    for target, times in sorted(_times_to_targets(runs).items()):
        if len(times) > 1:
            seconds, name = min(times)
            sentences.append(
                f"First at {format_accuracy(target)}: {name}, after {format_duration(seconds)}."
            )
    return " ".join(sentences)


def _validation_images(run: LoadedRun) -> tuple[object, ...]:
    """Returns values that differ if two runs were validated on different images."""
    return (*map(run.flags.get, _VALIDATION_FLAGS), run.summary.get("val_split"))


def _times_to_targets(runs: Sequence[LoadedRun]) -> dict[float, list[tuple[float, str]]]:
    """Returns for each target the seconds and the name of each run that reached it."""
    times: dict[float, list[tuple[float, str]]] = {}
    for run in runs:
        if not run.has_meaningful_targets:
            continue
        for entry in run.summary.get("targets", []):
            if entry["metric"] == "val_top1" and entry.get("seconds"):
                times.setdefault(entry["target"], []).append((entry["seconds"], run.name))
    return times


def _legend(runs: Sequence[LoadedRun]) -> str:
    """Returns a button for each of several runs that hides its lines."""
    if len(runs) == 1:
        return ""
    buttons = []
    for number, run in enumerate(runs):
        key = svg.legend_key(run.name, number, shape=number)
        buttons.append(
            '<button type="button" class="key" aria-pressed="true"'
            f' data-hides="{number}">{key}</button>'
        )
    return f'<nav class="runs" aria-label="runs">{"".join(buttons)}</nav>'


def _accuracy_and_loss(runs: Sequence[LoadedRun]) -> str:
    charts = []
    for by in ("epoch", "step", "hours"):
        charts.append(figures.metric_chart(runs, "top1", by))
        charts.append(figures.metric_chart(runs, "loss", by))
    return _grid(charts)


def _accuracy_note(runs: Sequence[LoadedRun]) -> str:
    sentences = []
    if len(runs) > 1:
        sentences.append(
            "Solid: validation. Dashed: training. The buttons above hide a run's lines."
        )
    sentences.append(
        "The axis of accuracy starts at the level after a third of a run; earlier values are below"
        " it."
    )
    if len(runs) > 1 and any(run.divergence_record is not None for run in runs):
        sentences.append(
            "A run that diverged leaves the chart if its values are far from the others'."
        )
    return " ".join(sentences)


def _learning_rates(runs: Sequence[LoadedRun]) -> str:
    return _grid([figures.learning_rate_chart(runs)]) or _missing("learning rates")


def _time_by_cause(runs: Sequence[LoadedRun]) -> str:
    rows = figures.seconds_by_cause(runs)
    if not rows:
        return _missing("times")
    longest = max(sum(seconds.values()) for _, seconds in rows)
    divisor, unit = figures.time_unit(longest)
    scaled_rows = []
    shown_causes = set()
    for name, seconds in rows:
        scaled_rows.append((name, {cause: value / divisor for cause, value in seconds.items()}))
        shown_causes |= {cause for cause, value in seconds.items() if value > 0}
    colors = {
        cause: color for cause, color in figures.CAUSE_COLORS.items() if cause in shown_causes
    }
    return f'<div class="charts">{svg.stacked_bars("Run", scaled_rows, unit, colors)}</div>'


def _classes(runs: Sequence[LoadedRun]) -> list[str]:
    """Returns a section on classes and images for each run that has image_results.npz."""
    return [
        _section(
            f"Classes and images of {html.escape(run.name)}", classes.section(run.image_results)
        )
        for run in runs
        if run.image_results is not None
    ]


def _criteria_note(runs: Sequence[LoadedRun]) -> str:
    """Returns how to compare runs with the published results in the table of criteria."""
    if not any(run.is_imagenet for run in runs):
        return (
            "The measures of Lu et al. for the requested targets. Runs on ImageNet are shown with"
            " published results."
        )
    note = (
        "Published figures as printed (ResNet-50 on ImageNet; some contradict each other, see"
        " docs/papers.md)."
    )
    other_datasets = sorted(
        {str(run.flags.get("dataset", "another dataset")) for run in runs if not run.is_imagenet}
    )
    if other_datasets:
        note += (
            f" Runs on {', '.join(other_datasets)} show the same criteria and are not comparable"
            " with them."
        )
    return note
