"""Says what a study costs before it starts."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid_imagenet import config as configuration
from hybrid_imagenet.data import datasets
from studies import trial_runs
from studies.trial_runs import Cell


def images(cell: Cell) -> int | None:
    """Training images that a run reads in all its epochs; None for a dataset of unknown size."""
    config = configuration.resolve(cell.flags, cell.ranks)
    examples = datasets.source_type(config.data.dataset).train_images
    if examples is None:
        return None
    return round((examples - config.data.num_held_out(examples)) * config.run.epochs)


def line(cells: Sequence[Cell], rate: float, later: int = 0) -> str:
    """Runs, images and machine-hours of the cells that have not finished yet.

    Args:
      cells: All that the study plans.
      rate: Training images per second of the machine.
      later: More runs, whose flags follow from the others; each costs as much as the mean of
        `cells`.
    """
    done = sum(
        trial_runs.read(cell).status in (trial_runs.FINISHED, trial_runs.DIVERGED) for cell in cells
    )
    counts = [images(cell) for cell in cells]
    runs = f"{len(cells) + later} runs, {done} of them there"
    known = [count for count in counts if count is not None]
    if not known or len(known) < len(counts):
        return f"{runs}; the size of the dataset is not known before it is read"
    total = sum(known) / len(known) * (len(cells) + later - done)
    return (
        f"{runs}; {total / 1e6:.1f} million images are left: {total / rate / 3600:.1f} hours at"
        f" {rate:g} images/s"
    )
