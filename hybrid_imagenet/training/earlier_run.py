"""Takes over from the run that is resumed what nobody has set now: a default that has changed since must not act."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RENAMED, Config
from hybrid_imagenet.config.choices import optimizer_options
from hybrid_imagenet.config.derived import TABLE
from hybrid_imagenet.runlog import run_dir

_BEFORE: dict[str, Any] = {"hybrid_ramp_epochs": 0.0}
"""What runs did that are older than an option of their optimizer, where its default is something else."""


def description(config: Config) -> Mapping[str, Any]:
    """The config.json of the run that is to be resumed; empty where there is none that can be read."""
    if not config.resume:
        return {}
    path = run_dir.requested(config.run_dir, config.recipe, config.dataset)
    path = path if config.run_dir else run_dir.newest_name(path)
    try:
        found = json.loads((path / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep_choices(config: Config, communicator: Communicator) -> Config:
    """The configuration with the earlier run's order of images and options of the optimizer, where nobody set them.

    What followed from the batch does so again. Every rank calls it; the file is read by rank 0.
    """
    if not config.resume:
        return config
    earlier = communicator.broadcast_object(description(config) if communicator.rank == 0 else None)
    flags, origins = ({**earlier.get(key, {})} for key in ("flags", "origins"))
    if config.shuffle_window is None and "shuffle_window" in flags:  # the rest of an epoch is that of its order
        config = config.replace(
            {"shuffle_window": "the run's config.json"}, shuffle_window=flags["shuffle_window"] or 0
        )
    if flags.get("optimizer") != config.optimizer:
        return config
    flags = _BEFORE | {RENAMED.get(name, name): value for name, value in flags.items()}
    kept = {
        name: flags[name]
        for name in optimizer_options(config.optimizer)
        if name in flags and name in config.chosen and config.origins.get(name) == "default"
        if not str(origins.get(name, "")).startswith(TABLE)
    }
    return config.replace(dict.fromkeys(kept, "the run's config.json"), **kept)
