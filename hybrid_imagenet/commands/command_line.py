"""Provides what all commands share: parsing arguments, reporting errors, starting TensorFlow."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import pathlib
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from hybrid_imagenet import comm, files
from hybrid_imagenet.cluster import out_of_memory
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.config.help import filled, width
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_STALLED,
    EXIT_USAGE,
    SharedError,
    UserError,
    did_you_mean,
    missing_module_message,
    printable,
)
from hybrid_imagenet.models import keras_families
from hybrid_imagenet.options import SPELLING, normalize_flag
from hybrid_imagenet.resilience import interrupts
from hybrid_imagenet.schedules.batch_schedule import MAX_PIXELS

if TYPE_CHECKING:
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
    from hybrid_imagenet.checkpoints.store import CheckpointDescription

RUN_HELP = "the directory of a run"

# How argparse's message about missing words begins.
_MISSING = "the following arguments are required: "


def command(function: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int]:
    """Turns a function of the arguments into a command that returns an exit code.

    Example:
      @command_line.command
      def main(arguments: Sequence[str]) -> None:
          ...
    """
    return functools.partial(run_command, function)


def run_command(function: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Runs a command and prints its error, if it raises one.

    Rank 0 alone prints an error that all ranks share.

    Args:
      function: Does the work; returns an exit code, or None for success.
      arguments: The words of the command line after the command's name.

    Returns:
      The exit code (see `hybrid_imagenet.errors`). One of several ranks does not return after an
      error, but ends at once.
    """
    # Messages of the package are logged here, unless a command has its own handler for them.
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_EscapingFormatter())
    exit_code = 0
    try:
        exit_code = function(arguments) or 0
    except UserError as error:
        exit_code = error.exit_code
        print_user_error(error)
    except Exception as error:
        if interrupts.was_interrupted():
            raise KeyboardInterrupt from None
        exit_code = _print_exception(error)
    if exit_code and _placement().size > 1:
        _exit_immediately(exit_code)
    return exit_code


class _EscapingFormatter(logging.Formatter):
    """Formats a log message as one line, as `print_escaped` does."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def print_user_error(error: UserError) -> None:
    """Prints an error as one line; one that all ranks share, on rank 0 only."""
    rank = _placement().rank
    if rank > 0 and isinstance(error, SharedError):
        return
    prefix = f"rank {rank}: " if rank else ""
    print(f"error: {prefix}{error}", file=sys.stderr)


def _print_exception(error: Exception) -> int:
    """Prints one line about an error with a known cause, else the traceback; returns the code."""
    if out_of_memory.is_out_of_memory(error):
        shared_error = out_of_memory.user_error(error, "Use a smaller batch.")
        print(f"error: {shared_error}", file=sys.stderr)
        return shared_error.exit_code
    if lost_rank.is_lost_rank_error(error):
        print(UserError(lost_rank.lost_rank_message(error)), file=sys.stderr)
        return EXIT_STALLED
    if isinstance(error, ModuleNotFoundError) and error.name == "tensorflow":
        print(missing_module_message(error), file=sys.stderr)
        return EXIT_USAGE
    print_escaped(*traceback.format_exc().splitlines(), stream=sys.stderr)
    return EXIT_FAILURE


def _exit_immediately(exit_code: int) -> NoReturn:
    """Ends this rank without cleanup, which would wait in a collective for the other ranks."""
    # If standard output cannot be written, the exit code still says that this rank has failed.
    with contextlib.suppress(UserError):
        sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _placement() -> Placement:
    """Returns this process's rank and size; rank 0 of 1 if its launcher is not supported."""
    try:
        return comm.read_placement()
    except UserError:
        return Placement()


def start_single_process(command_name: str) -> None:
    """Starts TensorFlow for a command that runs in one process.

    Raises:
      UserError: If a launcher has started several ranks.
    """
    ranks = comm.read_placement().size
    if ranks > 1:
        raise UserError(
            f"{ranks} ranks were started, but {command_name} runs in a single process. Start it"
            " without a launcher."
        )
    comm.start()


def print_escaped(*lines: str, stream: TextIO | None = None) -> None:
    """Prints lines with control characters escaped.

    Use it for text that may quote the name of a file, host, class or run. Such a name cannot act on
    a terminal then, and a newline in it cannot begin another line.

    Args:
      *lines: The lines.
      stream: Stream to print to; None for standard output.
    """
    print("\n".join(map(printable, lines)), file=stream, flush=stream is not None)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Adds --json=FILE, see `write_json`."""
    parser.add_argument(
        "--json", type=_json_file, metavar="FILE", help="file to write the results to, as JSON"
    )


def _json_file(text: str) -> str:
    """Rejects a directory before anything is measured."""
    if pathlib.Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a directory. Use the name of a file.")
    return text


def parse_names(flag: str, text: str, choices: Iterable[str]) -> list[str]:
    """Returns the names of a comma-separated list.

    Args:
      flag: Name of the option, for the error.
      text: Its value; empty words are skipped.
      choices: The allowed names.

    Raises:
      UserError: For another name.
    """
    allowed = list(choices)
    names = [word.strip() for word in text.split(",") if word.strip()]
    for name in names:
        if name not in allowed:
            raise UserError(
                f"{flag}={text} is not valid, because there is no {name}"
                f"{did_you_mean(name, allowed)}. Choose from {', '.join(allowed)}."
            )
    return names


def write_json(path: str | None, values: object, flag: str = "--json") -> None:
    """Writes measurements to the file that a flag names; does nothing without the flag.

    Args:
      path: The flag's value, or None if it was not set.
      values: JSON-ready.
      flag: The flag's name, for errors.

    Raises:
      UserError: If the file cannot be written.
    """
    if not path:
        return
    target = files.output_path(flag, path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise UserError(
            f"{flag}={path} cannot be written ({error.strerror}). Choose another path."
        ) from None


def check_run(directory: pathlib.Path) -> None:
    """Raises UserError if a directory is not the directory of a run."""
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory. Pass the directory of a run.")
    if os.path.lexists(directory / "config.json"):
        return
    if any(directory.glob("*/config.json")):
        remedy = f"List the runs in it with hybrid-imagenet runs {directory}"
    else:
        remedy = "Pass the directory of a run"
    raise UserError(f"{directory} is not a run, because it has no config.json. {remedy}.")


def add_network_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds RUN, which names a trained network, and the options of `load_network`."""
    parser.add_argument(
        "checkpoint",
        metavar="RUN",
        type=pathlib.Path,
        help=(
            "the directory of a run, whose latest valid checkpoint is used. A checkpoint"
            " (step-*.npz) or torchvision weights (.safetensors, .pth) are accepted too"
        ),
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "ema", "trained"),
        default="auto",
        help=(
            "which weights of the checkpoint to use: ema (averaged, see --ema_decay), trained"
            " (those of the last step), or auto: ema if the checkpoint has them"
            " (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="use the checkpoint with the best validation top-1 instead of the latest",
    )
    parser.add_argument(
        "--image_size",
        type=positive_int_up_to(MAX_PIXELS),
        metavar="PIXELS",
        help=(
            "height and width of the network's input (default: as in training; 224 for"
            " torchvision weights)"
        ),
    )
    parser.add_argument(
        "--model",
        metavar="MODULE:FUNCTION",
        help=(
            "your function that builds the network, as in training. It is imported only if you"
            " name it here, because a checkpoint could name any code"
        ),
    )


def find_checkpoint(arguments: argparse.Namespace) -> CheckpointDescription:
    """Finds the checkpoint that `load_network` reads, before TensorFlow is loaded.

    Raises:
      UserError: If there is none, or --model does not name its network.
    """
    from hybrid_imagenet.checkpoints import store

    description = store.find_checkpoint(arguments.checkpoint)
    # Files of other libraries do not name their network before they are loaded.
    if "model" in description.meta:
        _check_model(arguments.model, str(description.meta["model"]), description.path)
    return description


def _check_model(named_model: str | None, model: str, origin: object) -> None:
    """Checks that the user has named the function of a network, which will be imported and run.

    Args:
      named_model: --model, or None if it was not set.
      model: The network that the checkpoint names.
      origin: The checkpoint.

    Raises:
      UserError: If --model is another network, or is not set for a function.
    """
    if named_model is None and keras_families.is_user_function(model):
        raise UserError(
            f"{origin} needs the function {model}, which would run code. If you trust it, add"
            f" {shlex.quote(f'--model={model}')}."
        )
    if named_model not in (None, model):
        raise UserError(
            f"--model={named_model} is not the network of {origin}, which was trained with"
            f" --model={model}. Pass another checkpoint, or correct --model."
        )


def load_network(arguments: argparse.Namespace) -> TrainedNetwork:
    """Loads the network that the arguments of `add_network_arguments` describe.

    Raises:
      UserError: If it cannot be loaded, or --model does not name its network.
    """
    from hybrid_imagenet.checkpoints import pretrained

    network = pretrained.load(
        arguments.checkpoint, _print_warning, weights=arguments.weights, best=arguments.best
    )
    _check_model(arguments.model, network.model, network.origin)
    if arguments.image_size:
        return dataclasses.replace(network, image_size=arguments.image_size)
    return network


def _print_warning(message: str) -> None:
    print_escaped(f"warning: {message}", stream=sys.stderr)


def _number_type(
    number_class: type, is_valid: Callable[[Any], bool], requirement: str
) -> Callable[[str], Any]:
    """Returns an argparse type that reads a number and checks it.

    Args:
      number_class: `int` or `float`.
      is_valid: Whether a number is accepted; must be false for NaN.
      requirement: What a valid value is, for the error, such as "a number above 0".
    """

    def parse(text: str) -> Any:
        try:
            value = number_class(text)
        except ValueError:
            value = math.nan
        if not is_valid(value):
            raise argparse.ArgumentTypeError(f"{text} is not valid. Use {requirement}.")
        return value

    return parse


whole_number = _number_type(int, lambda value: value == value, "a whole number")
number = _number_type(float, lambda value: value == value, "a number")
non_negative_int = _number_type(int, lambda value: value >= 0, "a whole number of at least 0")
positive_int = _number_type(int, lambda value: value >= 1, "a whole number of at least 1")
positive_float = _number_type(float, lambda value: 0 < value < math.inf, "a number above 0")
fraction = _number_type(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def positive_int_up_to(maximum: int) -> Callable[[str], Any]:
    """Returns an argparse type for whole numbers from 1 to a maximum."""
    return _number_type(
        int, lambda value: 1 <= value <= maximum, f"a whole number from 1 to {maximum}"
    )


_NUMBER_TYPES = (
    whole_number,
    number,
    non_negative_int,
    positive_int,
    positive_float,
    fraction,
)


class Parser(argparse.ArgumentParser):
    """Parses the arguments of a command, and reports a mistake in one line.

    Unlike argparse, it accepts --flag-name for --flag_name, suggests the nearest name for a
    mistyped one, and does not accept abbreviations.
    """

    def __init__(self, command_name: str = "", description: str | None = None, **options: Any):
        options.setdefault("prog", f"hybrid-imagenet {command_name}")
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=_HelpFormatter,
            exit_on_error=False,
            **options,
        )
        self._positionals.title = "arguments"

    def error(self, message: str) -> NoReturn:
        """Raises a SharedError, because all ranks read the same command line: one prints it.

        Args:
          message: Message of argparse, or of this class. What argparse says about missing words is
            rewritten.
        """
        if message.startswith(_MISSING):
            message = self._missing_message(message.removeprefix(_MISSING).split(", "))
        if not message.endswith((".", "?)")):
            message += "."
        raise SharedError(f"{message.removesuffix('.')}. See {self.prog} --help.")

    def _missing_message(self, names: Sequence[str]) -> str:
        """Returns which required words are missing, and what they may be.

        Args:
          names: Names of arguments, as argparse writes them: metavars, and options as -H/--hosts.
        """
        words = []
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                if action.dest in names or action.metavar in names:
                    commands = ", ".join(action.choices)
                    return f"{action.metavar} is missing. Choose one of {commands}."
            elif not action.option_strings:
                if (action.metavar or action.dest) in names:
                    words.append(str(action.metavar or action.dest.upper()))
            elif "/".join(action.option_strings) in names:
                words.append(_with_value(action, action.option_strings[-1]))
        if len(words) == 1:
            return f"{words[0]} is missing."
        return f"{', '.join(words[:-1])} and {words[-1]} are missing."

    def format_help(self) -> str:
        """Returns argparse's help, and how option names may be spelled."""
        return f"{super().format_help()}\n{filled(SPELLING, width())}\n"

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses all words (overrides argparse, whose error for superfluous words differs)."""
        options, superfluous = self.parse_known_args(args, namespace)
        if superfluous:
            self.error(f"Unexpected argument: {' '.join(superfluous)}")
        return options

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does, with dashes in option names replaced by underscores.

        Words after `--` stay as they are.
        """
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        options = [normalize_flag(word) for word in words[:end]]
        option_names = self._option_names()
        for option in options:
            name = option.partition("=")[0]
            if name.startswith("--") and name not in option_names:
                self.error(f"There is no option {name}{did_you_mean(name, option_names)}")
        try:
            return super().parse_known_args([*options, *words[end:]], namespace)
        except argparse.ArgumentError as error:
            self.error(error.message)

    def _option_names(self) -> set[str]:
        """Returns the option names of this parser and of its subcommands."""
        names = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for subcommand in action.choices.values():
                    names |= subcommand._option_names()
        return names

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raises ArgumentError if the value is not one of the choices (overrides argparse)."""
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        suggestion = did_you_mean(str(value), choices)
        if isinstance(action, argparse._SubParsersAction):
            problem = f"There is no command {self.prog} {value}{suggestion}"
        else:
            problem = f"{_with_text(action, value)} is not valid{suggestion}"
        raise argparse.ArgumentError(None, f"{problem}. Choose one of {', '.join(choices)}.")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Converts the text of a value (overrides argparse, whose error lacks the text)."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            # The message of a type of this module begins with the text of the value.
            reason = error.message.removeprefix(arg_string)
            separator = "" if reason != error.message else ": "
            message = f"{_with_text(action, arg_string)}{separator}{reason}"
            raise argparse.ArgumentError(None, message) from None

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        """Returns how many words belong to an argument (overrides argparse for its error)."""
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if not action.option_strings:
                raise
            name = action.option_strings[0]
            if name.startswith("--"):
                written = _with_value(action, name)
            else:
                written = f"{name} {_HelpFormatter.value_placeholder(action)}"
            problem = "has no value"
            if isinstance(action.nargs, int):
                problem = f"needs {action.nargs} values"
            raise argparse.ArgumentError(None, f"{name} {problem}. Write {written}.") from None


def _with_text(action: argparse.Action, text: object) -> str:
    """Returns an argument with its value, as a user writes it: -np 2, --top=3, IMAGE."""
    if not action.option_strings:
        return f"{action.metavar or action.dest} {text}"
    name = action.option_strings[0]
    return f"{name}={text}" if name.startswith("--") else f"{name} {text}"


def _with_value(action: argparse.Action, name: str) -> str:
    """Returns an option with placeholders of its values: --to=FILE, --diff RUN RUN."""
    placeholder = _HelpFormatter.value_placeholder(action)
    if isinstance(action.nargs, int) and action.nargs > 1:
        return " ".join([name, *[placeholder] * action.nargs])
    return f"{name}={placeholder}"


class _HelpFormatter(argparse.HelpFormatter):
    """Prints help in the layout of `hybrid-imagenet train --help`.

    An option is on a line by itself as --name=VALUE, with its text on the lines below.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wraps each line by itself, so that an epilog can contain a list.

        Indented lines are examples to copy, and stay unbroken.
        """
        lines = []
        for line in text.splitlines():
            lines.append(line if line.startswith(" ") else filled(line, width, indent))
        return "\n".join(lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return filled(" ".join(text.split()), width).splitlines()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return names if action.nargs == 0 else _with_value(action, names)

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        if usage is None:
            words = [self._prog]
            for action in actions:
                if not action.option_strings:
                    words.append(self.positional_usage(action))
            for action in actions:
                if action.option_strings and action.required:
                    words.append(_with_value(action, action.option_strings[-1]))
            # argparse passes an empty prefix when it builds the program name of subcommands. That
            # name must not contain the options.
            if prefix is None:
                words.append("[--name=value ...]")
            usage = " ".join(words)
        return super()._format_usage(usage, actions, groups, prefix)

    @staticmethod
    def value_placeholder(action: argparse.Action) -> str:
        if action.metavar:
            return str(action.metavar)
        if action.choices:
            return "|".join(str(choice) for choice in action.choices)
        return "N" if action.type in _NUMBER_TYPES else action.dest.upper()

    @staticmethod
    def positional_usage(action: argparse.Action) -> str:
        name = str(action.metavar or ("COMMAND" if action.choices else action.dest.upper()))
        if action.nargs == "+":
            return f"{name} [{name} ...]"
        if action.nargs == "*":
            return f"[{name} ...]"
        if action.nargs == "?":
            return f"[{name}]"
        return name
