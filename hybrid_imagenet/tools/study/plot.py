"""Plots accuracy by epoch of a study's arms, like the papers' figures."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.study.base import Study
from hybrid_imagenet.tools.study.results import ArmResults

_PANELS = (("train_top1", "training top-1 accuracy"), ("val_top1", "validation top-1 accuracy"))
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # told apart without color vision
_LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)))


def available() -> bool:
    """Whether matplotlib is installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


def draw(path: pathlib.Path, study: Study, arms: Sequence[ArmResults]) -> None:
    """Writes a PNG: accuracy by batch where all arms have one, else by epoch; means over the seeds with intervals.

    Raises:
      UserError: if it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    make = _by_batch if all(found.arm.batch for found in arms) else _by_epoch
    figure = make(pyplot, study, arms)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UserError(f"--results: {path}: {error.strerror}; give a directory that can be written") from None
    finally:
        pyplot.close(figure)


def _by_batch(pyplot: Any, study: Study, arms: Sequence[ArmResults]) -> Any:
    """Final accuracy against images per update, a line for each method."""
    figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
    methods = list(dict.fromkeys(found.arm.method for found in arms))
    for number, method in enumerate(methods):
        ends = [(found.arm.batch, found.estimate("top1")) for found in arms if found.arm.method == method]
        known = sorted((batch, end) for batch, end in ends if end is not None)
        # Shifted a little, so that intervals at one batch do not cover each other.
        axes.errorbar(
            [batch * 1.03 ** (number - len(methods) / 2) for batch, _ in known],
            [100 * end.mean for _, end in known],
            yerr=[100 * (end.half_width or 0.0) for _, end in known],
            color=_COLORS[number % len(_COLORS)],
            linestyle=_LINES[number % len(_LINES)],
            marker="o",
            capsize=3,
            label=method,
        )
    axes.set_xscale("log", base=2)
    batches = sorted({found.arm.batch for found in arms})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set(xlabel="images per update", ylabel="final top-1 accuracy (%)", title=study.title)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", framealpha=0.95)
    return figure


def _by_epoch(pyplot: Any, study: Study, arms: Sequence[ArmResults]) -> Any:
    """Training and validation accuracy by epoch, a band for the interval of each mean."""
    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    for axes, (key, title) in zip(panels, _PANELS, strict=True):
        for number, found in enumerate(arms):
            curve = found.curve(key)
            color = _COLORS[number % len(_COLORS)]
            epochs, means = [epoch for epoch, _ in curve], [100 * e.mean for _, e in curve]
            axes.plot(
                epochs,
                means,
                linestyle=_LINES[number % len(_LINES)],
                marker="o" if len(epochs) == 1 else "",
                color=color,
                label=found.arm.label,
            )
            low = [100 * max(e.low if e.half_width is not None else e.mean, 0.0) for _, e in curve]
            high = [100 * min(e.high if e.half_width is not None else e.mean, 1.0) for _, e in curve]
            axes.fill_between(epochs, low, high, color=color, alpha=0.13, linewidth=0)
        axes.set(xlabel="epoch", title=title)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel="top-1 accuracy (%)", ylim=(0, 101))
    panels[1].axhline(100 * arms[0].target, color="gray", linewidth=0.8)
    count = max((len(found.finished) for found in arms), default=0)
    seeds = "1 seed" if count == 1 else f"mean and 95 % interval of {count} seeds"
    figure.suptitle(f"{study.title} ({seeds})", fontsize=12)
    panels[1].legend(loc="lower right", fontsize="small", framealpha=0.95)
    return figure
