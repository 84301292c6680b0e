"""Looks at the host that --check_only runs on: its free disk and GPUs, without TensorFlow.

What it finds are warnings: the ranks may run on other hosts. The scripts for clusters make the check on a host that may
not train, and set HYBRID_IMAGENET_RANKS_ELSEWHERE, so that it says nothing of the host.
"""

from __future__ import annotations

import os
import pathlib
import shutil

from hybrid_imagenet.config import RunConfig

ELSEWHERE_VARIABLE = "HYBRID_IMAGENET_RANKS_ELSEWHERE"
_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
_GIGABYTE = 1e9
# Gigabytes of a checkpoint of the largest network but ResNet-101 and -152: 61 million weights and two values of an
# optimizer for each, in FP32.
_CHECKPOINT_GB = 0.75


def warnings(config: RunConfig, gpus: pathlib.Path = _GPUS) -> list[str]:
    """Returns one line on each thing that this host lacks; none where the ranks run elsewhere.

    Args:
      config: of the run.
      gpus: the directory in which the driver lists GPUs.
    """
    if os.environ.get(ELSEWHERE_VARIABLE):
        return []
    return [text for text in (_disk(config), _precision(config, gpus)) if text]


def _disk(config: RunConfig) -> str | None:
    path = pathlib.Path(config.run_dir or "runs").absolute()
    existing = next(place for place in (path, *path.parents) if place.is_dir())
    free, room = shutil.disk_usage(existing).free / _GIGABYTE, (config.keep_checkpoints + 2) * _CHECKPOINT_GB
    if free < room:
        return (
            f"{existing}: {free:.1f} GB free; {config.keep_checkpoints} checkpoints (--keep_checkpoints), the best "
            f"and the one being written may take up to {room:.1f} GB"
        )
    return None


def _precision(config: RunConfig, gpus: pathlib.Path) -> str | None:
    if config.precision == "mixed_float16" and not gpus.is_dir():
        return "--precision=mixed_float16 needs a GPU, and this host shows none: --precision=auto fits the hardware"
    return None
