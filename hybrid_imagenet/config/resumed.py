"""Takes over from the run that is resumed what nobody has set now: a default that has changed since must not act."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import files
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.config import defaults
from hybrid_imagenet.config.choices import optimizer_options
from hybrid_imagenet.config.options import Origin
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import run_dir

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig


def description(config: RunConfig) -> Mapping[str, Any]:
    """Returns the config.json of the run that is to be resumed; empty where there is none, and on ranks other than 0.

    Raises:
      UserError: if it is empty, cut or describes no run: today's defaults must not take the place of the run's.
    """
    if not config.resume or placement().rank:
        return {}
    path = run_dir.chosen(config.run_dir, config.recipe, config.dataset, resume=True) / "config.json"
    if not path.exists():
        return {}
    found = files.read_json(path)
    if not isinstance(found.get("flags"), dict):
        raise UserError(f"{path}: holds no flags of a run; restore it from a copy")
    return found


def keep_choices(config: RunConfig, earlier: Mapping[str, Any]) -> RunConfig:
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
    names = ["seed", "shuffle_window"]  # the rest of an epoch is that of its order
    if flags.get("optimizer") == config.optimizer:
        options = [name for name in optimizer_options(config.optimizer) if name in config.chosen]
        names += [name for name in options if origins.get(name) != Origin.BATCH.value]
    kept = {name: flags[name] for name in names if name in flags and config.origins[name] is Origin.DEFAULT}
    return config.replace(Origin.RUN, **kept)


def shared(config: RunConfig, broadcast: Callable[[Any], Any]) -> RunConfig:
    """Returns the configuration with what rank 0 has taken over: its host alone need hold the run's directory."""
    kept = {name: value for name, value in config.values().items() if config.origins[name] is Origin.RUN}
    return defaults.complete(config.replace(Origin.RUN, **broadcast(kept)))
