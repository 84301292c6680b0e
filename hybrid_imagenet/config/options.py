"""Declares configuration fields as flags, parses their texts and checks single values."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from absl import flags

from hybrid_imagenet.errors import UserError, did_you_mean

_ALLOWED = (bool, int, float, str)


class Origin(enum.Enum):
    """What set a value, in the words of --print_config and config.json."""

    DEFAULT = "default"
    DATA = "default for the dataset"
    BATCH = "MLPerf's table"
    RUN = "the run's config.json"
    RECIPE = "recipe"
    FLAGFILE = "flagfile"
    COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class Option:
    """The help text of a flag, the bounds on its value (inclusive, but for `above`), and whether --help shows it."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    function: bool = False
    whole: bool = False
    basic: bool = False


def option(
    default: Any,
    help: str,  # noqa: A002 - the word that absl and argparse use
    *,
    unit: str = "",
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    function: bool = False,
    whole: bool = False,
    basic: bool = False,
) -> Any:
    """Declares a dataclass field that is also a command-line flag of the same name.

    The flag's type is the field's annotation: `bool`, `int`, `float`, `str`, one of these `| None` (the empty
    string means None), or `tuple[T, ...]` (comma-separated). With `function` a value
    MODULE:FUNCTION stands beside the choices.
    With `whole` a number that is whole is kept as one: 90 stays 90 where 0.5 is possible too. --help shows `basic`
    flags; --help=all shows the others too.
    """
    return dataclasses.field(
        default=default,
        metadata={"option": Option(help, unit, tuple(choices), minimum, maximum, above, function, whole, basic)},
    )


def options_of(cls: type) -> dict[str, Option]:
    """The flags that a configuration class declares, by name, in order of declaration."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(cls) if "option" in f.metadata}


@dataclasses.dataclass(frozen=True)
class ValueType:
    """The parsed form of a field's annotation."""

    base: type
    optional: bool = False
    repeated: bool = False


def value_type(annotation: Any) -> ValueType:
    """Reduces an annotation to a base type and whether None or several values are allowed."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(inner) == 1:
            return dataclasses.replace(value_type(inner[0]), optional=True)
    if typing.get_origin(annotation) is tuple:
        return ValueType(typing.get_args(annotation)[0], repeated=True)
    if annotation in _ALLOWED:
        return ValueType(annotation)
    raise TypeError(f"no flag can hold a value of type {annotation!r}")


_LARGEST = 1e15  # whole numbers up to here are exact in arithmetic with floating-point ones
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_value(name: str, text: str, kind: ValueType, opt: Option) -> Any:
    """Converts and checks the text given for a flag.

    Raises:
      UserError: if the text is not of the flag's type or lies outside its bounds or choices.
    """
    if kind.optional and text == "":
        return None
    if kind.repeated:
        return tuple(_parse_one(name, part.strip(), kind.base, opt) for part in text.split(",") if part.strip())
    return _parse_one(name, text, kind.base, opt)


def _parse_one(name: str, text: str, base: type, opt: Option) -> Any:
    value: Any
    try:
        value = _BOOLEANS[text.lower()] if base is bool else base(text)
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UserError(f"--{name}={text}: give {words[base]}") from None
    check_value(name, value, opt)
    return int(value) if opt.whole and value.is_integer() else value


def check_value(name: str, value: Any, opt: Option) -> None:
    """Raises UserError if one parsed value (or an element of a tuple) breaks the option's bounds or choices."""
    if isinstance(value, tuple):
        for element in value:
            check_value(name, element, opt)
        return
    if value is None:
        return
    if opt.choices and value not in opt.choices and not (opt.function and ":" in str(value)):
        own = ", or a function of your own as MODULE:FUNCTION" if opt.function else ""
        near = did_you_mean(str(value), opt.choices)
        raise UserError(f"--{name}={value}: choose one of {', '.join(opt.choices)}{own}{near}")
    if value != value:
        raise UserError(f"--{name}=nan: give a number")
    if opt.above is not None and value <= opt.above:
        raise UserError(f"--{name}={value:g}: must be above {opt.above:g}")
    if opt.minimum is not None and value < opt.minimum:
        raise UserError(f"--{name}={value}: must be at least {opt.minimum:g}")
    if opt.maximum is not None and value > opt.maximum:
        raise UserError(f"--{name}={value}: must be at most {opt.maximum:g}")
    if isinstance(value, (int, float)) and abs(value) > _LARGEST:
        raise UserError(f"--{name}={str(value)[:20]}: must be at most {_LARGEST:g}")


def underscored(word: str) -> str:
    """A word of a command line with `--flag_name` for `--flag-name`; other words as they are."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _with_plain_boolean(word: str, kinds: Mapping[str, ValueType]) -> str:
    """A word of a command line with true or false where it gives a boolean in other words; UserError for none."""
    name, equals, text = word.lstrip("-").partition("=")
    kind = kinds.get(name)
    if not word.startswith("-") or not equals or kind is None or kind.repeated or kind.base is not bool:
        return word
    return f"--{name}={str(_parse_one(name, text, bool, Option(''))).lower()}"


@functools.lru_cache(maxsize=8)
def _absl_flags(names: tuple[tuple[str, bool], ...]) -> flags.FlagValues:
    """absl's flags of these names, booleans or texts; to define them takes longer than the rest of a command line."""
    values = flags.FlagValues()
    for name, boolean in names:
        define = flags.DEFINE_boolean if boolean else flags.DEFINE_string
        define(name, None, "", flag_values=values)
    return values


def parse_arguments(arguments: Iterable[str], kinds: Mapping[str, ValueType]) -> dict[str, str]:
    """Splits `--name=value` arguments with absl's parser into the texts that were given.

    Booleans take absl's forms too: `--name` and `--noname`. `--flag-name` is `--flag_name`. The last of several values
    counts.

    Raises:
      UserError: for an unknown flag (with the nearest known name), a flag without a value or a stray word.
    """
    values = _absl_flags(tuple((name, kind.base is bool and not kind.repeated) for name, kind in kinds.items()))
    for name in kinds:
        values[name].unparse()
    try:
        rest = values(["hybrid_imagenet", *(_with_plain_boolean(underscored(word), kinds) for word in arguments)])
    except flags.UnrecognizedFlagError as error:
        near = did_you_mean(error.flagname, kinds, "--")
        raise UserError(f"--{error.flagname}: no such flag{near}; see --help") from None
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}: flags are written --name=value")
    return {name: str(values[name].value) for name in kinds if values[name].value is not None}
