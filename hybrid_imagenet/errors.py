"""Errors that are meant for the user, and the exit codes of the program."""

import difflib
import importlib
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

EXIT_OK = 0
# An unexpected error, printed with a traceback.
EXIT_FAILURE = 1
# A flag, a path or a dataset cannot be used.
EXIT_USAGE = 2
# Too many steps were skipped, or training diverged.
EXIT_NUMERICS = 3
# A rank hung for --stall_timeout or was lost, or storage hung for --storage_timeout.
EXIT_STALLED = 4
# A signal stopped the run, which can continue.
EXIT_PREEMPTED = 75
# Ctrl-C stopped a command, or training before it saved for the first time.
EXIT_INTERRUPTED = 130

# How to continue a script of the user, which has no flag --resume.
RESTART_SCRIPT = "start the same command again"

# The last sentence about a run that an earlier version has saved.
LOAD_WEIGHTS_WITH_NUMPY = (
    "Train again, or load the weights: numpy.load(CHECKPOINT) has them as array/model/*"
)

# A longer message keeps its beginning and its end, because the end often names the cause.
_MAX_MESSAGE_CHARACTERS = 2000
_KEPT_END_CHARACTERS = 500
# Matches the name and the password in a URL, up to the last @ before the path. A password may
# contain an @. It may also contain a slash, if there is a colon before the slash and no port number
# after the colon. The second slash after the scheme is optional, because pathlib.Path removes it
# from a URL.
_PASSWORD = re.compile(r"(:/{1,2})(?:[^/\s]*@|(?:(?<=s3://)|(?![^/\s@]*:\d*/))[^/\s@:\[]+:\S*@)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_TOKEN = re.compile(
    r"(?i)([?&;][^=&\s]*(?:token|key|secret|sig|password|credential)[^=&\s]*=)[^&\s]+?(?=[&\s]|: |$)"  # noqa: E501
)


class UserError(Exception):
    """A mistake that the user can correct.

    The functions and callbacks of this package raise it for invalid arguments, data and
    environments, such as a launcher's variables that are incomplete. The message is one line: what
    happened, then what to do. Secrets in it, such as passwords in URLs, are masked.

    The commands of `hybrid-imagenet` print the message as `error: ...` without a traceback, and
    exit with `exit_code`. In your own program it is an exception like others: if nothing catches
    it, Python prints a traceback. After `hi.init()` the program then exits with `exit_code`, and if
    all ranks raise the same error, rank 0 prints it as one line.

    Example:
      try:
          hi.init()
      except hi.UserError as error:
          sys.exit(f"error: {error}")

    Args:
      message: What happened, and what to do.

    Attributes:
      exit_code: Code with which the program exits: 2 for an argument, dataset or environment that
        cannot be used; 3 if training diverged or skipped too many steps; 4 if training data became
        unreachable, in which case `--resume` continues the run.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str):
        """Stores the message as one printable line without secrets, whatever it quotes."""
        super().__init__(_one_line(message))


class SharedError(UserError):
    """A UserError that every rank raises at the same point, so that only rank 0 prints it.

    Args:
      message: See `UserError`.
      exit_code: Replaces the exit code of the class; None keeps it.
    """

    def __init__(self, message: str, exit_code: int | None = None):
        """Stores the message and the exit code."""
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class HostError(UserError):
    """A UserError that all ranks of a host raise at the same point; the first of them prints it."""


class StorageError(UserError):
    """Training data became unreachable, at a URL or in a directory that disappeared.

    The run itself is intact and can be resumed.
    """

    exit_code = EXIT_STALLED


class RankTimeoutError(UserError):
    """Other ranks did not answer in time while the job started."""

    exit_code = EXIT_STALLED


class NumericsError(SharedError):
    """Training cannot continue because of non-finite or diverging values."""

    exit_code = EXIT_NUMERICS


def check_format(name: object, number: object, expected: int, remedy: str) -> None:
    """Checks that this version has saved what it is about to read.

    Args:
      name: What is read, such as the path of a file, for the message.
      number: Number of the format that is stored in it; None if there is none, as in what the first
        versions have saved.
      expected: Number of the format that this version writes.
      remedy: Last sentence of the message, without its period.

    Raises:
      UserError: For another number.
    """
    if number == expected:
        return
    is_later = isinstance(number, int) and number > expected
    version = "a later version" if is_later else "an earlier version"
    raise UserError(f"{name} was saved by {version} of hybrid_imagenet. {remedy}.")


def did_you_mean(word: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Suggests the names that a mistyped word may stand for.

    Args:
      word: The word as the user typed it.
      candidates: The valid names.
      prefix: Written before each suggested name, such as the dashes of a flag.

    Returns:
      " (did you mean NAME?)" with the one or two most similar names, or "" if none is similar.
    """
    similar = difflib.get_close_matches(word, list(candidates), n=2, cutoff=0.7)
    if not similar:
        return ""
    return f" (did you mean {' or '.join(prefix + name for name in similar)}?)"


def pluralize(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def without_secrets(text: str) -> str:
    """Masks secrets, so that the text may be stored and printed.

    `***` replaces user names and passwords in URLs, values of tokens in their queries, and tokens
    of the Hugging Face hub.
    """
    text = _PASSWORD.sub(r"\1***@", text)
    text = _TOKEN.sub(r"\1***", text)
    return _HUB_TOKEN.sub("hf_***", text)


def printable(text: str) -> str:
    """Returns text of any origin as one line that is safe to print on a terminal.

    Secrets are masked. Characters that move a cursor, change colors or reverse the writing
    direction are escaped. File names that Python read as bytes, because the C locale only has
    ASCII, become UTF-8 again.
    """
    text = without_secrets(_as_utf8(text))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _as_utf8(text: str) -> str:
    """Decodes bytes that Python represents as surrogates; bytes that are not UTF-8 stay."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        # The surrogates are of another kind. They come from a file with invalid JSON strings.
        return text


def _one_line(text: str) -> str:
    """Returns text as one printable line, without the middle of a very long text."""
    # Mask secrets before the text is cut, because the pattern does not match half a URL.
    text = without_secrets(text)
    if len(text) > _MAX_MESSAGE_CHARACTERS:
        beginning = text[: _MAX_MESSAGE_CHARACTERS - _KEPT_END_CHARACTERS]
        text = f"{beginning} ... {text[-_KEPT_END_CHARACTERS:]}"
    return printable(text)


def import_optional(module: str, remedy: str) -> Any:
    """Imports a module of a package that not every installation has.

    Args:
      module: Name of the module.
      remedy: Message of the error if the package is not installed.

    Raises:
      UserError: If the module cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(remedy) from None


def missing_module_message(error: ModuleNotFoundError) -> str:
    """Returns an error line that names the missing module and how to get it.

    The line also names the Python that was used, because a missing module usually means that the
    environment was not entered.
    """
    if error.name == "tensorflow":
        return f"error: {missing_tensorflow_message()}"
    root = pathlib.Path(__file__).parent.parent
    if not _is_checkout(root):
        return (
            f"error: {sys.executable} has no module {error.name}. Use the Python in whose"
            " environment the program is installed, or install the package of the module with pip"
        )
    commands = [f"cd {root}"]
    if not (root / ".venv" / "bin" / "activate").exists():
        commands.append("launch/setup.sh")
    commands.append(". launch/env.sh")
    return (
        f"error: {sys.executable} has no module {error.name}, because this Python is not the"
        f" environment of the program. First run {', '.join(commands)}"
    )


def missing_tensorflow_message() -> str:
    """Returns how to install TensorFlow.

    `pip install .` does not install it, because CPUs and GPUs need different packages.
    """
    if not _is_checkout(pathlib.Path(__file__).parent.parent):
        return (
            f"TensorFlow is not installed in {sys.executable}. Run pip install tensorflow-cpu, or"
            " pip install 'tensorflow[and-cuda]' for NVIDIA GPUs"
        )
    return (
        f"TensorFlow is not installed in {sys.executable}. In the checkout of this program, run pip"
        " install '.[cpu]', or pip install '.[gpu]' for NVIDIA GPUs"
    )


def _is_checkout(root: pathlib.Path) -> bool:
    """Returns whether the package is in a checkout, and not where pip has installed it."""
    return (root / "launch" / "env.sh").exists()
