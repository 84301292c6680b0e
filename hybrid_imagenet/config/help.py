"""The text of --help: every flag with its group, type, unit and default."""

from __future__ import annotations

import dataclasses
import textwrap
import typing

from hybrid_imagenet import config
from hybrid_imagenet.config.options import Option, ValueType, options_of, value_type

_INTRODUCTION = """\
usage: python -m hybrid_imagenet.main [--flag=value ...]
       horovodrun -np N -H HOST:SLOTS,... python -m hybrid_imagenet.main [--flag=value ...]

Trains an image classifier. Values are taken from the defaults below, then the recipe, then --flagfile=FILE, then the
command line. A boolean flag is written --name or --noname; several values are separated by commas.
"""
_WIDTH = 100


def text() -> str:
    """The whole help, one block per group of flags."""
    parts = [_INTRODUCTION]
    for group in config.GROUPS:
        parts += [(group.__doc__ or "").strip(), *entries(group), ""]
    return "\n".join(parts)


def entries(group: type) -> list[str]:
    """The flags that a dataclass declares, one text each."""
    hints = typing.get_type_hints(group)
    defaults = {f.name: f.default for f in dataclasses.fields(group)}
    return [_entry(name, opt, value_type(hints[name]), defaults[name]) for name, opt in options_of(group).items()]


def _entry(name: str, opt: Option, kind: ValueType, default: object) -> str:
    form = (
        "|".join(opt.choices)
        if opt.choices
        else kind.base.__name__ + (",..." if kind.repeated else "|auto" if opt.auto else "")
    )
    head = f"  --[no]{name}" if kind.base is bool else f"  --{name}={form}"
    unit = f", in {opt.unit}" if opt.unit else ""
    body = f"{opt.help} (default {_shown(default)}{unit})"
    return textwrap.fill(head, _WIDTH, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False) + (
        "\n" + textwrap.fill(body, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    )


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
