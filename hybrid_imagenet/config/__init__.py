"""The configuration of a run: one frozen `Config`, put together from defaults, recipe, flag files and command line.

Each attribute of a `Config` is a flag of the same name. Fields are the flags that every run has, in groups (`run`,
`model`, `data`, `optimization`, `comm.settings`). `chosen` holds the options of the chosen optimizer, schedule and
all-reduce algorithm (`choices`). `checks` holds the rules that involve several flags. Nothing here imports TensorFlow,
so that `--help` and a wrong flag answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags as absl_flags

from hybrid_imagenet import recipes
from hybrid_imagenet.comm.settings import Communication
from hybrid_imagenet.config import checks, choices, signatures
from hybrid_imagenet.config.data import Data
from hybrid_imagenet.config.model import Model
from hybrid_imagenet.config.optimization import Optimization
from hybrid_imagenet.config.options import (
    Option,
    check_value,
    option,
    options_of,
    parse_arguments,
    parse_value,
    value_type,
)
from hybrid_imagenet.config.run import Evaluation, Run
from hybrid_imagenet.config.signatures import Argument
from hybrid_imagenet.data import registry
from hybrid_imagenet.errors import UserError, without_secrets

_log = logging.getLogger(__name__)
GROUPS = (Run, Evaluation, Data, Model, Optimization, Communication)


@dataclasses.dataclass(frozen=True)
class Config(Communication, Optimization, Model, Data, Evaluation, Run):
    """Every setting of a run; `resolve` and `from_values` make one.

    Attributes:
      chosen: the options of the chosen optimizer, schedule and algorithm; also attributes of the configuration.
      origins: what set each value: default, recipe, flagfile or command line.
      dropped: notes on options that were given but that nothing chosen has.
    """

    chosen: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    dropped: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    if not typing.TYPE_CHECKING:  # a type checker shall find misspelled fields

        def __getattr__(self, name: str) -> Any:
            """The value of a chosen option."""
            try:
                return self.__dict__["chosen"][name]
            except KeyError:
                raise AttributeError(f"this configuration has no --{name}") from None

    def values(self) -> dict[str, Any]:
        """Every setting by flag, in the order of --help."""
        found: dict[str, Any] = {}
        for name in COMMON:
            found[name] = getattr(self, name)
            for choice in choices.CHOICES:
                if choice.flag == name:
                    found |= {option: self.chosen[option] for option in choice.options[found[name]]}
        return found

    def replace(self, origins: Mapping[str, str], **changes: Any) -> Config:
        """This configuration with other values, chosen options among them, and what set them."""
        chosen = {name: changes.pop(name, value) for name, value in self.chosen.items()}
        return dataclasses.replace(self, **changes, chosen=chosen, origins={**self.origins, **origins})

    def shown(self) -> dict[str, Any]:
        """Returns the settings as they may be stored and sent: JSON-ready, without passwords and tokens."""
        flags = json.loads(self.to_json())
        return {name: without_secrets(value) if isinstance(value, str) else value for name, value in flags.items()}

    def to_json(self) -> str:
        """The settings as a JSON object, without their origins."""
        return json.dumps(self.values(), indent=2, sort_keys=True)


def fields_of(group: type) -> dict[str, Argument]:
    """The flags of a group that every run has, by name."""
    if group is Communication:
        found = dict(signatures.read("hybrid_imagenet.comm.settings:Communication"))
    else:
        hints, defaults = typing.get_type_hints(group), {f.name: f.default for f in dataclasses.fields(group)}
        found = {
            name: Argument(name, value_type(hints[name]), defaults[name], opt)
            for name, opt in options_of(group).items()
        }
    return found | {c.flag: c.selector(found[c.flag]) for c in choices.CHOICES if c.flag in found}


COMMON = {name: argument for group in GROUPS for name, argument in fields_of(group).items()}
"""The flags that every run has."""
_ALL = COMMON | {name: owners[0].argument for name, owners in choices.OWNERS.items()}
OPTIONS = {name: argument.option for name, argument in _ALL.items()}
KINDS = {name: argument.kind for name, argument in _ALL.items()}
_BOUNDS = {name: argument.option for name, argument in COMMON.items()}
_FREE = Option("")  # the bounds of an option come from the chosen optimizer, schedule or algorithm


def resolve(arguments: Sequence[str], *, before: Sequence[str] = ()) -> Config:
    """Builds the configuration from command-line arguments (without the program's name).

    Later sources win: default, recipe, flag file, command line.

    Args:
      arguments: of the command line.
      before: arguments that count as a flag file before them.

    Raises:
      UserError: one line that names the flag, its value and the remedy.
    """
    from_files, from_command = _split_flagfiles(arguments)
    given = {
        "flagfile": parse_arguments([*before, *from_files], KINDS),
        "command line": parse_arguments(from_command, KINDS),
    }
    recipe_text = given["command line"].get("recipe", given["flagfile"].get("recipe", Run.recipe))
    recipe = recipes.load(recipe_text)
    values: dict[str, Any] = dict(recipe.overrides)
    origins = dict.fromkeys(values, f"recipe {recipe.name}")
    for name, value in values.items():
        check_value(name, value, _BOUNDS.get(name, _FREE))
    for origin, texts in given.items():
        for name, text in texts.items():
            values[name] = parse_value(name, text, KINDS[name], _BOUNDS.get(name, _FREE))
            origins[name] = origin
    config = _build(values, origins)
    checks.check(config)
    return config


def from_values(values: Mapping[str, Any]) -> Config:
    """The configuration that `Config.to_json` has written, parsed.

    Flags that no longer exist are ignored, with a warning.
    """
    gone = sorted(set(values) - set(OPTIONS))
    if gone:
        _log.warning("ignored, as this version has no such flags: %s", ", ".join(f"--{name}" for name in gone))
    arguments = {k: tuple(value) if KINDS[k].repeated else value for k, value in values.items() if k in OPTIONS}
    return _build(arguments, dict.fromkeys(arguments, "config.json"))


def _build(values: dict[str, Any], origins: dict[str, str]) -> Config:
    selected = {choice.flag: values.get(choice.flag, COMMON[choice.flag].default) for choice in choices.CHOICES}
    chosen, dropped = choices.settle(values, origins, selected)
    if values.get("augmentation", COMMON["augmentation"].default) == "auto":
        dataset = values.get("dataset", COMMON["dataset"].default)
        values["augmentation"] = registry.of(dataset).augmentation
        if origins.get("augmentation", "default") == "default":
            origins["augmentation"] = f"default for {dataset}"
    origins = dict.fromkeys([*COMMON, *chosen], "default") | origins
    return Config(**values, chosen=chosen, origins=origins, dropped=dropped)


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


__all__ = ["COMMON", "GROUPS", "KINDS", "OPTIONS", "Config", "fields_of", "from_values", "option", "resolve"]
