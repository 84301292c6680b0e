"""Writes the Bash completion of `hybrid-imagenet`: commands, and the flags of training with their values."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_imagenet import config, recipes

_SCRIPT = """\
# bash completion for hybrid-imagenet; load it with: source <(hybrid-imagenet completion)
_hybrid_imagenet() {
    local line=${COMP_LINE:0:COMP_POINT} word name words=""
    word=${line##*[[:space:]]}
    name=${word%%=*}
    name=${name#--}
    case "$line" in
        *[[:space:]]train[[:space:]]* | *[[:space:]]run[[:space:]]*" -- "*)
            case "${name//-/_} $word" in
@VALUES@
                *=*) ;;
                *) words="@FLAGS@"; word=--${name//-/_} ;;
            esac ;;
        *[[:space:]]*[[:space:]]*) ;;
        *) words="@COMMANDS@" ;;
    esac
    [[ $word != --*=* ]] || word=${word#*=}  # bash takes = for a break between words
    if [[ -n $words ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$word")
        [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace 2> /dev/null
    else
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -F _hybrid_imagenet hybrid-imagenet
"""


def script(commands: Iterable[str]) -> str:
    """The script for bash, from the names of the commands and the declarations of the flags."""
    flags, values = [], []
    for name, option in config.OPTIONS.items():
        known = (*recipes.names(), "list") if name == "recipe" else option.choices
        boolean = option.kind.base is bool
        flags += [f"--{name}", f"--no{name}"] if boolean else [f"--{name}="]
        if known:
            values.append(f"""{" " * 16}"{name} "*=*) words="{" ".join(known)}" ;;""")
    text = _SCRIPT.replace("@COMMANDS@", " ".join(commands)).replace("@FLAGS@", " ".join(flags))
    return text.replace("@VALUES@", "\n".join(values))
