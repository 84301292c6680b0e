"""Parses arguments, reports errors and starts TensorFlow for the programs that use a trained
network.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from hybrid_imagenet import comm, files
from hybrid_imagenet.comm import lost_rank, out_of_memory
from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.config.help import filled, width
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_STALLED,
    EXIT_USAGE,
    SharedError,
    UserError,
    did_you_mean,
    printable_lines,
    without_environment,
)
from hybrid_imagenet.options import SPELLING, underscored
from hybrid_imagenet.resilience import interrupts

if TYPE_CHECKING:
    from hybrid_imagenet.checkpoints.pretrained import Trained


class _Layout(argparse.HelpFormatter):
    """Prints options as the training program's --help does: --name=FORM, and its text on the lines
    below.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=6, width=width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fills each line by itself, so that an epilog can hold a list; an indented one, an
        example, stays whole.
        """
        lines = text.splitlines()
        return "\n".join(
            line if line.startswith(" ") else filled(line, width, indent) for line in lines
        )

    def _split_lines(self, text: str, width: int) -> list[str]:
        return filled(" ".join(text.split()), width).splitlines()

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        if isinstance(action.nargs, int) and action.nargs > 1:
            return " ".join([names, *[self._form(action)] * action.nargs])
        return names if action.nargs == 0 else f"{names}={self._form(action)}"

    def _form(self, action: argparse.Action) -> str:
        if action.choices:
            return "|".join(map(str, action.choices))
        return str(action.metavar or action.dest.upper())

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        if usage is None:
            words = [
                f"{a.option_strings[-1]}={self._form(a)}"
                for a in actions
                if a.option_strings and a.required
            ]
            words += [self._words(a) for a in actions if not a.option_strings]
            # The prefix is empty where argparse asks for the first words of a command's
            # subcommands.
            usage = " ".join(
                [self._prog, *words, *(["[--name=value ...]"] if prefix is None else [])]
            )
        return super()._format_usage(usage, actions, groups, prefix)

    @staticmethod
    def _words(action: argparse.Action) -> str:
        name = str(action.metavar or ("COMMAND" if action.choices else action.dest.upper()))
        return {"+": f"{name} [{name} ...]", "*": f"[{name} ...]", "?": f"[{name}]"}.get(
            str(action.nargs), name
        )


class Parser(argparse.ArgumentParser):
    """A parser that reports a mistake in one line, with the nearest name, and takes --flag-name for
    --flag_name.
    """

    def __init__(self, program: str = "", description: str | None = None, **more: Any) -> None:
        more.setdefault("prog", f"hybrid-imagenet {program}")
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=_Layout, **more
        )

    def error(self, message: str) -> NoReturn:
        """Raises SharedError: every rank reads the same command line, and one says what is wrong
        with it.
        """
        raise SharedError(f"{message}; see --help")

    def format_help(self) -> str:
        """Returns the help of argparse, and how names of options may be spelled."""
        return f"{super().format_help()}\n{filled(SPELLING, width())}\n"

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, with underscores for dashes inside of the names of options; nothing is
        changed after `--`.
        """
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        own, known = [*map(underscored, words[:end])], self._options()
        for name in (word.partition("=")[0] for word in own):
            if name.startswith("--") and name not in known:
                self.error(f"{name}: no such option{did_you_mean(name, known)}")
        return super().parse_known_args([*own, *words[end:]], namespace)

    def _options(self) -> set[str]:
        """The options of this parser and of its subcommands."""
        commands = [
            action.choices
            for action in self._actions
            if isinstance(action, argparse._SubParsersAction)
        ]
        below = [parser._options() for choices in commands for parser in choices.values()]
        return set(self._option_string_actions).union(*below)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuses a value that is none of the choices."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = did_you_mean(str(value), known)
            raise argparse.ArgumentError(action, f"{value}: choose one of {', '.join(known)}{near}")


RUN_HELP = "the directory of a run"


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds the argument that names a network, RUN as in all commands, and what may be said about
    it.
    """
    parser.add_argument(
        "checkpoint",
        metavar="RUN",
        type=pathlib.Path,
        help=(
            "the directory of a run, of which the latest valid checkpoint is taken. A checkpoint"
            " (step-*.npz) or weights of torchvision (.safetensors, .pth) are accepted too"
        ),
    )
    parser.add_argument(
        "--weights",
        choices=("auto", "ema", "trained"),
        default="auto",
        help=(
            "which weights of a checkpoint: ema (averaged, --ema_decay), trained (of the last"
            " step), or auto: ema if there are any"
        ),
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="take the checkpoint with the best validation top-1, not the latest",
    )
    parser.add_argument(
        "--image_size",
        type=positive,
        metavar="PIXELS",
        help="default: as trained; foreign weights: 224",
    )


def load_network(arguments: argparse.Namespace) -> Trained:
    """Reads the network that the arguments of `add_network` describe; raises UserError."""
    from hybrid_imagenet.checkpoints import pretrained

    network = pretrained.load(
        arguments.checkpoint, _warn, weights=arguments.weights, best=arguments.best
    )
    return (
        dataclasses.replace(network, image_size=arguments.image_size)
        if arguments.image_size
        else network
    )


def _number(kind: type, holds: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """A type of arguments: a number for which `holds` is true, which the message calls `what`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text}: give {what}")
        return value

    return read


whole = _number(int, lambda value: value >= 0, "a whole number of at least 0")
positive = _number(int, lambda value: value >= 1, "a whole number of at least 1")
above_zero = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
fraction = _number(float, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def write_json(path: str | None, values: object, flag: str = "--json") -> None:
    """Writes what was measured to the file of a flag, if that is given; raises UserError if it
    cannot.
    """
    if path:
        target = files.output(flag, path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(values, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise UserError(f"{flag}={path}: cannot be written ({error.strerror})") from None


def start_alone(program: str) -> None:
    """Starts TensorFlow in a program that works on one process; raises UserError under a
    launcher.
    """
    ranks = comm.placement().size
    if ranks > 1:
        raise UserError(
            f"{ranks} ranks were started, but {program} works alone: start it without a launcher"
        )
    comm.start()


def run(program: Callable[[Sequence[str]], int | None], arguments: Sequence[str]) -> int:
    """Runs a program; returns its exit code (see `errors`) and prints its error, a shared one on
    rank 0 alone.

    One of several ranks ends at once on an error: it must not wait in a collective of the others.
    """
    code = 0
    try:
        code = program(arguments) or 0
    except UserError as error:
        code = error.exit_code
        rank = _place().rank
        if rank == 0 or not isinstance(error, SharedError):
            print(f"error: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
    except Exception as error:
        if interrupts.interrupted():
            raise KeyboardInterrupt from None
        if out_of_memory.is_out_of_memory(error):
            shortage = out_of_memory.shared_error(error, "Use a smaller batch.")
            code = shortage.exit_code
            print(f"error: {shortage}", file=sys.stderr)
        elif lost_rank.is_loss(error):
            code = EXIT_STALLED
            print(UserError(lost_rank.described(error)), file=sys.stderr)
        elif isinstance(error, ModuleNotFoundError) and error.name == "tensorflow":
            code = EXIT_USAGE
            print(without_environment(error), file=sys.stderr)
        else:
            code = EXIT_FAILURE
            show(traceback.format_exc(), sys.stderr)
    if code and _place().size > 1:
        with contextlib.suppress(
            UserError
        ):  # standard output takes no more: the code says that this rank has failed
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _place() -> Placement:
    """Returns the place of this process among the ranks; rank 0 of 1 if its launcher is not
    supported.
    """
    try:
        return comm.placement()
    except UserError:
        return Placement()


def program(work: Callable[[Sequence[str]], int | None]) -> Callable[[Sequence[str]], int]:
    """Makes a command, which returns its exit code (`run`), of what it does with its arguments."""
    return functools.partial(run, work)


def show(text: str, stream: TextIO | None = None) -> None:
    """Prints lines that may quote the names of files, hosts, classes or runs, without what would
    act on a terminal.

    Args:
      text: one line or several.
      stream: standard output if None.
    """
    print(printable_lines(text), file=stream, flush=stream is not None)


def _warn(message: str) -> None:
    show(f"warning: {message}", sys.stderr)
