"""Writes the tables of a report as HTML that turns into cards on a narrow screen."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet.analysis import published
from hybrid_imagenet.commands.report import figures, findings
from hybrid_imagenet.commands.report.load import LoadedRun, differing_flags
from hybrid_imagenet.runlog.summary import (
    format_duration,
    format_epochs,
    format_percent,
    is_top5_meaningful,
)

DASH = "–"  # noqa: RUF001 - an en dash marks an empty cell
# The text of a cell of this length is not broken into lines, so that a number stays next to its
# unit.
_MAX_UNBROKEN_CHARACTERS = 24
# Losses from here on are shown with four significant digits instead of four decimals.
_LARGE_LOSS = 1000

_CRITERIA_COLUMNS = (
    "run",
    "target",
    "{processor}s",
    "images per step",
    "epochs",
    "convergence rate",
    "time",
    "images/s",
    "scaling efficiency",
    "average single-{processor} time",
    "final top-1",
    "final top-5",
)
_OVERVIEW_COLUMNS = (
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
    "{processor}s",
    "skipped steps",
    "images dropped",
)


def overview(runs: Sequence[LoadedRun]) -> str:
    """Returns a table of the results of each run, without empty columns."""
    rows = [_overview_row(run) for run in runs]
    shown = [
        column
        for column in range(len(_OVERVIEW_COLUMNS))
        if any(row[column] not in (DASH, "0") for row in rows)
    ]
    processor = figures.processor_noun(runs).removesuffix("s")
    header = [_OVERVIEW_COLUMNS[column].format(processor=processor) for column in shown]
    return table(header, [[row[column] for column in shown] for row in rows])


def _overview_row(run: LoadedRun) -> list[str]:
    summary = run.summary
    return [
        run.name,
        run.state,
        _validated_on(summary),
        _best_top1(summary),
        percent_cell(summary.get("val_top1")),
        _last_top5(summary),
        _last_loss(run),
        format_epochs(summary.get("epochs", 0)),
        format_duration(summary.get("wall_seconds")),
        rate_cell(summary.get("images_per_second")),
        str(summary.get("world_size", DASH)),
        str(summary.get("skipped_steps", 0)),
        _dropped_images(summary),
    ]


def _validated_on(summary: Mapping[str, Any]) -> str:
    split = summary.get("val_split")
    return f"{split} images" if split in ("tuning", "validation") else DASH


def _best_top1(summary: Mapping[str, Any]) -> str:
    best = percent_cell(summary.get("best_val_top1"))
    if not summary.get("best_epoch"):
        return best
    return f"{best} (epoch {format_epochs(summary['best_epoch'])})"


def _last_top5(summary: Mapping[str, Any]) -> str:
    if not is_top5_meaningful(summary.get("num_classes")):
        return DASH
    return percent_cell(summary.get("val_top5"))


def _last_loss(run: LoadedRun) -> str:
    """Returns the last validation loss, or the training loss of a run that diverged."""
    if run.divergence_record is not None:
        training_loss = run.divergence_record.get("train_loss")
        return "not finite" if training_loss is None else f"{training_loss:.4g} in training"
    loss = run.summary.get("val_loss")
    if loss is None:
        return DASH
    return f"{loss:.4f}" if loss < _LARGE_LOSS else f"{loss:.4g}"


def _dropped_images(summary: Mapping[str, Any]) -> str:
    """Returns dropped images: in training, and in the last validation.

    A dash if the run has not recorded them.
    """
    training = summary.get("images_dropped")
    validation = summary.get("val_dropped")
    if training is None and validation is None:
        return DASH
    text = str(training or 0)
    if validation:
        text += f" + {validation} in validation"
    return text


def criteria(runs: Sequence[LoadedRun]) -> str:
    """Returns a table of the criteria of Lu et al. for each target of each run.

    If a run was trained on ImageNet, the published results follow. Empty if there is no row.
    """
    rows = []
    for run in runs:
        for target in run.summary.get("targets", []):
            if _is_meaningful(run, target):
                rows.append(_criteria_row(run, target))
    processor = figures.processor_noun(runs).removesuffix("s")
    if any(run.is_imagenet for run in runs):
        rows += [_published_row(result) for result in published.RESULTS]
        processor = "GPU"
    if not rows:
        return ""
    header = [column.format(processor=processor) for column in _CRITERIA_COLUMNS]
    return table(header, rows, "wide")


def _is_meaningful(run: LoadedRun, target: Mapping[str, Any]) -> bool:
    """Returns whether to show a target: on ImageNet all, else requested ones."""
    if run.is_imagenet:
        return True
    return run.target_requested and target["metric"] == "val_top1"


def _criteria_row(run: LoadedRun, target: Mapping[str, Any]) -> list[str]:
    """Returns a row for a target, an entry of `targets` in the run's summary."""
    summary = run.summary
    metric = target["metric"].removeprefix("val_").replace("top", "top-")
    batch = findings.global_batch(run)
    epochs = target.get("epochs")
    if epochs is None:
        epochs_text = "not reached"
        convergence_rate = DASH
    else:
        epochs_text = format_epochs(epochs)
        convergence_rate = f"{target['convergence_rate']:.4f}"
    time = DASH
    single_gpu_time = DASH
    # Epoch 0 comes from a damaged record, and has no times.
    if epochs:
        time = format_duration(target.get("seconds"))
        single_gpu_time = format_duration(target["actual_average_single_gpu_seconds"])
    return [
        run.name,
        f"{metric} {percent_cell(target['target'])}",
        str(summary["world_size"]),
        str(batch) if batch else DASH,
        epochs_text,
        convergence_rate,
        time,
        rate_cell(summary.get("steady_images_per_second")),
        percent_cell(summary.get("scaling_efficiency")),
        single_gpu_time,
        percent_cell(summary.get("val_top1")),
        percent_cell(summary.get("val_top5")),
    ]


def _published_row(result: published.Result) -> list[str]:
    """Returns a row for a published training of 90 epochs, or to an accuracy."""
    if result.epochs == 90:
        target = "90 epochs"
        convergence_rate = DASH
        final_top1 = result.top1
        final_top5 = result.top5
    else:
        target = _published_target(result)
        convergence_rate = DASH if result.epochs is None else f"{1 / result.epochs:.4f}"
        # Other trainings ended at the target, so their accuracy is shown there.
        final_top1 = None
        final_top5 = None
    return [
        f"{result.source}: {result.system}",
        target,
        DASH if result.gpus is None else str(result.gpus),
        DASH if result.batch is None else str(result.batch),
        DASH if result.epochs is None else f"{result.epochs:g}",
        convergence_rate,
        DASH if result.seconds is None else format_duration(result.seconds),
        rate_cell(result.images_per_second),
        percent_cell(result.efficiency),
        DASH if result.gpu_seconds is None else format_duration(result.gpu_seconds),
        percent_cell(final_top1),
        percent_cell(final_top5),
    ]


def _published_target(result: published.Result) -> str:
    if result.top1:
        return f"top-1 {percent_cell(result.top1)}"
    if result.top5:
        return f"top-5 {percent_cell(result.top5)}"
    return DASH


def flag_differences(runs: Sequence[LoadedRun]) -> str:
    """Returns a table of the flags that differ between runs.

    A sentence if there are none.
    """
    if len(runs) < 2:
        return "<p>One run: nothing to compare.</p>"
    rows = [[name, *map(value_cell, values)] for name, values in differing_flags(runs)]
    if not rows:
        return "<p>All flags are the same.</p>"
    return table(["flag", *(run.name for run in runs)], rows)


def all_flags(runs: Sequence[LoadedRun]) -> str:
    """Returns a folded table of every flag of every run."""
    names = sorted({name for run in runs for name in run.flags})
    rows = [[name, *(value_cell(run.flags.get(name)) for run in runs)] for name in names]
    flags = table(["flag", *(run.name for run in runs)], rows)
    return f"<details><summary>All {len(names)} flags</summary>{flags}</details>"


def environment(runs: Sequence[LoadedRun]) -> str:
    """Returns a table of the versions, hardware and commit of each run."""
    names = sorted({name for run in runs for name in run.environment})
    rows = []
    for name in names:
        values = [value_cell(run.environment.get(name)) for run in runs]
        rows.append([name.replace("_", " "), *values])
    return table(["", *(run.name for run in runs)], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], css_class: str = "") -> str:
    """Returns a table of texts.

    Args:
      header: Name of each column.
      rows: Cells of each row; the first one names the row.
      css_class: Class of the table.
    """
    # With a non-breaking hyphen, names such as "top-1" stay on one line.
    names = [html.escape(name).replace("-", "&#8209;") for name in header]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = []
    for row in rows:
        cells = [f'<th scope="row">{html.escape(row[0])}</th>']
        cells += [_cell(name, value) for name, value in zip(header[1:], row[1:], strict=True)]
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table class="{css_class}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(column: str, value: str) -> str:
    """Returns a cell.

    On a narrow screen, its label replaces the header and empty cells are hidden.
    """
    if value == DASH:
        css_class = ' class="none"'
    elif len(value) <= _MAX_UNBROKEN_CHARACTERS:
        css_class = ' class="whole"'
    else:
        css_class = ""
    return f'<td data-label="{html.escape(column)}"{css_class}>{html.escape(value)}</td>'


def percent_cell(fraction: float | None) -> str:
    """Formats a fraction for a table, as 75.60 %; None is an empty cell."""
    return DASH if fraction is None else format_percent(fraction)


def rate_cell(images_per_second: float | None) -> str:
    """Formats a throughput for a table, as 987.5 or 1,234; None is an empty cell."""
    if images_per_second is None:
        return DASH
    if images_per_second >= 1000:
        return f"{images_per_second:,.0f}"
    return f"{images_per_second:.1f}"


def value_cell(value: Any) -> str:
    """Formats a flag for a table as a user would write it; None is an empty cell."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_cell, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)
