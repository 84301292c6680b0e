"""Writes the text of --help: every flag with its group, type, unit and default."""

from __future__ import annotations

import textwrap

from hybrid_imagenet import config
from hybrid_imagenet.config import choices
from hybrid_imagenet.config.signatures import Argument

_INTRODUCTION = """\
usage: python -m hybrid_imagenet.main [--flag=value ...]
       horovodrun -np N -H HOST:SLOTS,... python -m hybrid_imagenet.main [--flag=value ...]

Trains an image classifier. Values are taken from the defaults below, then the recipe, then --flagfile=FILE, then the
command line. A boolean flag is written --name or --noname; several values are separated by commas.
"""
_WIDTH = 100


def text() -> str:
    """The whole help: a block per group of flags, then the options of what can be chosen."""
    parts = [_INTRODUCTION]
    for group in config.GROUPS:
        parts += [(group.__doc__ or "").strip().splitlines()[0], *entries(group), ""]
    for choice in choices.CHOICES:
        parts.append(f"Options of --{choice.flag}, each with the values that have it.")
        for name in choice.names():
            declared: dict[str, list[str]] = {}
            for value in choice.owners(name):
                declared.setdefault(_entry(name, choice.options[value][name]), []).append(value)
            parts += [_entry(name, choice.options[v[0]][name], f"{', '.join(v)}; ") for v in declared.values()]
        parts.append("")
    return "\n".join(parts)


def entries(group: type) -> list[str]:
    """The flags that a dataclass declares, one text each."""
    return [_entry(name, argument) for name, argument in config.fields_of(group).items()]


def _entry(name: str, argument: Argument, owners: str = "") -> str:
    kind, opt = argument.kind, argument.option
    form = (
        "|".join((*opt.choices, *(["MODULE:FUNCTION"] if opt.function else [])))
        if opt.choices
        else kind.base.__name__ + (",..." if kind.repeated else "|auto" if opt.auto else "")
    )
    head = f"  --[no]{name}" if kind.base is bool else f"  --{name}={form}"
    unit = f", in {opt.unit}" if opt.unit else ""
    body = f"{opt.help} ({owners}default {_shown(argument.default)}{unit})"
    return textwrap.fill(head, _WIDTH, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False) + (
        "\n" + textwrap.fill(body, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    )


def _shown(value: object) -> str:
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
