"""Computes an interval of a difference in accuracy by resampling runs and images.

Student's interval over the runs is about other seeds on the same images. Resampling the images as
well shows how much the result would differ on other images of the same kind.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from studies.statistics import CONFIDENCE

DRAWS = 2000
_ROWS = 100  # draws at a time: 100 x 50,000 counts are 40 MB


def interval(
    first: npt.ArrayLike, second: npt.ArrayLike, *, draws: int = DRAWS, seed: int = 0
) -> tuple[float, float]:
    """The interval of mean accuracy of the first method minus that of the second.

    Runs and images are drawn with replacement, independently of each other, the same for both
    methods; the interval holds the middle 95 % of the differences (percentile bootstrap; Efron and
    Tibshirani 1993, 13.3).

    Args:
      first: Bool [runs, images], whether a run of the first method got an image right.
      second: The same for the second method. Rows of equal number are runs of equal seed, and
        columns are the same images.
      draws: How often both are drawn.
      seed: Seed of the draws.
    """
    gain = np.asarray(first, np.float32) - np.asarray(second, np.float32)
    generator = np.random.default_rng(seed)
    runs, images = gain.shape
    found = []
    for start in range(0, draws, _ROWS):
        count = min(_ROWS, draws - start)
        run_counts = generator.multinomial(runs, np.full(runs, 1 / runs), count)
        image_counts = generator.multinomial(images, np.full(images, 1 / images), count)
        found.append(
            np.einsum("dr,ri,di->d", run_counts / runs, gain, image_counts / images, optimize=True)
        )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.concatenate(found), [tail, 1 - tail])
    return float(low), float(high)
