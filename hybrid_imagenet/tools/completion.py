"""Writes the Bash completion of `hybrid-imagenet`: commands, flags and their values, taken from the help texts."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import re
from collections.abc import Mapping

from hybrid_imagenet import recipes

_OPTION = re.compile(r"^  (?:-\w, )?--(?P<no>\[no\])?(?P<name>\w+)(?P<form>=\S+)?$", re.MULTILINE)
_NAMES = re.compile(r"^  \{(?P<listed>[\w,]+)\}|NAME is one of (?P<told>[\w, ]+)$", re.MULTILINE)
_SCRIPT = """\
# bash completion for hybrid-imagenet; load it with: source <(hybrid-imagenet completion)
_hybrid_imagenet() {
    local line=${COMP_LINE:0:COMP_POINT} word command rest flags= names= values=
    local -a words
    word=${line##*[[:space:]]}
    read -ra words <<< "${line%"$word"}"
    COMPREPLY=()
    if (( ${#words[@]} <= 1 )); then
        mapfile -t COMPREPLY < <(compgen -W "@COMMANDS@" -- "$word")
        return
    fi
    command=${words[1]}
    case "$command ${words[2]:-}" in
@SUBCOMMANDS@
    esac
    case "$command" in
@FLAGS@
    esac
    if [[ $word == --*=* ]]; then
        rest=${word#--}
        rest=${rest%%=*}
        case "$command --${rest//-/_}" in
@VALUES@
            *) mapfile -t COMPREPLY < <(compgen -f -- "${word#*=}"); return ;;
        esac
        mapfile -t COMPREPLY < <(compgen -W "$values" -- "${word#*=}")  # = parts words for bash
    elif [[ $word == -* ]]; then
        rest=${word#--}
        mapfile -t COMPREPLY < <(compgen -W "$flags" -- "--${rest//-/_}")
        [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace 2> /dev/null
    elif [[ -n $names ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$names" -- "$word")
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -F _hybrid_imagenet hybrid-imagenet
"""


@dataclasses.dataclass(frozen=True)
class Words:
    """The words that can follow a command.

    Attributes:
      flags: as they are typed, with = where a value follows.
      values: of flags that have choices, by --name.
      names: of subcommands.
    """

    flags: tuple[str, ...]
    values: Mapping[str, tuple[str, ...]]
    names: tuple[str, ...]


def parse(text: str) -> Words:
    """Reads a help text."""
    flags: list[str] = []
    values: dict[str, tuple[str, ...]] = {}
    for option in _OPTION.finditer(text):
        name, form = f"--{option['name']}", option["form"] or ""
        flags.append(f"{name}=" if form else name)
        if option["no"]:
            flags.append(f"--no{option['name']}")
        if "|" in form and not form.startswith(("=int|", "=float|", "=str|")):
            values[name] = tuple(form[1:].split("|"))
        elif name == "--recipe":
            values[name] = (*recipes.names(), "list")
    found = _NAMES.search(text)
    names = re.findall(r"\w+", found["listed"] or found["told"]) if found else []
    return Words(tuple(flags), values, tuple(names))


def script(modules: Mapping[str, str]) -> str:
    """The script for bash.

    Args:
      modules: the module of each command, with main(arguments).
    """
    known: dict[str, Words] = {}
    for command, module in modules.items():
        known[command] = parse(_help(module))
        if command != "bench":  # a benchmark's module may need TensorFlow before it has read its arguments
            known |= {f"{command} {name}": parse(_help(module, name)) for name in known[command].names}
    flags, values = [], []
    for command, words in known.items():
        flags.append(f'{command!r}) flags="{" ".join(words.flags)}" names="{" ".join(words.names)}" ;;')
        values += [f'{f"{command} {name}"!r}) values="{" ".join(v)}" ;;' for name, v in words.values.items()]
    subcommands = [f"{command!r}) command={command!r} ;;" for command in known if " " in command]
    parts = {"COMMANDS": [" ".join(modules)], "SUBCOMMANDS": subcommands, "FLAGS": flags, "VALUES": values}
    text = _SCRIPT
    for name, lines in parts.items():
        indent = "" if name == "COMMANDS" else " " * (12 if name == "VALUES" else 8)
        text = text.replace(f"@{name}@", "\n".join(indent + line for line in lines))
    return text


def _help(module: str, *names: str) -> str:
    """Returns the text that a command prints for --help."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        importlib.import_module(module).main([*names, "--help"])
    return printed.getvalue()
