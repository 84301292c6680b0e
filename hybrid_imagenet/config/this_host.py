"""Looks at the host that --check_only runs on: its directories, free disk and GPUs, without TensorFlow.

What it finds are warnings: the ranks may run on other hosts. The scripts for clusters make the check on a host that may
not train, and set HYBRID_IMAGENET_RANKS_ELSEWHERE, so that it says nothing of the host.
"""

from __future__ import annotations

import os
import pathlib
import shutil

from hybrid_imagenet.config import Config

_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
_GIGABYTE = 1e9
# Gigabytes of a checkpoint of the largest network but ResNet-101 and -152: 61 million weights and two values of an
# optimizer for each, in FP32.
_CHECKPOINT_GB = 0.75


def warnings(config: Config, gpus: pathlib.Path = _GPUS) -> list[str]:
    """Returns one line on each thing that would stop the run if it ran here; none where ranks run elsewhere.

    Args:
      config: of the run.
      gpus: the directory in which the driver lists GPUs.
    """
    if os.environ.get("HYBRID_IMAGENET_RANKS_ELSEWHERE"):
        return []
    found = [_data(config), _run_dir(config), _disk(config), _precision(config, gpus)]
    return [f"warning: {text}" for text in found if text]


def _data(config: Config) -> str | None:
    if config.data_dir and "://" not in config.data_dir and not pathlib.Path(config.data_dir).expanduser().is_dir():
        return f"--data_dir={config.data_dir}: no such directory on this host"
    return None


def _run_dir(config: Config) -> str | None:
    if config.run_dir is None:
        return None
    path = pathlib.Path(config.run_dir)
    holds_run = (path / "config.json").exists()
    if path.exists() and not path.is_dir():
        return f"--run_dir={path} is not a directory"
    if holds_run and not config.resume:
        return f"--run_dir={path} holds a run: add --resume to go on in it, or give another directory"
    if not holds_run and config.resume:
        return f"--run_dir={path} holds no run: --resume will start from the beginning"
    return None


def _disk(config: Config) -> str | None:
    path = pathlib.Path(config.run_dir or "runs").absolute()
    existing = next(place for place in (path, *path.parents) if place.is_dir())
    free, room = shutil.disk_usage(existing).free / _GIGABYTE, (config.keep + 2) * _CHECKPOINT_GB
    if free < room:
        return (
            f"{existing}: {free:.1f} GB free; {config.keep} checkpoints (--keep), the best and the one being written "
            f"may take up to {room:.1f} GB"
        )
    return None


def _precision(config: Config, gpus: pathlib.Path) -> str | None:
    if config.precision == "mixed_float16" and not gpus.is_dir():
        return "--precision=mixed_float16 needs a GPU, and this host shows none: --precision=auto fits the hardware"
    return None
