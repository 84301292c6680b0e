"""Plots a study.

A picture shows accuracy against batch by method, accuracy by epoch like the papers' figures, or a
row for each arm.
"""

from __future__ import annotations

import collections
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.errors import UserError
from studies.base import Study
from studies.results import ArmResults
from studies.statistics import Estimate

_PANELS = (("train_top1", "training top-1 accuracy"), ("val_top1", "validation top-1 accuracy"))
_COLORS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#000000",
)  # for the color-blind too
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)))

# Each curve needs its own color.
_MOST_CURVES = len(_COLORS)
# Smallest margin of the accuracy axis, as a fraction.
_EDGE = 0.002
# The axis begins this far below the best accuracy. Worse arms are drawn at the edge, with their
# number.
_SHOWN = 0.12


def draw(path: pathlib.Path, study: Study, arms: Sequence[ArmResults]) -> None:
    """Writes a PNG of means over the seeds with intervals.

    Final accuracy by batch where all arms have one, else by arm where there are many or validation
    is at the end only, else accuracy by epoch.

    Raises:
      UserError: If it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_epoch = len(arms) <= _MOST_CURVES and any(len(found.curve("val_top1")) > 1 for found in arms)
    make = (
        _by_batch if all(found.arm.batch for found in arms) else _by_epoch if by_epoch else _by_arm
    )
    figure = make(pyplot, study, arms)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(
            f"--results: {path}: {error.strerror}; give a directory that can be written"
        ) from None
    finally:
        pyplot.close(figure)


def _by_batch(pyplot: Any, study: Study, arms: Sequence[ArmResults]) -> Any:
    """Plots final accuracy against images per update.

    Each method is a line with its name at the end.
    """
    figure, axes = pyplot.subplots(figsize=(8.4, 4.8), layout="constrained")
    methods = list(dict.fromkeys(found.arm.method for found in arms))
    low, high = _range(arms)
    ends = []
    for number, method in enumerate(methods):
        color = _COLORS[number % len(_COLORS)]
        # Shifted a little, so that intervals at one batch do not cover each other.
        shift = 1.04 ** (number - (len(methods) - 1) / 2)
        own = sorted(
            (found for found in arms if found.arm.method == method),
            key=lambda found: found.arm.batch,
        )
        known = [
            (found.arm.batch * shift, end)
            for found in own
            if (end := found.estimate("top1")) is not None
        ]
        _intervals(axes, known, color, low, linestyle=_LINES[number % len(_LINES)])
        if known:
            ends.append((100 * max(known[-1][1].mean, low), known[-1][0], method, color))
    batches = sorted({found.arm.batch for found in arms})
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.minorticks_off()
    axes.set(
        xlabel="images per update", ylabel="final top-1 accuracy (%)", ylim=(100 * low, 100 * high)
    )
    axes.set_title(f"{study.title} ({_counted(arms)})", loc="left")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    right = batches[-1] * 1.22
    for place, (y, x, method, color) in zip(
        _spread([end[0] for end in ends], 4.5 * (high - low)), ends, strict=True
    ):
        axes.annotate(
            method,
            (x, y),
            (right, place),
            color=color,
            va="center",
            annotation_clip=False,
            weight="bold",
            size=9,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.6,
                "shrinkA": 1,
                "shrinkB": 4,
            },
        )
    axes.set_xlim(batches[0] / 1.3, right * 1.02)
    return figure


def _by_arm(pyplot: Any, study: Study, arms: Sequence[ArmResults]) -> Any:
    """Final accuracy of each arm in a row: every run a small dot, their mean with its interval."""
    figure, axes = pyplot.subplots(figsize=(8.4, 1.3 + 0.33 * len(arms)), layout="constrained")
    low, high = _range(arms)
    near = [
        top1 for found in arms for top1 in found.values("top1").values() if top1 >= high - _SHOWN
    ]
    low, high = (
        min([low, *(top1 - _EDGE for top1 in near)]),
        max([high, *(top1 + _EDGE for top1 in near)]),
    )
    for row, found in enumerate(arms):
        runs = [top1 for top1 in found.values("top1").values() if top1 >= low]
        axes.plot(
            [100 * top1 for top1 in runs],
            [row] * len(runs),
            ".",
            color=_COLORS[0],
            alpha=0.35,
            markersize=5,
        )
        end = found.estimate("top1")
        if end is None:
            axes.text(100 * low, row, "  no run has finished", va="center", size=8, color="#555555")
        else:
            _intervals(axes, [(row, end)], _COLORS[0], low, across=True)
    note = ""
    if (reference := _reference(study, arms)) is not None and (
        end := reference.estimate("top1")
    ) is not None:
        axes.axvline(100 * end.mean, color="#555555", linewidth=0.8, linestyle=":", zorder=0)
        note = f"; dotted: {reference.arm.label}"
    axes.set_yticks(range(len(arms)), [found.arm.label for found in arms])
    axes.set(
        xlabel=f"final top-1 accuracy (%){note}",
        xlim=(100 * low, 100 * high),
        ylim=(len(arms) - 0.5, -0.5),
    )
    figure.suptitle(f"{study.title} ({_counted(arms)})", size=12)
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return figure


def _intervals(
    axes: Any,
    known: Sequence[tuple[float, Estimate]],
    color: str,
    low: float,
    *,
    across: bool = False,
    **style: Any,
) -> None:
    """Draws means with their intervals; those below the axis stand at its end, with their number.

    Args:
      axes: To draw on.
      known: Position and estimate of each.
      color: Color of all lines.
      low: Lower end of the accuracies shown.
      across: Accuracy goes to the right, not up.
      style: More arguments of `errorbar`.
    """
    shown = [(at, end) for at, end in known if end.mean >= low]
    at, means = [at for at, _ in shown], [100 * end.mean for _, end in shown]
    widths = [100 * (end.half_width or 0.0) for _, end in shown]
    style = {"linestyle": "", "marker": "o", "markersize": 5, "capsize": 3, "color": color, **style}
    if across:
        axes.errorbar(means, at, xerr=widths, **style)
    else:
        axes.errorbar(at, means, yerr=widths, **style)
    for place, end in known:
        if end.mean < low:
            x, y = (100 * low, place) if across else (place, 100 * low)
            axes.plot([x], [y], marker="<" if across else "v", color=color, clip_on=False)
            axes.annotate(
                f"{100 * end.mean:.1f} %",
                (x, y),
                (8, 0) if across else (0, 8),
                textcoords="offset points",
                size=8,
                color=color,
                va="center" if across else "bottom",
                ha="left" if across else "center",
            )


def _range(arms: Sequence[ArmResults]) -> tuple[float, float]:
    """Returns the smallest and the largest accuracy that an axis shows.

    They surround the means, but the smallest is at most `_SHOWN` below the best.
    """
    ends = [end for found in arms if (end := found.estimate("top1")) is not None]
    if not ends:
        return 0.0, 1.0
    best = max(end.mean for end in ends)
    near = [end for end in ends if end.mean >= best - _SHOWN]
    low = min(max(end.low if math.isfinite(end.low) else end.mean, best - _SHOWN) for end in near)
    high = max(
        min(end.high if math.isfinite(end.high) else end.mean, best + _SHOWN / 4) for end in near
    )
    edge = max(0.08 * (high - low), _EDGE)
    return max(low - edge, 0.0), min(high + edge, 1.0)


def _spread(values: Sequence[float], gap: float) -> list[float]:
    """Places for labels near their values, at least `gap` apart, in the order of the values."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    places = [values[i] for i in order]
    for _ in range(100):  # push neighbors apart, a little at a time
        for k in range(len(places) - 1):
            if (lack := gap - (places[k + 1] - places[k])) > 0:
                places[k], places[k + 1] = places[k] - lack / 2, places[k + 1] + lack / 2
    return [place for _, place in sorted(zip(order, places, strict=True))]


def _reference(study: Study, arms: Sequence[ArmResults]) -> ArmResults | None:
    """The arm with which most statements compare."""
    named = (name for claim in study.claims for name in (claim.second, claim.first))
    common = collections.Counter(named).most_common(1)
    return next((found for found in arms if common and found.arm.name == common[0][0]), None)


def _counted(arms: Sequence[ArmResults]) -> str:
    """How many runs a mean is of."""
    counts = sorted({len(found.finished) for found in arms} - {0}) or [0]
    if counts[-1] < 2:
        return f"{counts[0]} seed{'' if counts[0] else 's'}"
    span = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"mean and 95 % interval of {span} seeds"


def _by_epoch(pyplot: Any, study: Study, arms: Sequence[ArmResults]) -> Any:
    """Training and validation accuracy by epoch, a band for the interval of each mean."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axes, (key, title) in zip(panels, _PANELS, strict=True):
        for number, found in enumerate(arms):
            curve = found.curve(key)
            if not curve:
                continue
            color = _COLORS[number % len(_COLORS)]
            epochs, means = [epoch for epoch, _ in curve], [100 * e.mean for _, e in curve]
            axes.plot(
                epochs,
                means,
                linestyle=_LINES[number % len(_LINES)],
                color=color,
                label=found.arm.label,
            )
            low = [100 * max(e.low if e.half_width is not None else e.mean, 0.0) for _, e in curve]
            high = [
                100 * min(e.high if e.half_width is not None else e.mean, 1.0) for _, e in curve
            ]
            axes.fill_between(epochs, low, high, color=color, alpha=0.13, linewidth=0)
        axes.set(xlabel="epoch", title=title)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel="top-1 accuracy (%)", ylim=(0, 101))
    panels[1].axhline(100 * arms[0].target, color="gray", linewidth=0.8)
    figure.suptitle(f"{study.title} ({_counted(arms)})", fontsize=12)
    panels[1].legend(loc="lower right", fontsize="small", framealpha=0.95)
    return figure
