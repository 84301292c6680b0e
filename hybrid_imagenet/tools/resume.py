"""`hybrid-imagenet resume RUN [FLAG ...]`: continues a run with the flags that its config.json
holds.
"""

from __future__ import annotations

import os
import pathlib
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet.config import stored
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import Origin, normalize_flag
from hybrid_imagenet.schedules.training_schedule import FIXED, PUBLISHED
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.run import format_slots

_GIVEN = (
    Origin.COMMAND_LINE.value,
    Origin.FLAGFILE.value,
)  # of what a person has set; the rest follows from it
_OF_ONE_START = (
    *("run_dir", "resume", "max_steps"),
    *("print_config", "print_config_all", "print_config_gpus", "check_only"),
)
_SECRET = "***"


def command(
    run: pathlib.Path,
    config: Mapping[str, Any],
    words: Sequence[str],
    ranks: int | None = None,
    hosts: str = "",
) -> list[str]:
    """The command that continues a run, without the program's name.

    Args:
      run: its directory.
      config: its config.json.
      words: flags that win over the run's.
      ranks: number of ranks; None takes the run's.
      hosts: HOST:SLOTS,... of -H; empty takes the run's hosts if it has the run's number of ranks.

    Raises:
      UserError: for flags that cannot be used, --run_dir among them, or a flag whose value was not
        stored.
    """
    flags, origins = config["flags"], config.get("origins", {})
    new = {normalize_flag(word)[2:].partition("=")[0] for word in words}
    new |= {name.removeprefix("no").removeprefix("_") for name in new}
    if "run_dir" in new:
        raise UserError("--run_dir: RUN is the directory of the run; copy it to continue elsewhere")
    unused = (
        PUBLISHED if flags.get("lr_schedule") in FIXED else ()
    )  # a flag file may hold for several recipes
    kept = [
        _flag(name, value)
        for name, value in flags.items()
        if origins.get(name) in _GIVEN
        and name in configuration.OPTIONS
        and name not in (*_OF_ONE_START, *unused, *new)
    ]
    if not {"recipe", "flagfile"} & new and origins.get("recipe") not in _GIVEN:
        # Ranks on other hosts may not see the directory of the run, which has its recipe.
        recipe = flags.get("recipe")
        if recipe and recipe != datasets.source_type(str(flags.get("dataset"))).default_recipe:
            kept.append(_flag("recipe", recipe))
    if hidden := [word for word in kept if _SECRET in word]:
        raise UserError(f"{hidden[0]}: the password is not stored; give the flag again")
    training = [*kept, *words, f"--run_dir={run}", "--resume"]
    configuration.resolve(training)
    before = int(config.get("world_size", 1))
    hosts_before = config.get("hosts") or []
    if ranks in (None, before) and not hosts and len(set(hosts_before)) > 1:
        hosts = format_slots(Counter(hosts_before))
    if (ranks or before) == 1 and not hosts:
        return ["train", *training]
    where = ["-H", hosts] if hosts else []
    count = ranks or (None if hosts else before)
    return ["run", *([] if count is None else ["-np", str(count)]), *where, "--", *training]


def _lacks_value(word: str) -> bool:
    known = configuration.OPTIONS.get(word[2:])
    return word == "--flagfile" or (
        word.startswith("--") and known is not None and known.kind.base is not bool
    )


def _flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, list):
        return f"--{name}={','.join(map(str, value))}"
    return f"--{name}={'' if value is None else value}"


def changes(flags: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """A line for each new flag, with the run's value."""
    found = []
    for word in map(normalize_flag, words):
        name = word[2:].partition("=")[0]
        known = name if name in flags else name.removeprefix("no")
        before = _flag(known, flags[known]) if known in flags else None
        if before != word:
            found.append(word if before is None else f"{word} instead of {before}")
    return found


def unknown(config: Mapping[str, Any]) -> list[str]:
    """A line for each flag that was given to the run and that this version does not have."""
    flags, origins = config["flags"], config.get("origins", {})
    gone = [
        name for name in flags if origins.get(name) in _GIVEN and name not in configuration.OPTIONS
    ]
    return [
        f"{_flag(name, flags[name])} does not exist in this version and is left out"
        for name in gone
    ]


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line, unless it only prints: training takes the place of this process."""
    parser = command_line.Parser(
        "resume",
        "Continues a run in its directory. Words after RUN are flags of training that win over the"
        " run's.",
    )
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help=command_line.RUN_HELP)
    parser.add_argument(
        "-np",
        type=command_line.positive_int,
        metavar="N",
        help="number of ranks (default: the run's)",
    )
    parser.add_argument(
        "-H", "--hosts", default="", metavar="HOST:SLOTS,...", help="hosts (default: the run's)"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the command, run nothing")
    own = {"--hosts", "--dry_run", "--help"}
    words: list[str] = []
    for word in map(normalize_flag, arguments):
        if words and _lacks_value(words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    flags = [word for word in words if word.startswith("--") and word.partition("=")[0] not in own]
    parsed = parser.parse_args([word for word in words if word not in flags])
    config = stored.read(parsed.run)
    following = command(parsed.run, config, flags, parsed.np, parsed.hosts)
    for line in (*changes(config["flags"], flags), *unknown(config)):
        command_line.print_escaped(f"changed: {line}", sys.stderr)
    command_line.print_escaped(
        shlex.join(["hybrid-imagenet", *following]), sys.stdout if parsed.dry_run else sys.stderr
    )
    if not parsed.dry_run:
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, "-m", "hybrid_imagenet", *following])
