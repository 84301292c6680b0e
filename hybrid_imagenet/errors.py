"""Errors that are meant for the user, and the exit codes of the program."""

EXIT_OK = 0
EXIT_FAILURE = 1  # an unexpected error, with a traceback
EXIT_USAGE = 2  # a flag, a path or a data set that cannot be used
EXIT_NUMERICS = 3  # too many skipped steps, or divergence
EXIT_STALLED = 4  # a rank hung for --stall_seconds; start again with --resume
EXIT_PREEMPTED = 75  # stopped by a signal after saving; start again with --resume


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one line that names the offending value and the remedy; the program prints it without a
    traceback and exits with `exit_code` on every rank.
    """

    exit_code = EXIT_USAGE


class SharedError(UserError):
    """A UserError that every rank raises at the same point, so that rank 0 alone prints it."""


class NumericsError(SharedError):
    """Training cannot go on because of non-finite or diverging values."""

    exit_code = EXIT_NUMERICS
