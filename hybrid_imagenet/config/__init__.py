"""The configuration of a run: one frozen `Config`, put together from defaults, recipe, flag files and command line.

Each field of `Config` is a flag of the same name. The groups live in modules of their own (`run`, `model`, `data`,
`optimization`, `communication`); `checks` holds the rules that involve several flags. Nothing here imports
TensorFlow, so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from hybrid_imagenet import recipes
from hybrid_imagenet.config import checks
from hybrid_imagenet.config.communication import Communication
from hybrid_imagenet.config.data import Data
from hybrid_imagenet.config.model import Model
from hybrid_imagenet.config.optimization import Optimization
from hybrid_imagenet.config.options import (
    AUTO,
    check_value,
    option,
    options_of,
    parse_arguments,
    parse_value,
    value_type,
)
from hybrid_imagenet.config.run import Evaluation, Run
from hybrid_imagenet.errors import UserError

GROUPS = (Run, Evaluation, Data, Model, Optimization, Communication)


@dataclasses.dataclass(frozen=True)
class Config(Communication, Optimization, Model, Data, Evaluation, Run):
    """Every setting of a run. `origins` tells what set each one: default, recipe, flagfile or command line."""

    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def to_json(self) -> str:
        """The settings as a JSON object, without their origins."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "origins"}
        return json.dumps(values, indent=2, sort_keys=True)


OPTIONS = options_of(Config)
KINDS = {name: value_type(hint) for name, hint in typing.get_type_hints(Config).items() if name in OPTIONS}


def resolve(arguments: Sequence[str]) -> Config:
    """Builds the configuration from command-line arguments (without the program's name).

    Later sources win: default, recipe, flag file, command line.

    Raises:
      UserError: one line that names the flag, its value and the remedy.
    """
    from_files, from_command = _split_flagfiles(arguments)
    given = {
        "flagfile": parse_arguments(from_files, KINDS),
        "command line": parse_arguments(from_command, KINDS),
    }
    recipe_text = given["command line"].get("recipe", given["flagfile"].get("recipe", Run.recipe))
    recipe = recipes.load(recipe_text)
    values: dict[str, Any] = dict(recipe.overrides)
    origins = dict.fromkeys(OPTIONS, "default") | dict.fromkeys(values, f"recipe {recipe.name}")
    for name, value in values.items():
        check_value(name, value, OPTIONS[name])
    for origin, texts in given.items():
        for name, text in texts.items():
            values[name] = parse_value(name, text, KINDS[name], OPTIONS[name])
            origins[name] = origin
    config = Config(**values, origins=origins)
    checks.check(config)
    return config


def from_values(values: Mapping[str, Any]) -> Config:
    """The configuration that `Config.to_json` has written, parsed."""
    arguments: dict[str, Any] = {k: tuple(value) if KINDS[k].repeated else value for k, value in values.items()}
    return Config(**arguments)


def _split_flagfiles(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separates the arguments that flag files hold from those written on the command line."""
    from_files: list[str] = []
    from_command: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        if name.lstrip("-") != "flagfile" or not name.startswith("-"):
            from_command.append(word)
            continue
        if not equals:
            if not queue:
                raise UserError("--flagfile needs the name of a file")
            value = queue.pop(0)
        from_files.extend(_read_flagfile(value))
    return from_files, from_command


def _read_flagfile(path: str) -> list[str]:
    reader = absl_flags.FlagValues()
    try:
        return reader.read_flags_from_files([f"--flagfile={path}"], force_gnu=False)
    except (absl_flags.Error, OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"--flagfile={path}: cannot be read ({reason})") from None


__all__ = ["AUTO", "GROUPS", "KINDS", "OPTIONS", "Config", "from_values", "option", "resolve"]
