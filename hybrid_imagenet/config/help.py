"""Writes the text of --help.

It shows the flags that are declared `basic`. --help=all shows every flag.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from hybrid_imagenet import config
from hybrid_imagenet.config.flags import CHOICES, owners
from hybrid_imagenet.errors import UserError, did_you_mean
from hybrid_imagenet.options import SPELLING, Option, format_value, options_of

EXAMPLES = {
    "Handwritten digits, without a download": "hybrid-imagenet train --flagfile=digits",
    "Your own images, a directory for each class": (
        "hybrid-imagenet train --dataset=folder --data_dir=photos --val_fraction=0.2"
    ),
    "Eight GPUs on two hosts (2,048 images per step)": (
        "hybrid-imagenet run -np 8 -H a:4,b:4 -- --recipe=mlperf_lars --dataset=tfrecord"
        " --data_dir=/data"
    ),
    "Continue a run that was stopped": (
        "hybrid-imagenet train --flagfile=digits --run_dir=runs/a --resume"
    ),
    "What a recipe would do on 8 GPUs (2,048 images per step)": (
        "hybrid-imagenet train --recipe=mlperf_lars --print_config --print_config_gpus=8"
    ),
}
"""Commands, by their purpose."""
_USAGE = """\
usage: hybrid-imagenet train [--flag=value ...]
       hybrid-imagenet run [-np N] [-H HOST:SLOTS,...] -- [--flag=value ...]
"""
_INTRODUCTION = """\
Trains an image classifier in this process; hybrid-imagenet run trains on several GPUs or hosts with
the same flags. Values come from the defaults, then the recipe, then --flagfile=FILE,
then the command line; the last one wins. FILE is a path, or the name of a flag file of the program
such as digits. A boolean flag is written --name or --noname. Separate several values with
commas.
"""
# What stands for a value of a flag without choices.
_PLACEHOLDERS = {bool: "BOOLEAN", str: "TEXT", int: "N", float: "NUMBER"}
_MAX_WIDTH = 100
_INDENT = " " * 6
# Topics of groups that have another name than the group's attribute of a configuration.
_TOPICS = {"network": "model"}
# Replaces a space at which no line may break.
_NO_BREAK = "\0"


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A flag in the help.

    Attributes:
      name: Name of the flag.
      option: Its declaration.
      owners: Values of another flag that have this option; empty for flags of every run.
    """

    name: str
    option: Option
    owners: tuple[str, ...] = ()

    def matches(self, word: str) -> bool:
        """Returns whether a word is in the flag's name or help, or is one of its values."""
        option = self.option
        if word in self.name or word in option.help.lower():
            return True
        return word in self.owners or word in option.choices


# A title and its flags.
_Block = tuple[str, Sequence[_Entry]]


def filled(text: str, columns: int, indent: str = "") -> str:
    """Returns a paragraph in lines of at most `columns` characters.

    A command in backticks stays on one line, so that it can be copied. So does a word with hyphens.
    """
    whole = re.sub(r"`[^`]+`", lambda command: command[0].replace(" ", _NO_BREAK), text)
    lines = textwrap.fill(
        whole,
        columns,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines.replace(_NO_BREAK, " ")


def width() -> int:
    """Returns the columns of the terminal, at most 100; 100 if the output is not a terminal."""
    return min(_MAX_WIDTH, shutil.get_terminal_size((_MAX_WIDTH, 24)).columns)


def topic(arguments: Iterable[str]) -> str | None:
    """Returns the topic that a command line asks help about.

    Returns:
      TOPIC for --help=TOPIC, "" for --help and -h; None without them.
    """
    requests = [word for word in arguments if re.fullmatch(r"-h|--help(=.*)?", word)]
    return requests[-1].partition("=")[2] if requests else None


def text(about: str = "") -> str:
    """Returns the help on a topic.

    Args:
      about: "" for the basic flags with examples, "all" for every flag, the name of a group of
        flags, or a word in the name or help of a flag.

    Raises:
      UserError: For a word that is not found.
    """
    groups = _groups()
    if about in ("", "all"):
        return _overview(groups, is_complete=about == "all")
    word = about.lower().lstrip("-").replace("-", "_")
    if word in groups:
        title, flags = groups[word]
        # The group of a choice, such as --optimizer, does not contain the flag itself.
        is_listed = any(entry.name == word for entry in flags)
        if word in config.COMMON and not is_listed:
            flags = [_Entry(word, config.COMMON[word]), *flags]
        return "\n".join(_lines([(title, flags)]))
    matches = [
        (title, [entry for entry in flags if entry.matches(word)])
        for title, flags in groups.values()
    ]
    if not any(flags for _, flags in matches):
        near = did_you_mean(word, [*groups, *config.OPTIONS])
        raise UserError(
            f"--help={about}: no flag has this word in its name or help{near}. --help=all lists"
            " every flag."
        )
    return "\n".join(_lines(matches))


def _overview(groups: Mapping[str, _Block], *, is_complete: bool) -> str:
    """Returns the introduction, and every flag or the basic flags with examples."""
    parts = [_USAGE, filled(f"{_INTRODUCTION}{SPELLING}", width()), ""]
    if is_complete:
        return "\n".join([*parts, *_lines(groups.values())])
    parts.append("Examples:")
    for purpose, command in EXAMPLES.items():
        parts.append(f"  {purpose}:\n    {command}")
    parts.append("")
    basic_blocks = []
    for title, flags in groups.values():
        basic_blocks.append((title, [entry for entry in flags if entry.option.basic]))
    return "\n".join([*parts, *_lines(basic_blocks), _more(groups)])


def first_commands(start: str) -> str:
    """Returns the error of a command that starts training but has no flags: two commands to try.

    Args:
      start: The command up to its flags of training, such as "hybrid-imagenet train".
    """
    return "\n".join(
        [
            "error: no flags were given. Try one of these commands:",
            f"  {start} --flagfile=digits",
            (
                "      trains ResNet-50 on handwritten digits, in a few minutes on a CPU, without a"
                " download"
            ),
            f"  {start} --dataset=folder --data_dir=photos --val_fraction=0.2",
            "      trains on your own images, with a directory for each class in photos/",
            "hybrid-imagenet train --help lists the flags.",
        ]
    )


def entries(group: type) -> list[str]:
    """Returns the help on each flag that a dataclass declares."""
    return [_described(_Entry(name, argument)) for name, argument in options_of(group).items()]


def _groups() -> dict[str, _Block]:
    """Returns the flags by group: those of every run, then the options of each choice."""
    groups: dict[str, _Block] = {}
    for attribute, group in config.GROUPS.items():
        title = (group.__doc__ or "").strip().splitlines()[0]
        groups[_TOPICS.get(attribute, attribute)] = (
            title,
            [_Entry(*item) for item in options_of(group).items()],
        )
    for flag, by_value in CHOICES.items():
        listed = []
        for name in dict.fromkeys(name for options in by_value.values() for name in options):
            # An option with the same help for several values is listed once.
            values_by_help: dict[str, list[str]] = {}
            for value in owners(flag, name):
                entry_help = _described(_Entry(name, by_value[value][name]))
                values_by_help.setdefault(entry_help, []).append(value)
            for values in values_by_help.values():
                listed.append(_Entry(name, by_value[values[0]][name], tuple(values)))
        groups[flag] = (
            f"Options of --{flag}; the values that use an option are in parentheses.",
            listed,
        )
    return groups


def _more(groups: Iterable[str]) -> str:
    return filled(
        f"--help=all lists all {len(config.OPTIONS)} flags. --help=GROUP lists a group:"
        f" {', '.join(groups)}. --help=WORD searches names and texts.",
        width(),
    )


def _lines(blocks: Iterable[_Block]) -> list[str]:
    lines: list[str] = []
    for title, flags in blocks:
        if flags:
            lines += [filled(title, width()), *map(_described, flags), ""]
    return lines


def _described(entry: _Entry) -> str:
    opt = entry.option
    kind = opt.kind
    choices = [*opt.choices]
    if opt.accepts_function:
        choices += ["keras:NAME", "MODULE:FUNCTION"]
    form = "|".join(choices)
    if not opt.choices:
        form = _PLACEHOLDERS[kind.base] + (",..." if kind.repeated else "")
    head = f"  --[no]{entry.name}" if kind.base is bool else f"  --{entry.name}={form}"
    notes = [", ".join(entry.owners)] if entry.owners else []
    # If a default depends on other flags, the data or the machine, the flag's text describes it.
    if "(default: " not in opt.help:
        notes.append(f"default: {_default_text(opt)}")
    body = opt.help
    if notes:
        body += f" ({'; '.join(notes)})"
    return f"{_broken(head)}\n{filled(body, width(), _INDENT)}"


def _default_text(opt: Option) -> str:
    text = format_value(opt.default)
    if opt.default is None or not opt.unit:
        return text
    if opt.default == 1:
        return f"{text} {opt.unit.removesuffix('s')}"
    return f"{text} {opt.unit}"


def _broken(head: str) -> str:
    """Returns the name and form of a flag, on several lines if it has many choices."""
    lines = [""]
    for part in re.split(r"(?<=\|)", head):
        if lines[-1].strip() and len(lines[-1] + part) > width():
            lines.append(_INDENT)
        lines[-1] += part
    return "\n".join(lines)
