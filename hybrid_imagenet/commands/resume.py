"""`hybrid-imagenet resume RUN [FLAG ...]`: continues a run with the flags in its config.json."""

from __future__ import annotations

import os
import pathlib
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.commands.doctor import host_facts
from hybrid_imagenet.commands.run import format_slots
from hybrid_imagenet.config import stored
from hybrid_imagenet.config.resumed_run import FLAGS_OF_ONE_START, SECRET_MASK
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import Origin, normalize_flag, parse_arguments, parse_value
from hybrid_imagenet.schedules.training_schedule import FIXED_SCHEDULES, FLAGS_IGNORED_BY_FIXED

# The origins of values that a person has set. All other values follow from these.
_USER_ORIGINS = (
    Origin.COMMAND_LINE.value,
    Origin.FLAGFILE.value,
    Origin.EARLIER_START.value,
)
_OWN_OPTIONS = ("--num_processes", "--num_proc", "--hosts", "--dry_run", "--help")
_EPILOG = """\
Examples:
Continue a run as it was started:
  hybrid-imagenet resume runs/NAME
Train it for more epochs, on four ranks:
  hybrid-imagenet resume runs/NAME -np 4 --epochs=20"""


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line. Unless it only prints, training replaces this process."""
    own_words, training_flags = _split_arguments(arguments)
    options = _parser().parse_args(own_words)
    command_line.check_run(options.run)
    if options.hosts is not None:
        # Only to raise the errors that `run` would raise.
        host_facts.parse_hosts(options.hosts)
    config = stored.read(options.run)
    command = resume_command(options.run, config, training_flags, options.np, options.hosts or "")
    changes = describe_changes(config["flags"], training_flags)
    for line in changes:
        command_line.print_escaped(f"changed: {line}", stream=sys.stderr)
    command_text = shlex.join(["hybrid-imagenet", *command])
    if options.dry_run:
        command_line.print_escaped(command_text, stream=sys.stdout)
        return
    command_line.print_escaped(command_text, stream=sys.stderr)
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hybrid_imagenet", *command])


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "resume",
        "Continues a run in its directory, from its latest valid checkpoint and with its flags, on"
        " as many ranks as before. Use it for a run that was stopped, killed or lost a host, or to"
        " train longer. Words after RUN are flags of training, which replace the run's flags.",
        epilog=_EPILOG,
    )
    parser.add_argument("run", metavar="RUN", type=pathlib.Path, help=command_line.RUN_HELP)
    parser.add_argument(
        "-np",
        "-n",
        "--num_processes",
        "--num_proc",
        dest="np",
        type=command_line.positive_int,
        metavar="N",
        help="number of ranks (default: as in the run)",
    )
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help="hosts with the number of ranks on each (default: as in the run)",
    )
    parser.add_argument("--dry_run", action="store_true", help="print the command and exit")
    return parser


def _split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the command line into the words of `resume` itself and flags of training.

    Flags of training are returned as --name=value, even if the value was a separate word.
    """
    words: list[str] = []
    for word in map(normalize_flag, arguments):
        if words and _needs_value(words[-1]):
            words[-1] += f"={word}"
        else:
            words.append(word)
    own_words = []
    training_flags = []
    for word in words:
        if word.startswith("--") and word.partition("=")[0] not in _OWN_OPTIONS:
            training_flags.append(word)
        else:
            own_words.append(word)
    return own_words, training_flags


def _needs_value(word: str) -> bool:
    """Returns whether a word is a flag of training whose value is the next word."""
    if word == "--flagfile":
        return True
    option = configuration.OPTIONS.get(word[2:])
    return word.startswith("--") and option is not None and option.kind.base is not bool


def resume_command(
    run: pathlib.Path,
    config: Mapping[str, Any],
    training_flags: Sequence[str],
    ranks: int | None = None,
    hosts: str = "",
) -> list[str]:
    """Returns the command that continues a run, without the program's name.

    Args:
      run: Its directory.
      config: Its config.json.
      training_flags: Flags that replace the run's.
      ranks: Number of ranks; None for the run's number.
      hosts: HOST:SLOTS,... of -H; if empty, the run's hosts are used if the number of ranks is
        still the same.

    Raises:
      UserError: For flags that cannot be used, --run_dir among them, or a flag whose value was not
        stored.
    """
    new_flags = _with_flagfiles(training_flags)
    replaced_names = _flag_names([*training_flags, *new_flags])
    if "run_dir" in replaced_names:
        raise UserError(
            "--run_dir cannot be changed, because RUN is the directory of the run. To continue"
            " elsewhere, copy the directory."
        )
    replaced_names |= _dropped_options(config["flags"], new_flags)
    kept_flags = _kept_flags(config, replaced_names)
    for flag in kept_flags:
        if SECRET_MASK in flag:
            raise UserError(
                f"{flag} cannot be used again, because passwords are not stored. Pass the flag"
                " again."
            )
    flags = [*kept_flags, *training_flags, f"--run_dir={run}", "--resume"]
    # Only to raise the errors that training would raise.
    configuration.resolve(flags)
    ranks_before = int(config.get("world_size", 1))
    hosts_before = config.get("hosts") or []
    if ranks in (None, ranks_before) and not hosts and len(set(hosts_before)) > 1:
        hosts = format_slots(Counter(hosts_before))
    if (ranks or ranks_before) == 1 and not hosts:
        return ["train", *flags]
    command = ["run"]
    if ranks is None and not hosts:
        ranks = ranks_before
    if ranks is not None:
        command += ["-np", str(ranks)]
    if hosts:
        command += ["-H", hosts]
    return [*command, "--", *flags]


def _with_flagfiles(training_flags: Sequence[str]) -> list[str]:
    """Returns the flags of flag files, then those of the command line, which replace them."""
    from_files, from_command = configuration.split_flagfiles(training_flags)
    return [*from_files, *from_command]


def _dropped_options(flags: Mapping[str, Any], new_flags: Sequence[str]) -> set[str]:
    """Returns the options of an optimizer, schedule or all-reduce that the new one does not have.

    Args:
      flags: Flags of the run, by name.
      new_flags: Flags that replace the run's.
    """
    texts = parse_arguments(new_flags, configuration.OPTIONS)
    dropped: set[str] = set()
    for flag, options in configuration.CHOICES.items():
        if flag in texts:
            old_options = options.get(str(flags.get(flag)), {})
            new_options = options.get(texts[flag], {})
            dropped |= old_options.keys() - new_options.keys()
    return dropped


def _flag_names(training_flags: Sequence[str]) -> set[str]:
    """Returns the names of flags; for --noNAME and --no_NAME, NAME too."""
    names = {normalize_flag(flag)[2:].partition("=")[0] for flag in training_flags}
    return names | {name.removeprefix("no").removeprefix("_") for name in names}


def _kept_flags(config: Mapping[str, Any], replaced_names: set[str]) -> list[str]:
    """Returns the flags of a run that still apply, without those that are replaced."""
    flags = config["flags"]
    origins = config["origins"]
    ignored_names = {*FLAGS_OF_ONE_START, *replaced_names}
    if flags.get("lr_schedule") in FIXED_SCHEDULES:
        # A flag file for several recipes may set values that a published schedule does not use.
        ignored_names.update(FLAGS_IGNORED_BY_FIXED)
    if float(flags.get("warmup_epochs") or 0) > float(flags.get("epochs") or 0):
        # A short trial of a flag file may end during the warmup, but two such flags on the command
        # line are rejected. --resume keeps the warmup of the run without the flag, too.
        ignored_names.add("warmup_epochs")
    kept_flags = []
    for name, value in flags.items():
        is_set_by_user = origins.get(name) in _USER_ORIGINS
        if value is None and name in configuration.PATH_FLAGS:
            # A flag file may have it without a value, the command line may not.
            continue
        if is_set_by_user and name in configuration.OPTIONS and name not in ignored_names:
            kept_flags.append(_format_flag(name, value))
    if not {"recipe", "flagfile"} & replaced_names and origins.get("recipe") not in _USER_ORIGINS:
        # Ranks on other hosts may not see the directory of the run, which stores its recipe.
        recipe = flags.get("recipe")
        dataset = str(flags.get("dataset"))
        if recipe and recipe != datasets.source_type(dataset).default_recipe:
            kept_flags.append(_format_flag("recipe", recipe))
    return kept_flags


def _format_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no{name}"
    if isinstance(value, (list, tuple)):
        return f"--{name}={','.join(map(str, value))}"
    if value is None:
        return f"--{name}="
    return f"--{name}={value}"


def describe_changes(flags: Mapping[str, Any], training_flags: Sequence[str]) -> list[str]:
    """Returns a line for each flag that differs from the run's, with the run's value.

    Args:
      flags: Flags of the run, by name.
      training_flags: The new flags, as --name=value; they must be valid.
    """
    lines = [flag for flag in training_flags if flag.startswith("--flagfile")]
    for flag in _with_flagfiles(training_flags):
        texts = parse_arguments([flag], configuration.OPTIONS)
        for name, text in texts.items():
            # The values are compared, because one value can be written in several ways.
            value = parse_value(name, text, configuration.OPTIONS[name])
            new_flag = _format_flag(name, value)
            if name not in flags:
                lines.append(new_flag)
                continue
            old_flag = _format_flag(name, flags[name])
            if new_flag != old_flag:
                lines.append(f"{new_flag} instead of {old_flag}")
    return lines
