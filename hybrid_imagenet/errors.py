"""Errors that are meant for the user, and the exit codes of the program."""

import difflib
import importlib
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any

EXIT_OK = 0
EXIT_FAILURE = 1  # an unexpected error, with a traceback
EXIT_USAGE = 2  # a flag, a path or a data set that cannot be used
EXIT_NUMERICS = 3  # too many skipped steps, or divergence
# a rank hung for --stall_timeout, or storage for --storage_timeout; start again with --resume
EXIT_STALLED = 4
EXIT_PREEMPTED = 75  # stopped by a signal; start again with --resume
EXIT_INTERRUPTED = 130  # Ctrl-C: a command was stopped, or training before the first save

_LONGEST = 2000  # characters of a message
# Name and password in a URL, up to the last @ before the path. A password may hold an @. It may
# hold a slash too if a colon stands before the slash and no port number follows the colon. A path
# that was made of a URL has one slash less.
_PASSWORD = re.compile(r"(:/{1,2})(?:[^/\s]*@|(?:(?<=s3://)|(?![^/\s@]*:\d*/))[^/\s@:\[]+:\S*@)")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{16,}")
_TOKEN = re.compile(
    r"(?i)([?&;][^=&\s]*(?:token|key|secret|sig|password|credential)[^=&\s]*=)[^&\s]+?(?=[&\s]|: |$)"  # noqa: E501
)


def did_you_mean(word: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns " (did you mean NAME?)" with the one or two known names nearest to a mistyped one, or
    "" if none is near.

    Args:
      word: as it was typed.
      known: the names that exist.
      prefix: written before each name, such as the dashes of a flag.
    """
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.7)
    return f" (did you mean {' or '.join(prefix + name for name in near)}?)" if near else ""


def pluralize(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def without_secrets(text: str) -> str:
    """Returns the text as it may be stored.

    `***` stands for user names and passwords in URLs, for the values of tokens in their queries,
    and for tokens of the Hugging Face hub.
    """
    return _HUB_TOKEN.sub("hf_***", _TOKEN.sub(r"\1***", _PASSWORD.sub(r"\1***@", text)))


def printable(text: str) -> str:
    """Returns text of any origin as one line that is safe to print on a terminal.

    Secrets are masked. Characters that move a cursor, change colors or reverse the direction of
    writing are escaped. Names of files that Python has read as bytes, because the C locale has
    ASCII alone, become UTF-8 again.
    """
    text = without_secrets(_as_utf8(text))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_lines(text: str) -> str:
    """Returns text of several lines, each of them as `printable` returns it."""
    return "\n".join(map(printable, text.split("\n")))


def _as_utf8(text: str) -> str:
    """Decodes the bytes that Python has put into a text as surrogates; what is not UTF-8 stays as
    it is.
    """
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # surrogates of another kind, from a file with invalid JSON strings
        return text


def _one_line(text: str) -> str:
    """Returns printable text without the middle of a very long one."""
    text = without_secrets(text)  # whole: a cut URL is none
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 500]} ... {text[-500:]}"
    return printable(text)


def missing_module_message(error: ModuleNotFoundError) -> str:
    """Returns an error line: what is missing, in which Python, and how to enter the environment or
    install it.
    """
    if error.name == "tensorflow":
        return f"error: {missing_tensorflow_message()}"
    root = pathlib.Path(__file__).parent.parent
    where = f"cd {root}, " if (root / "launch" / "env.sh").exists() else ""
    setup = "" if (root / ".venv" / "bin" / "activate").exists() else "launch/setup.sh, "
    return (
        f"error: {sys.executable} has no module {error.name}: this Python is not the environment of"
        f" the program; first {where}{setup}. launch/env.sh"
    )


def missing_tensorflow_message() -> str:
    """Returns what to do without TensorFlow, which `pip install .` leaves out, as CPUs and GPUs
    need different ones.
    """
    return (
        f"TensorFlow is not installed in {sys.executable}. In the checkout of this program, run pip"
        " install '.[cpu]', or pip install '.[gpu]' for NVIDIA GPUs"
    )


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one line that names the offending value and the remedy; the program prints it
    without a traceback and exits with `exit_code` on every rank.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str):
        """Keeps the message as one printable line without secrets, whatever values it quotes."""
        super().__init__(_one_line(message))


def import_optional(module: str, remedy: str) -> Any:
    """Imports a module of a package that not every installation has; raises UserError with the
    remedy without it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(remedy) from None


class SharedError(UserError):
    """A UserError that every rank raises at the same point, so that rank 0 alone prints it.

    Args:
      message: see `UserError`.
      exit_code: where it differs from that of the class.
    """

    def __init__(self, message: str, exit_code: int | None = None):
        """Keeps the message and the code."""
        super().__init__(message)
        if exit_code is not None:
            self.exit_code = exit_code


class HostError(UserError):
    """A UserError that all ranks of a host raise at the same point, so that the first of them
    prints it.
    """


class StorageError(UserError):
    """Training data that can no longer be reached, at a URL or in a directory that has vanished.

    Nothing is wrong with the run, which can be resumed.
    """

    exit_code = EXIT_STALLED


class NumericsError(SharedError):
    """Training cannot continue because of non-finite or diverging values."""

    exit_code = EXIT_NUMERICS
