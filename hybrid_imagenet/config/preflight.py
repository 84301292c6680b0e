"""Finds out before TensorFlow is loaded what would end a run some seconds later."""

from __future__ import annotations

import importlib.util

from hybrid_imagenet.config import AUTO, Config, derived
from hybrid_imagenet.config.checks import check_data
from hybrid_imagenet.errors import UserError

TRAINING_IMAGES = {"imagenet2012": 1281167, "digits": 1500, "fashion_mnist": 60000}
"""Of data sets that are known without a look at their files."""


def check(config: Config, ranks: int) -> None:
    """Checks the batch against a data set of known size, and looks for packages that flags ask for.

    Raises:
      UserError: if a batch of `ranks` ranks is larger than the data set, or a package is not installed.
    """
    if config.dataset in TRAINING_IMAGES and config.per_gpu_batch != AUTO:
        images = TRAINING_IMAGES[config.dataset]
        check_data(config, images - derived.held_out(config, images), derived.workers(config, ranks))
    if config.decoder == "dali" and not _installed("nvidia.dali"):
        raise UserError("--decoder=dali: NVIDIA DALI is not installed: install nvidia-dali-cuda120 (the extra dali)")
    if config.tracker != "none" and not _installed(config.tracker):
        raise UserError(f"--tracker={config.tracker}: not installed; pip install {config.tracker}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # its parent is missing, or what stands in its place is no package
        return False
