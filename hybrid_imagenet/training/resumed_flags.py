"""Takes over from the run that is resumed what nobody has set now: a default that has changed since must not act."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.config import Config
from hybrid_imagenet.config.choices import optimizer_options
from hybrid_imagenet.config.derived import TABLE
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import run_dir

_SOURCE = "the run's config.json"


def description(config: Config) -> Mapping[str, Any]:
    """Returns the config.json of the run that is to be resumed; empty where there is none.

    Raises:
      UserError: if it is empty, cut or describes no run: today's defaults must not take the place of the run's.
    """
    if not config.resume:
        return {}
    path = run_dir.chosen(config.run_dir, config.recipe, config.dataset, resume=True) / "config.json"
    if not path.exists():
        return {}
    found = files.read_json(path)
    if not isinstance(found.get("flags"), dict):
        raise UserError(f"{path}: holds no flags of a run; restore it from a copy")
    return found


def keep_choices(config: Config, earlier: Mapping[str, Any]) -> Config:
    """Returns the configuration with the earlier run's order of images and optimizer options, where nobody set them.

    What followed from the batch does so again.

    Args:
      config: of this start.
      earlier: `description` of the run.
    """
    if not earlier:
        return config
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
