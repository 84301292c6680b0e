"""Declares options: fields of frozen dataclasses that are also command-line flags.

Also parses the text of flags and checks their values.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hybrid_imagenet.errors import UserError, did_you_mean, without_secrets

if TYPE_CHECKING:
    from absl import flags


OptionsClass = TypeVar("OptionsClass")

SPELLING = "Dashes and underscores mean the same in the names of options: --data-dir is --data_dir."
"""Sentence about `normalize_flag` in the help of every command."""

# Whole numbers up to here stay exact in floating-point arithmetic.
_MAX_NUMBER = 1e15
_MAX_SHOWN_CHARACTERS = 200
_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_TYPE_NAMES = {bool: "true or false", int: "a whole number", float: "a number"}

# Names that other programs use, and the flag of this program with the same meaning.
_FOREIGN_NAMES = {
    "amp": "precision",
    "batch_size": "per_gpu_batch",
    "clip_grad": "clip_norm",
    "clip_grad_norm": "clip_norm",
    "cutmix": "cutmix_alpha",
    "global_clipnorm": "clip_norm",
    "initial_checkpoint": "init_from",
    "learning_rate": "lr",
    "lr_scheduler": "lr_schedule",
    "mixup": "mixup_alpha",
    "model_ema": "ema_decay",
    "num_epochs": "epochs",
    "opt": "optimizer",
    "output_dir": "run_dir",
    "pretrained": "init_from",
    "sched": "lr_schedule",
    "train_dir": "data_dir",
    "workers": "data_threads",
}


class Origin(enum.Enum):
    """The source of a value, as --print_config and config.json name it."""

    DEFAULT = "default"
    DATA = "default for the dataset"
    HARDWARE = "default on GPUs"
    BATCH = "MLPerf's table"
    RUN = "the run's config.json"
    EARLIER_START = "an earlier start of the run"
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
      help: Description in --help.
      unit: Unit of the value.
      choices: The allowed values; empty if every value of the type is allowed.
      minimum: Inclusive lower bound.
      maximum: Inclusive upper bound.
      above: Exclusive lower bound.
      accepts_function: Whether a function of the user, MODULE:FUNCTION, and keras:NAME are
        allowed in addition to `choices`.
      keep_integer: Whether a number without a fraction stays an int, so that 90 is shown as 90
        although 0.5 is allowed too.
      basic: Whether --help shows the flag; --help=all shows all flags.
      flag: Name of the flag, if it differs from the name of the field.
      name, kind, default: Read from the field.
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


def option(default: Any, help: str, **attributes: Any) -> Any:  # noqa: A002 - absl and argparse call it help
    """Declares a dataclass field that is also a command-line flag.

    The flag's type is the field's annotation: `bool`, `int`, `float`, `str`, one of these `| None`
    (the empty string means None), or `tuple[T, ...]` (comma-separated).

    Args:
      default: Default of the field and of the flag.
      help: Description in --help.
      attributes: Other attributes of `Option`.
    """
    return dataclasses.field(default=default, metadata={"option": Option(help, **attributes)})


def options_of(cls: type) -> Mapping[str, Option]:
    """Returns the options that a dataclass declares, by flag, in order of declaration."""
    options = {}
    fields = [field for field in dataclasses.fields(cls) if "option" in field.metadata]
    types_by_name = typing.get_type_hints(cls)
    for field in fields:
        declared: Option = field.metadata["option"]
        options[declared.flag or field.name] = dataclasses.replace(
            declared,
            name=field.name,
            kind=parse_annotation(types_by_name[field.name]),
            default=field.default,
        )
    return options


def from_flags(cls: type[OptionsClass], values: Mapping[str, Any]) -> OptionsClass:
    """Creates an object of a dataclass of options.

    Args:
      cls: The dataclass.
      values: The value of each of its options by flag; others are ignored.
    """
    return cls(**{known.name: values[flag] for flag, known in options_of(cls).items()})


def flag_values(options: object) -> dict[str, Any]:
    """Returns the values of an object of a dataclass of options, by flag."""
    known_options = options_of(type(options))
    return {flag: getattr(options, known.name) for flag, known in known_options.items()}


def parse_annotation(annotation: Any) -> ValueType:
    """Returns the base type of an annotation, and whether it allows None or several values.

    Raises:
      TypeError: If a flag cannot have a value of this type.
    """
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(members) == 1:
            return dataclasses.replace(parse_annotation(members[0]), optional=True)
    if typing.get_origin(annotation) is tuple:
        return ValueType(typing.get_args(annotation)[0], repeated=True)
    if annotation in (bool, int, float, str):
        return ValueType(annotation)
    raise TypeError(f"a flag cannot have a value of type {annotation!r}")


def parse_arguments(arguments: Iterable[str], options: Mapping[str, Option]) -> dict[str, str]:
    """Splits `--name=value` arguments with absl's parser into the text of each flag.

    Booleans may be written in absl's forms too: `--name` and `--noname`, also `--no-name`.
    `--flag-name` is `--flag_name`. If a flag occurs several times, the last value wins.

    Args:
      arguments: The words of a command line.
      options: The allowed flags, by name.

    Returns:
      The text of each flag that occurs.

    Raises:
      UserError: For an unknown flag (with the most similar name), a flag without a value or a word
        that is not a flag.
    """
    from absl import flags

    boolean_by_name = tuple(
        (name, option.kind == ValueType(bool)) for name, option in options.items()
    )
    values = _absl_flags(boolean_by_name)
    for name in options:
        values[name].unparse()
    words = [_with_plain_boolean(normalize_flag(word), options) for word in arguments]
    try:
        rest = values(["hybrid_imagenet", *words])
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag_error(error.flagname, options) from None
    except flags.Error as error:
        raise UserError(_absl_message(error)) from None
    if len(rest) > 1:
        raise UserError(f"Unexpected argument: {rest[1]}. Write flags as --name=value.")
    return {name: str(values[name].value) for name in options if values[name].value is not None}


@functools.lru_cache(maxsize=8)
def _absl_flags(boolean_by_name: tuple[tuple[str, bool], ...]) -> flags.FlagValues:
    """Returns absl's flags of these names, each a boolean or a text.

    They are cached, because defining them takes longer than parsing the command line.
    """
    # Import absl here, so that a Python without packages can still print how to enter the
    # environment.
    from absl import flags

    values = flags.FlagValues()
    for name, boolean in boolean_by_name:
        define = flags.DEFINE_boolean if boolean else flags.DEFINE_string
        define(name, None, "", flag_values=values)
    return values


def _unknown_flag_error(flag: str, options: Mapping[str, Option]) -> UserError:
    translated = _FOREIGN_NAMES.get(flag)
    if translated is not None and translated in options:
        suggestion = did_you_mean(translated, [translated], "--")
    else:
        suggestion = did_you_mean(translated or flag, options, "--")
    return UserError(f"There is no flag --{flag}{suggestion}. See --help.")


def _absl_message(error: flags.Error) -> str:
    """Returns what absl reports, which is almost always a flag without a value."""
    message = " ".join(str(error).split())
    missing = re.fullmatch(r"Missing value for flag (\S+)", message)
    if missing is None:
        return f"{message}. See --help."
    return f"{missing[1]} has no value. Write {missing[1]}=VALUE."


def normalize_flag(word: str) -> str:
    """Writes the name of a flag with underscores, `--flag_name` for `--flag-name`.

    Values and words that are not flags stay as they are.
    """
    if not word.startswith("--"):
        return word
    name, equals, value = word[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


def _with_plain_boolean(word: str, options: Mapping[str, Option]) -> str:
    """Rewrites a boolean flag to the forms that absl accepts.

    Values such as `yes` become true or false, and `--no_name` becomes `--noname`. Other words stay
    as they are.

    Raises:
      UserError: If the value of a boolean is neither true nor false.
    """
    name, equals, text = word.lstrip("-").partition("=")
    option = options.get(name)
    negated_name = name.removeprefix("no_")
    negated = options.get(negated_name)
    if option is None and negated is not None and negated.kind == ValueType(bool) and not equals:
        return f"--no{negated_name}"
    if not word.startswith("-") or not equals or option is None or option.kind != ValueType(bool):
        return word
    return f"--{name}={str(_parse_element(name, text, option)).lower()}"


def parse_value(flag: str, text: str, opt: Option) -> Any:
    """Converts the text of a flag to its value, and checks it.

    Raises:
      UserError: If the text is not of the flag's type, or outside its bounds or choices.
    """
    if opt.kind.optional and text == "":
        return None
    if opt.kind.repeated:
        elements = [element.strip() for element in text.split(",")]
        return tuple(_parse_element(flag, element, opt) for element in elements if element)
    return _parse_element(flag, text, opt)


def _parse_element(flag: str, text: str, opt: Option) -> Any:
    base: Any = opt.kind.base
    # pathlib cannot expand a text that is not a path.
    text_or_path = os.path.expanduser(text)  # noqa: PTH111
    try:
        value: Any = _BOOLEANS[text.lower()] if base is bool else base(text_or_path)
    except (KeyError, ValueError):
        raise UserError(f"--{flag}={text} is not valid. Use {_TYPE_NAMES[base]}.") from None
    check_value(flag, value, opt)
    return int(value) if opt.keep_integer and value.is_integer() else value


def check_value(flag: str, value: Any, opt: Option) -> None:
    """Checks a value, or each element of a tuple, against the option's bounds and choices.

    Raises:
      UserError: If it breaks them.
    """
    for element in value if isinstance(value, tuple) else [value]:
        reason = invalid_reason(element, opt)
        if reason:
            text = f"{element:g}" if isinstance(element, float) else str(element)
            raise UserError(
                f"--{flag}={text[:_MAX_SHOWN_CHARACTERS]} is not valid."
                f" {reason[0].upper()}{reason[1:]}."
            )


def invalid_reason(value: Any, opt: Option) -> str | None:
    """Returns what to use instead of a value that is not allowed; None if it is allowed."""
    if value is None:
        return None
    if opt.choices and value not in opt.choices and not _is_function_name(value, opt):
        function = ""
        if opt.accepts_function:
            function = (
                ", keras:NAME for a network of keras.applications, or your own function as"
                " MODULE:FUNCTION"
            )
        suggestion = did_you_mean(str(value), opt.choices)
        return f"choose one of {', '.join(opt.choices)}{function}{suggestion}"
    is_nan = value != value
    if is_nan:
        return "use a number"
    if opt.above is not None and value <= opt.above:
        return f"use a value above {opt.above:g}"
    if opt.minimum is not None and value < opt.minimum:
        return f"use a value of at least {opt.minimum:g}"
    if opt.maximum is not None and value > opt.maximum:
        return f"use a value of at most {opt.maximum:g}"
    if isinstance(value, (int, float)) and abs(value) > _MAX_NUMBER:
        return f"use a value of at most {_MAX_NUMBER:g}"
    return None


def _is_function_name(value: Any, opt: Option) -> bool:
    return opt.accepts_function and ":" in str(value)


def format_value(value: object) -> str:
    """Formats a value as in --help and --print_config, without secrets."""
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    if isinstance(value, bool):
        return str(value).lower()
    return without_secrets(str(value))
