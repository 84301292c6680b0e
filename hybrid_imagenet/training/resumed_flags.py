"""Takes over from the run that is resumed what nobody has set now: a default that has changed since must not act."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import Config
from hybrid_imagenet.config.choices import optimizer_options
from hybrid_imagenet.config.derived import TABLE
from hybrid_imagenet.runlog import run_dir

_SOURCE = "the run's config.json"


def description(config: Config) -> Mapping[str, Any]:
    """The config.json of the run that is to be resumed; empty where there is none that can be read."""
    if not config.resume:
        return {}
    path = run_dir.chosen(config.run_dir, config.recipe, config.dataset, resume=True)
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
    return merged(config, communicator.broadcast_object(description(config) if communicator.rank == 0 else None))


def merged(config: Config, earlier: Mapping[str, Any]) -> Config:
    """The configuration with what `keep_choices` takes from a config.json."""
    flags, origins = ({**earlier.get(key, {})} for key in ("flags", "origins"))
    if "shuffle_window" in flags:
        flags["shuffle_window"] = flags["shuffle_window"] or 0  # now the default may be another one
    order = {
        name: flags[name]
        for name in ("seed", "shuffle_window")  # the rest of an epoch is that of its order
        if name in flags and config.origins.get(name) == "default"
    }
    config = config.replace(dict.fromkeys(order, _SOURCE), **order)
    if flags.get("optimizer") != config.optimizer:
        return config
    kept = {
        name: flags[name]
        for name in optimizer_options(config.optimizer)
        if name in flags and name in config.chosen and config.origins.get(name) == "default"
        if not str(origins.get(name, "")).startswith(TABLE)
    }
    return config.replace(dict.fromkeys(kept, _SOURCE), **kept)
