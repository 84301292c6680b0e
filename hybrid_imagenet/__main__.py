"""Runs one command: `python -m hybrid_imagenet COMMAND [arguments]`.

It is also installed as `hybrid-imagenet COMMAND`.
"""

from __future__ import annotations

import importlib
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence

from hybrid_imagenet import __version__, recipes
from hybrid_imagenet.errors import (
    EXIT_OK,
    EXIT_USAGE,
    did_you_mean,
    missing_module_message,
    printable,
)
from hybrid_imagenet.options import SPELLING, normalize_flag
from hybrid_imagenet.resilience import interrupts, lossy_stream

# With a flag that begins like this, a training command prints something and does not train.
_PRINTING_FLAGS = ("-h", "--help", "--print_config", "--check_only", "--dry_run")

# Commands that train. Signals ask them to save and stop.
_TRAINING_COMMANDS = ("train", "run", "demo")

# Commands that may import the function of --model=MODULE:FUNCTION without that flag: flag files and
# config.json may have it.
_COMMANDS_OF_USER_FUNCTIONS = ("train", "run", "resume")

# By command: MODULE or MODULE:FUNCTION, and one line for the list of commands. The function, by
# default `main`, takes the arguments and returns the exit code.
COMMANDS = {
    "demo": (
        "hybrid_imagenet.demo",
        "train handwritten digits on this machine, in less than a minute",
    ),
    "train": ("hybrid_imagenet.main", "train in this process, or as one rank of a job"),
    "run": (
        "hybrid_imagenet.commands.run",
        "start training, or a script, on several ranks and hosts",
    ),
    "resume": (
        "hybrid_imagenet.commands.resume",
        "continue a run with its own flags, or with others",
    ),
    "runs": (
        "hybrid_imagenet.commands.runs",
        "list runs with their state and results; compare the flags of two",
    ),
    "status": (
        "hybrid_imagenet.commands.runs:status",
        "the state of a run, and how to continue or stop it",
    ),
    "stop": ("hybrid_imagenet.commands.runs:stop", "ask a run to save and stop"),
    "evaluate": (
        "hybrid_imagenet.commands.evaluate",
        "loss, top-1 and top-5 of a trained network on a dataset",
    ),
    "predict": ("hybrid_imagenet.commands.predict", "the most probable classes of images"),
    "export": ("hybrid_imagenet.commands.export", "convert a network: ONNX, Keras, SavedModel"),
    "recipes": (
        "hybrid_imagenet.commands.recipes_command",
        "list the published methods that --recipe of train chooses",
    ),
    "data": ("hybrid_imagenet.commands.data.data_command", "prepare or check a dataset"),
    "doctor": ("hybrid_imagenet.commands.doctor.doctor_command", "check hosts before a run"),
    "env": ("hybrid_imagenet.commands.env", "print versions and settings for a bug report"),
    "plan": (
        "hybrid_imagenet.planner.plan_command",
        "predict step time and training time on a cluster",
    ),
    "report": (
        "hybrid_imagenet.commands.report.report_command",
        "write a page with charts on one or several runs",
    ),
    "bench": (
        "hybrid_imagenet.benchmarks.__main__",
        "measure a GPU, input, all-reduce and scaling",
    ),
}


def usage() -> str:
    """Returns the list of commands, wrapped to the width of the terminal."""
    columns = shutil.get_terminal_size().columns
    indent = " " * (max(map(len, COMMANDS)) + 4)
    lines = [
        "usage: hybrid-imagenet COMMAND [arguments]",
        "   or: python -m hybrid_imagenet COMMAND [arguments]",
        "",
    ]
    for name, (_, description) in COMMANDS.items():
        lines += textwrap.wrap(
            description,
            columns,
            initial_indent=f"  {name}".ljust(len(indent)),
            subsequent_indent=indent,
        )
    lines.append("")
    for sentence in (
        "hybrid-imagenet COMMAND --help describes the arguments of a command.",
        SPELLING,
    ):
        lines += textwrap.wrap(sentence, columns)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names.

    Args:
      arguments: The words after the program's name; None runs the command line of this process
        (`run_process`).

    Returns:
      The exit code (see `hybrid_imagenet.errors`).
    """
    if arguments is None:
        return run_process(sys.argv[1:])
    words = list(arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return EXIT_OK if words else EXIT_USAGE
    if words[0] == "--version":
        print(__version__)
        return EXIT_OK
    name, *rest = words
    if name not in COMMANDS:
        suggestion = did_you_mean(name, COMMANDS)
        print(
            f"error: There is no command {printable(name)}{suggestion}. Choose one of"
            f" {', '.join(COMMANDS)}.",
            file=sys.stderr,
        )
        return EXIT_USAGE
    module_name, _, function_name = COMMANDS[name][0].partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        print(missing_module_message(error), file=sys.stderr)
        return EXIT_USAGE
    function = getattr(module, function_name or "main")
    return int(function(rest) or 0)


def run_process(words: Sequence[str]) -> int:
    """Runs a command as this process, and returns its exit code.

    Signal handlers and output streams are set up first, because imports take seconds.

    Args:
      words: The words after the program's name.
    """
    if _may_use_current_directory(words):
        sys.path.append("")
    if not words or words[0] not in _TRAINING_COMMANDS:
        lossy_stream.install()
        return interrupts.run_interruptible(lambda: _main_with_complete_output(words))
    # Block signals until REQUESTS handles them, also while the program restarts itself.
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    from hybrid_imagenet.cluster.environment import restart_with_huge_pages
    from hybrid_imagenet.resilience.stop_signals import REQUESTS
    from hybrid_imagenet.startup import record_command_start

    record_command_start()
    if words[0] == "train":
        restart_with_huge_pages()
    # A run writes its results to files, so it must not end because its output cannot be stored.
    lossy_stream.install(ignore_write_errors=not _only_prints(words[1:]))
    REQUESTS.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    code = _main_with_complete_output(words)
    REQUESTS.ignore()
    return code


def _may_use_current_directory(words: Sequence[str]) -> bool:
    """Returns whether modules in the current directory may be imported.

    The module of --model=MODULE:FUNCTION may be there. Other commands must not import from it,
    because it may contain files of someone else.
    """
    if words and words[0] in _COMMANDS_OF_USER_FUNCTIONS:
        return True
    return any(normalize_flag(word).partition("=")[0] == "--model" for word in words)


def _only_prints(arguments: Sequence[str]) -> bool:
    """Returns whether a training command with these arguments prints something and ends."""
    for word in arguments:
        if not word.startswith("-") and word.endswith(".py"):
            # The words after a script are its own.
            return False
        if normalize_flag(word).startswith(_PRINTING_FLAGS):
            return True
    return recipes.is_list_requested(arguments)


def _main_with_complete_output(words: Sequence[str]) -> int:
    """Runs a command, writes all of its output, and returns its exit code.

    If standard output cannot be written, it prints an error and returns exit code 2.
    """
    try:
        code = main(words)
        sys.stdout.flush()
    except lossy_stream.OutputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return code


if __name__ == "__main__":
    sys.exit(run_process(sys.argv[1:]))
