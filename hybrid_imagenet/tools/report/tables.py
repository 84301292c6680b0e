"""Writes the tables of a report as HTML that turns into cards on a narrow screen."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet.analysis import published
from hybrid_imagenet.runlog.summary import format_duration, format_epochs
from hybrid_imagenet.tools.report import figures, findings
from hybrid_imagenet.tools.report.load import Run, differences

DASH = "–"  # noqa: RUF001 - an en dash marks an empty cell
_FEW, _MANY = 5, 1000  # classes: among few, top-5 tells nothing
_WHOLE = 24  # characters of a cell that is not broken


def table(head: Sequence[str], rows: Sequence[Sequence[str]], css: str = "") -> str:
    """A table of texts; the first column names the row."""
    names = (
        html.escape(name).replace("-", "&#8209;") for name in head
    )  # a hyphen at which no line breaks
    top = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = []
    for row in rows:
        cells = [f'<th scope="row">{html.escape(row[0])}</th>']
        cells += [_cell(name, value) for name, value in zip(head[1:], row[1:], strict=True)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    text = (
        f'<table class="{css}"><thead><tr>{top}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    )
    return f'<div class="scroll">{text}</div>'


def _cell(name: str, value: str) -> str:
    # An empty cell is omitted on a narrow screen; a number and its unit stay on one line.
    css = ' class="none"' if value == DASH else ' class="whole"' if len(value) <= _WHOLE else ""
    return f'<td data-label="{html.escape(name)}"{css}>{html.escape(value)}</td>'


_CRITERIA = (
    "run",
    "target",
    "{0}s",
    "images per step",
    "epochs",
    "convergence rate",
    "time",
    "images/s",
    "scaling efficiency",
    "average single-{0} time",
    "final top-1",
    "final top-5",
)


def criteria(runs: Sequence[Run]) -> str:
    """The criteria of Lu et al. for each target of each run; beside runs on ImageNet, what the
    papers printed.
    """
    rows = [
        _own(run, goal)
        for run in runs
        for goal in run.summary.get("targets", [])
        if _counts(run, goal)
    ]
    processor = figures.processors(runs).removesuffix("s")
    if any(run.imagenet for run in runs):
        rows += map(_published, published.RESULTS)
        processor = "GPU"
    return table([name.format(processor) for name in _CRITERIA], rows, "wide") if rows else ""


def _counts(run: Run, goal: dict[str, Any]) -> bool:
    """Whether a target means something: the papers' on ImageNet, else what was asked for."""
    return run.imagenet or (run.target_asked and goal["metric"] == "val_top1")


def _own(run: Run, goal: dict[str, Any]) -> list[str]:
    metric = goal["metric"].removeprefix("val_").replace("top", "top-")
    summary = run.summary
    batch = findings.global_batch(run)
    epochs = goal.get("epochs")
    return [
        run.name,
        f"{metric} {percent(goal['target'])}",
        str(summary["world_size"]),
        str(batch) if batch else DASH,
        "not reached" if epochs is None else format_epochs(epochs),
        DASH if epochs is None else f"{goal['convergence_rate']:.4f}",
        format_duration(goal.get("seconds")) if epochs else DASH,
        number(summary.get("steady_images_per_second")),
        percent(summary.get("scaling_efficiency")),
        format_duration(goal["actual_average_single_gpu_seconds"]) if epochs else DASH,
        percent(summary.get("val_top1")),
        percent(summary.get("val_top5")),
    ]


def _published(result: published.Result) -> list[str]:
    whole = result.epochs == 90
    reached = [
        f"{name} {percent(value)}"
        for name, value in (("top-1", result.top1), ("top-5", result.top5))
        if value
    ]
    return [
        f"{result.source}: {result.system}",
        "90 epochs" if whole else next(iter(reached), DASH),
        DASH if result.gpus is None else str(result.gpus),
        DASH if result.batch is None else str(result.batch),
        DASH if result.epochs is None else f"{result.epochs:g}",
        DASH if whole or result.epochs is None else f"{1 / result.epochs:.4f}",
        DASH if result.seconds is None else format_duration(result.seconds),
        number(result.images_per_second),
        percent(result.efficiency),
        DASH if result.gpu_seconds is None else format_duration(result.gpu_seconds),
        percent(result.top1 if whole else None),
        percent(result.top5 if whole else None),
    ]


def overview(runs: Sequence[Run]) -> str:
    """The table of the results of each run, without the columns in which no run has anything to
    tell.
    """
    head = (
        "run",
        "state",
        "validated on",
        "best top-1",
        "last top-1",
        "last top-5",
        "last loss",
        "epochs",
        "time",
        "images/s",
        "{}",
        "skipped steps",
        "images dropped",
    )
    rows = []
    for run in runs:
        s = run.summary
        best = percent(s.get("best_val_top1"))
        rows.append(
            [
                run.name,
                run.state,
                {"tuning": "tuning images", "validation": "validation images"}.get(
                    str(s.get("val_split")), DASH
                ),
                f"{best} (epoch {format_epochs(s['best_epoch'])})" if s.get("best_epoch") else best,
                percent(s.get("val_top1")),
                percent(s.get("val_top5")) if (s.get("num_classes") or _MANY) > _FEW else DASH,
                _loss(run),
                format_epochs(s.get("epochs", 0)),
                format_duration(s.get("wall_seconds")),
                number(s.get("images_per_second")),
                str(s.get("world_size", DASH)),
                str(s.get("skipped_steps", 0)),
                _dropped(s),
            ]
        )
    telling = [n for n in range(len(head)) if any(row[n] not in (DASH, "0") for row in rows)]
    return table(
        [head[n].format(figures.processors(runs)) for n in telling],
        [[row[n] for n in telling] for row in rows],
    )


def _loss(run: Run) -> str:
    if run.diverged is not None:
        loss = run.diverged.get("train_loss")
        return "not finite" if loss is None else f"{loss:.4g} in training"
    loss = run.summary.get("val_loss")
    return DASH if loss is None else f"{loss:.4f}" if loss < 1000 else f"{loss:.4g}"


def _dropped(summary: Mapping[str, Any]) -> str:
    """Training images dropped in all epochs, and validation images in the last; a dash for runs
    that do not tell.
    """
    train, validation = summary.get("images_dropped"), summary.get("val_dropped")
    if train is None and validation is None:
        return DASH
    return f"{train or 0} + {validation} in validation" if validation else str(train or 0)


def flag_differences(runs: Sequence[Run]) -> str:
    """Flags that are not the same in all runs; a sentence if there are none, or only one run."""
    if len(runs) < 2:
        return "<p>One run: nothing to compare.</p>"
    rows = [[name, *map(text, values)] for name, values in differences(runs)]
    if not rows:
        return "<p>All flags are the same.</p>"
    return table(("flag", *(run.name for run in runs)), rows)


def all_flags(runs: Sequence[Run]) -> str:
    """Every flag of every run, folded."""
    names = sorted({name for run in runs for name in run.flags})
    rows = [[name, *(text(run.flags.get(name)) for run in runs)] for name in names]
    return (
        f"<details><summary>All {len(names)}"
        f" flags</summary>{table(('flag', *(r.name for r in runs)), rows)}</details>"
    )


def environment(runs: Sequence[Run]) -> str:
    """Versions, hardware and commit of each run."""
    names = sorted({name for run in runs for name in run.environment})
    rows = [
        [name.replace("_", " "), *(text(run.environment.get(name)) for run in runs)]
        for name in names
    ]
    return table(("", *(run.name for run in runs)), rows)


def percent(fraction: float | None) -> str:
    """A fraction as 75.60 %."""
    return DASH if fraction is None else f"{100 * fraction:.2f} %"


def number(value: float | None) -> str:
    """A throughput with thousands set off."""
    return DASH if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def text(value: Any) -> str:
    """A flag's value as it would be written."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
