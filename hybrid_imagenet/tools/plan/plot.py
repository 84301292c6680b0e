"""Plots efficiency and throughput by number of GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.plan.predict import Prediction


def draw(path: str, rows: Sequence[Prediction], planned: Prediction) -> None:
    """Writes a PNG with two plots; the planned size is marked.

    Raises:
      UserError: without matplotlib, or if the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError(f"--plot={path}: needs matplotlib; pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    gpus = [row.gpus for row in rows]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    left.semilogx(gpus, [100 * row.efficiency for row in rows], marker="o")
    left.plot([planned.gpus], [100 * planned.efficiency], "s", markersize=10, fillstyle="none", color="black")
    left.set(xlabel="GPUs", ylabel="scaling efficiency (%)", ylim=(0, 105))
    right.loglog(gpus, [row.images_per_second for row in rows], marker="o", label="predicted")
    one = rows[0].images_per_second / rows[0].efficiency / rows[0].gpus
    right.loglog(gpus, [one * count for count in gpus], "--", color="gray", label="linear")
    right.set(xlabel="GPUs", ylabel="images per second")
    right.legend()
    right.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    for axes in (left, right):
        axes.xaxis.set_major_locator(ticker.FixedLocator(gpus))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.xaxis.set_major_formatter(ticker.FormatStrFormatter("%d"))
        axes.tick_params(axis="x", labelrotation=45)
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot={path}: {getattr(error, 'strerror', None) or error}") from None
    finally:
        pyplot.close(figure)
