"""Derives the table and the figure of studies/records/hal.md from the HAL benchmark's own records.

These are the records of eleven ImageNet runs.

    python -m studies.hal_records RECORDS.csv [--results=studies/records]

RECORDS.csv has a row for each run and epoch: gpus, per_gpu_batch, epoch (from 1), train_top1,
val_top1, val_top5 (all in percent) and images_per_second. The records are in TensorBoard files that
their authors published with their code at `SOURCE`; they are not part of this project.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import pathlib
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from studies.statistics import oscillation

SOURCE = "https://github.com/richardkxu/distributed-pytorch, commit b2a3e17"
SHA256 = "09f7b97ec3593aaecdf9fbce478bf008b2afe005e730681d1844800bdc7ce4a1"
"""Digest of the records from which the committed table was made."""
TARGET_TOP1 = 75.0
"""The accuracy, in percent, whose epoch the table gives; Lu et al. use the same."""
EARLY = (1, 30)
LATE = (31, 60)
"""First and last epoch of the ranges that the authors compare: "unstable at early stages (epoch
1-30)".
"""
COLUMNS = (
    *(
        "gpus",
        "per_gpu_batch",
        "global_batch",
        "epochs",
        "final_top1",
        "final_top5",
        "first_epoch_at_75",
    ),
    *("mean_top1_31_60", "zigzag_1_30", "zigzag_31_60", "images_per_second", "efficiency"),
)

Run = tuple[int, int]
"""Number of GPUs, and images per GPU."""


def read(path: pathlib.Path) -> dict[Run, list[dict[str, float]]]:
    """Returns the epochs of each run, in order.

    Raises:
      ValueError: If the file is not the one whose digest is `SHA256`.
    """
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if digest != SHA256:
        raise ValueError(
            f"{path} has the SHA-256 {digest} instead of {SHA256}. Get the records from {SOURCE}."
        )
    runs: dict[Run, list[dict[str, float]]] = {}
    for row in csv.DictReader(content.decode().splitlines()):
        values = {name: float(value) for name, value in row.items()}
        run = int(values["gpus"]), int(values["per_gpu_batch"])
        runs.setdefault(run, []).append(values)
    return runs


def summarize(runs: Mapping[Run, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Returns a row of `COLUMNS` for each run.

    Accuracies are in percent, the zigzag is in points, and efficiency is relative to 2 GPUs. The
    zigzag is `statistics.oscillation`: the root of the mean square of the second differences of
    validation top-1.
    """
    smallest = min(runs)
    per_gpu = (
        statistics.median(epoch["images_per_second"] for epoch in runs[smallest]) / smallest[0]
    )
    rows = []
    for (gpus, images), epochs in sorted(runs.items(), key=lambda item: (item[0][1], item[0][0])):
        speed = statistics.median(epoch["images_per_second"] for epoch in epochs)
        reached = [int(epoch["epoch"]) for epoch in epochs if epoch["val_top1"] >= TARGET_TOP1]
        rows.append(
            {
                "gpus": gpus,
                "per_gpu_batch": images,
                "global_batch": gpus * images,
                "epochs": len(epochs),
                "final_top1": f"{epochs[-1]['val_top1']:.2f}",
                "final_top5": f"{epochs[-1]['val_top5']:.2f}",
                "first_epoch_at_75": reached[0] if reached else "",
                "mean_top1_31_60": f"{statistics.fmean(_top1(epochs, LATE)):.1f}",
                "zigzag_1_30": f"{oscillation(_top1(epochs, EARLY)):.2f}",
                "zigzag_31_60": f"{oscillation(_top1(epochs, LATE)):.2f}",
                "images_per_second": f"{speed:.0f}",
                "efficiency": f"{speed / gpus / per_gpu:.3f}",
            }
        )
    return rows


def _top1(epochs: Sequence[Mapping[str, float]], between: tuple[int, int]) -> list[float]:
    return [epoch["val_top1"] for epoch in epochs if between[0] <= epoch["epoch"] <= between[1]]


def draw(path: pathlib.Path, runs: Mapping[Run, Sequence[Mapping[str, float]]]) -> None:
    """Writes a PNG with validation top-1 by epoch for each number of GPUs.

    There is one panel for 208 images per GPU and one for 256.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 4.6), sharey=True, layout="constrained")
    colors = pyplot.get_cmap("viridis")
    for axes, images in zip(panels, (208, 256), strict=True):
        sizes = sorted(gpus for gpus, per_gpu in runs if per_gpu == images)
        for number, gpus in enumerate(sizes):
            epochs = runs[gpus, images]
            axes.plot(
                [epoch["epoch"] for epoch in epochs],
                [epoch["val_top1"] for epoch in epochs],
                color=colors(0.9 * number / max(1, len(sizes) - 1)),
                linewidth=1.2,
                label=f"{gpus} GPUs, batch {gpus * images:,}: {epochs[-1]['val_top1']:.2f} %",
            )
        axes.set_title(f"{images} images per GPU")
        axes.set_xlabel("epoch")
        axes.set_ylim(0, 80)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=8, title="final top-1")
    panels[0].set_ylabel("validation top-1, %")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes hal.csv and hal.png; returns 2 if the records cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.hal_records", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "records", type=pathlib.Path, help="the records, one row for each run and epoch"
    )
    parser.add_argument(
        "--results",
        type=pathlib.Path,
        default=pathlib.Path("studies/records"),
        help="(%(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        runs = read(options.records)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with (options.results / "hal.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(summarize(runs))
    draw(options.results / "hal.png", runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
