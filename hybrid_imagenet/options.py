"""Declares options, the fields of frozen dataclasses that are command-line flags too; parses texts,
checks values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.errors import UserError, did_you_mean, without_secrets

if TYPE_CHECKING:
    from absl import flags


class Origin(enum.Enum):
    """What set a value, in the words of --print_config and config.json."""

    DEFAULT = "default"
    DATA = "default for the dataset"
    HARDWARE = "default on GPUs"
    BATCH = "MLPerf's table"
    RUN = "the run's config.json"
    RECIPE = "recipe"
    FLAGFILE = "flagfile"
    COMMAND_LINE = "command line"


@dataclasses.dataclass(frozen=True)
class ValueType:
    """A base type, and whether None or several values of it are allowed."""

    base: type
    optional: bool = False
    repeated: bool = False


@dataclasses.dataclass(frozen=True)
class Option:
    """A field that is a flag.

    Attributes:
      help: its text in --help.
      unit: of the value.
      choices: the values that it takes, if there are but some.
      minimum: inclusive.
      maximum: inclusive.
      above: exclusive.
      function: a value MODULE:FUNCTION may stand in place of the choices.
      whole: a number that is whole is kept as one: 90 stays 90 where 0.5 is possible too.
      basic: --help shows it; --help=all shows the others too.
      flag: its name, where that is not the field's.
      name, kind, default: read from the field.
    """

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    accepts_function: bool = False
    keep_integer: bool = False
    basic: bool = False
    flag: str = ""
    name: str = ""
    kind: ValueType = ValueType(str)
    default: Any = None


def option(default: Any, help: str, **declared: Any) -> Any:  # noqa: A002 - the word that absl and argparse use
    """Declares a dataclass field that is also a command-line flag, by the attributes of `Option`.

    The flag's type is the field's annotation: `bool`, `int`, `float`, `str`, one of these `| None`
    (the empty string means None), or `tuple[T, ...]` (comma-separated).
    """
    return dataclasses.field(default=default, metadata={"option": Option(help, **declared)})


def options_of(cls: type) -> Mapping[str, Option]:
    """The options that a dataclass declares, by flag, in order of declaration."""
    found = {}
    fields = [field for field in dataclasses.fields(cls) if "option" in field.metadata]
    # Of the class itself they cannot be had on Python 3.10, which does not take KW_ONLY for a type.
    hints = typing.get_type_hints(
        types.SimpleNamespace(__annotations__={field.name: field.type for field in fields}), {}
    )
    for field in fields:
        declared: Option = field.metadata["option"]
        found[declared.flag or field.name] = dataclasses.replace(
            declared,
            name=field.name,
            kind=parse_annotation(hints[field.name]),
            default=field.default,
        )
    return found


def parse_annotation(annotation: Any) -> ValueType:
    """Reduces an annotation to a base type and whether None or several values are allowed."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(inner) == 1:
            return dataclasses.replace(parse_annotation(inner[0]), optional=True)
    if typing.get_origin(annotation) is tuple:
        return ValueType(typing.get_args(annotation)[0], repeated=True)
    if annotation in (bool, int, float, str):
        return ValueType(annotation)
    raise TypeError(f"no flag can hold a value of type {annotation!r}")


_LARGEST = 1e15  # whole numbers up to here are exact in arithmetic with floating-point ones
_LONGEST = 200  # characters of a value that a message repeats
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


def parse_value(flag: str, text: str, opt: Option) -> Any:
    """Converts and checks the text given for a flag.

    Raises:
      UserError: if the text is not of the flag's type or lies outside its bounds or choices.
    """
    if opt.kind.optional and text == "":
        return None
    if opt.kind.repeated:
        return tuple(
            _parse_one(flag, part.strip(), opt) for part in text.split(",") if part.strip()
        )
    return _parse_one(flag, text, opt)


def _parse_one(flag: str, text: str, opt: Option) -> Any:
    base: Any = opt.kind.base
    try:
        value: Any = _BOOLEANS[text.lower()] if base is bool else base(os.path.expanduser(text))  # noqa: PTH111 - a text
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number", float: "a number"}
        raise UserError(f"--{flag}={text}: give {words[base]}") from None
    check_value(flag, value, opt)
    return int(value) if opt.keep_integer and value.is_integer() else value


def check_value(flag: str, value: Any, opt: Option) -> None:
    """Raises UserError if a value (or an element of a tuple) breaks the option's bounds or
    choices.
    """
    for element in value if isinstance(value, tuple) else [value]:
        reason = invalid_reason(element, opt)
        if reason:
            text = f"{element:g}" if isinstance(element, float) else str(element)
            raise UserError(f"--{flag}={text[:_LONGEST]}: {reason}")


def invalid_reason(value: Any, opt: Option) -> str | None:
    """What is wrong with a value; None if nothing is."""
    if value is None:
        return None
    if (
        opt.choices
        and value not in opt.choices
        and not (opt.accepts_function and ":" in str(value))
    ):
        own = ", or a function of your own as MODULE:FUNCTION" if opt.accepts_function else ""
        return f"choose one of {', '.join(opt.choices)}{own}{did_you_mean(str(value), opt.choices)}"
    if value != value:
        return "give a number"
    if opt.above is not None and value <= opt.above:
        return f"must be above {opt.above:g}"
    if opt.minimum is not None and value < opt.minimum:
        return f"must be at least {opt.minimum:g}"
    if opt.maximum is not None and value > opt.maximum:
        return f"must be at most {opt.maximum:g}"
    if isinstance(value, (int, float)) and abs(value) > _LARGEST:
        return f"must be at most {_LARGEST:g}"
    return None


def format_value(value: object) -> str:
    """A value as --help and --print_config write it, without secrets."""
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else without_secrets(str(value))


SPELLING = "Dashes and underscores mean the same in the names of options: --data-dir is --data_dir."
"""Sentence in the help of every command about `underscored`."""


def normalize_flag(word: str) -> str:
    """A word of a command line with `--flag_name` for `--flag-name`; other words as they are."""
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _with_plain_boolean(word: str, options: Mapping[str, Option]) -> str:
    """Returns a word with true or false where it gives a boolean in other words, and --noname for
    --no_name.

    Raises:
      UserError: for a boolean with a value that means neither.
    """
    name, equals, text = word.lstrip("-").partition("=")
    known = options.get(name)
    negated = options.get(name.removeprefix("no_"))
    if known is None and negated is not None and negated.kind == ValueType(bool) and not equals:
        return f"--no{name.removeprefix('no_')}"
    if not word.startswith("-") or not equals or known is None or known.kind != ValueType(bool):
        return word
    return f"--{name}={str(_parse_one(name, text, known)).lower()}"


_OTHER_NAMES = {
    "amp": "precision",
    "batch_size": "per_gpu_batch",
    "initial_checkpoint": "init_from",
    "learning_rate": "lr",
    "lr_scheduler": "lr_schedule",
    "model_ema": "ema_decay",
    "num_epochs": "epochs",
    "opt": "optimizer",
    "output_dir": "run_dir",
    "pretrained": "init_from",
    "sched": "lr_schedule",
    "train_dir": "data_dir",
    "workers": "data_threads",
}
"""What other programs call our flags."""


@functools.lru_cache(maxsize=8)
def _absl_flags(names: tuple[tuple[str, bool], ...]) -> flags.FlagValues:
    """absl's flags of these names, booleans or texts; to define them takes longer than the rest of
    a command line.
    """
    from absl import (
        flags,
    )  # not at the top: a Python without packages is told how to enter the environment

    values = flags.FlagValues()
    for name, boolean in names:
        define = flags.DEFINE_boolean if boolean else flags.DEFINE_string
        define(name, None, "", flag_values=values)
    return values


def parse_arguments(arguments: Iterable[str], options: Mapping[str, Option]) -> dict[str, str]:
    """Splits `--name=value` arguments with absl's parser into the texts that were given.

    Booleans take absl's forms too: `--name` and `--noname`, also written `--no-name`. `--flag-name`
    is `--flag_name`. The last of several values counts.

    Raises:
      UserError: for an unknown flag (with the nearest known name), a flag without a value or a
        stray word.
    """
    from absl import flags

    values = _absl_flags(
        tuple((name, known.kind == ValueType(bool)) for name, known in options.items())
    )
    for name in options:
        values[name].unparse()
    try:
        rest = values(
            [
                "hybrid_imagenet",
                *(_with_plain_boolean(normalize_flag(word), options) for word in arguments),
            ]
        )
    except flags.UnrecognizedFlagError as error:
        ours = _OTHER_NAMES.get(error.flagname)
        near = did_you_mean(
            ours or error.flagname, [ours] if ours and ours in options else options, "--"
        )
        raise UserError(f"--{error.flagname}: no such flag{near}; see --help") from None
    except flags.Error as error:
        raise UserError(" ".join(str(error).split())) from None
    if len(rest) > 1:
        raise UserError(f"unexpected argument {rest[1]!r}: flags are written --name=value")
    return {name: str(values[name].value) for name in options if values[name].value is not None}
