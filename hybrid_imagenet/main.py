"""Trains from a command line: checks it, connects the ranks, trains, and sets the exit code.

`python -m hybrid_imagenet.main` is one process, or one rank of a job if a launcher starts it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
    HostError,
    SharedError,
    UserError,
    missing_module_message,
    printable,
    without_secrets,
)

# It comes before the other imports, which take time: signals must be handled from the start.
if __name__ == "__main__":
    from hybrid_imagenet.__main__ import run_process

    sys.exit(run_process(["train", *sys.argv[1:]]))

from hybrid_imagenet import config as configuration
from hybrid_imagenet import print_config, recipes
from hybrid_imagenet.cluster import job_lines, rank_failure
from hybrid_imagenet.cluster.environment import read_placement
from hybrid_imagenet.config import defaults
from hybrid_imagenet.config import help as flag_help
from hybrid_imagenet.options import normalize_flag
from hybrid_imagenet.resilience.exit_code import notify_exit
from hybrid_imagenet.resilience.launcher import follow_launcher, launcher_rank
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.resilience.watchdog import watch_startup
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.startup import STARTUP_PROGRESS, is_terminal_output
from hybrid_imagenet.training import preflight

# Options of `run`, by every name that it accepts, and how to write them.
_LAUNCH_OPTIONS = {
    "-np": "-np",
    "-n": "-np",
    "--np": "-np",
    "--num_processes": "-np",
    "--num_proc": "-np",
    "--nproc_per_node": "--nproc_per_node",
    "-H": "-H",
    "--hosts": "-H",
}
# An error that several ranks have in common is printed by the first of them, which then ends. The
# launcher ends the others, which wait for this time before they act.
_SAME_ERROR_SECONDS = 5.0


def main(arguments: Sequence[str]) -> int:
    """Runs a command line.

    Args:
      arguments: The words after the name of the command.

    Returns:
      The exit code, see `hybrid_imagenet.errors`.
    """
    if not arguments:
        if launcher_rank() == 0:
            print(flag_help.first_commands("hybrid-imagenet train"), file=sys.stderr)
        notify_exit(EXIT_USAGE)
        return EXIT_USAGE
    if recipes.is_list_requested(arguments):
        print(recipes.table())
        return EXIT_OK
    try:
        topic = flag_help.topic(arguments)
        if topic is not None:
            print(flag_help.text(topic))
            return EXIT_OK
        _reject_launch_options(arguments)
        config = configuration.resolve(arguments, read_placement().size)
        if config.run.print_config:
            return _print_config(config)
        plan = preflight.run(config)
    except UserError as error:
        _print_error_before_connecting(error)
        notify_exit(error.exit_code)
        return error.exit_code
    if config.run.check_only:
        return EXIT_OK
    return _train(config, plan)


def _reject_launch_options(arguments: Sequence[str]) -> None:
    """Raises UserError with the corrected command for an option of `hybrid-imagenet run`."""
    for index, word in enumerate(arguments):
        name = normalize_flag(word).partition("=")[0]
        if name not in _LAUNCH_OPTIONS:
            continue
        # The value is in the same word, or in the next one.
        end = index + 1 if "=" in word else index + 2
        others = [*arguments[:index], *arguments[end:]]
        value = word.partition("=")[2] if "=" in word else "".join(arguments[index + 1 : end])
        command = ["hybrid-imagenet", "run", _LAUNCH_OPTIONS[name], value or "N", "--"]
        raise UserError(
            f"{name} is an option of hybrid-imagenet run, which starts several ranks. Run"
            f" {shlex.join([*command, *(others or ['TRAIN_FLAGS'])])}"
        )


def _print_config(config: configuration.RunConfig) -> int:
    """Prints the configuration and returns the exit code."""
    describe = print_config.describe if config.run.print_config_all else print_config.summarize
    try:
        images = preflight.training_images(config.data)
        print(describe(defaults.decide_xla(config, images), images))
    except UserError as error:
        _print_error(error)
        return error.exit_code
    return EXIT_OK


def _train(config: configuration.RunConfig, plan: RunPlan) -> int:
    """Connects the ranks, trains and returns the exit code; ends the process after an error.

    Args:
      config: Settings of the run, which may change when all ranks and the data are known.
      plan: What they mean for this rank. It says how to connect.
    """
    # Imported late, so that a wrong flag is an error without TensorFlow, and TensorFlow starts with
    # the number of threads that comm sets.
    from hybrid_imagenet import comm

    follow_launcher()
    stall_timeout = plan.recording.stall_timeout
    watch_startup(STARTUP_PROGRESS, stall_timeout, launcher_rank(), plan.ranks)
    progress = plan.recording.progress
    if launcher_rank() == 0 and progress != "none":
        STARTUP_PROGRESS.open(
            plan.title, sys.stdout, terminal=is_terminal_output(progress, read_placement().size)
        )
    STARTUP_PROGRESS.begin("loading TensorFlow")
    try:
        communicator = comm.start(
            plan.communication, persistent_batch_norm=plan.network.persistent_batch_norm
        )
        STARTUP_PROGRESS.begin("loading Keras")
        from hybrid_imagenet import train

        stop = train.run(config, communicator)
    except Exception as error:
        _end_process(_report_failure(error, plan))
    _limit_wait_for_other_ranks(stall_timeout)
    # The launcher ends all ranks as soon as one has ended with another code than 0, so they wait
    # for one another. A rank that is lost here does not matter, because everything is saved.
    with contextlib.suppress(Exception):
        communicator.barrier()
    communicator.shutdown()
    if REQUESTS.stop and stop != "preempted" and launcher_rank() == 0:
        print("stopped after the last step: the run is complete", file=sys.stderr)
    if REQUESTS.stop or stop == "preempted":
        notify_exit(EXIT_PREEMPTED)
        return EXIT_PREEMPTED
    return EXIT_OK


def _report_failure(error: Exception, plan: RunPlan) -> int:
    """Prints why training has failed, and returns the exit code."""
    if isinstance(error, UserError):
        _print_error(error)
        return error.exit_code
    if isinstance(error, ModuleNotFoundError):
        print(missing_module_message(error), file=sys.stderr)
        return EXIT_USAGE
    from hybrid_imagenet.cluster import out_of_memory
    from hybrid_imagenet.comm import lost_rank

    if out_of_memory.is_out_of_memory(error):
        memory_error = out_of_memory.user_error(error, plan.recording.smaller_batch_advice)
        _print_error(memory_error)
        return memory_error.exit_code
    if lost_rank.is_lost_rank_error(error):
        print(UserError(lost_rank.lost_rank_message(error)), file=sys.stderr)
        return EXIT_STALLED
    _report_unexpected_error(error, plan.ranks)
    return EXIT_FAILURE


def _report_unexpected_error(error: Exception, ranks: int) -> None:
    """Prints the traceback of an error, with the rank before it or with the next command after it.

    If the job has a supervisor, it prints both again at the end.
    """
    stack = without_secrets("".join(traceback.format_exception(error)))
    if ranks > 1 or job_lines.JOB_VARIABLE in os.environ:
        rank_failure.report_error(launcher_rank(), error, EXIT_FAILURE)
        print(stack, end="", file=sys.stderr)
        return
    print(stack, end="", file=sys.stderr)
    print(f"error: {rank_failure.summary(error)}", file=sys.stderr)
    run_directory = job_lines.announced_run()
    if run_directory:
        command = shlex.join(["hybrid-imagenet", "resume", run_directory])
        print(f"next: {printable(command)}", file=sys.stderr)


def _print_error_before_connecting(error: UserError) -> None:
    """Prints an error of the command line, on rank 0 or if rank 0 does not have it.

    If rank 0 has the same error, the launcher ends this rank while it waits. The cause of any other
    error is on the host, so one of its ranks prints it.
    """
    if launcher_rank() == 0:
        print(f"error: {error}", file=sys.stderr)
        return
    time.sleep(_SAME_ERROR_SECONDS)
    if read_placement().local_rank == 0:
        print(f"error: rank {launcher_rank()} on {socket.gethostname()}: {error}", file=sys.stderr)


def _print_error(error: UserError) -> None:
    """Prints an error once: on rank 0, or on the rank that has it alone."""
    rank = launcher_rank()
    STARTUP_PROGRESS.close()
    if isinstance(error, HostError) and read_placement().local_rank:
        time.sleep(_SAME_ERROR_SECONDS)
    if rank == 0:
        print(f"error: {error}", file=sys.stderr)
    elif not isinstance(error, SharedError):
        print(f"error: rank {rank} on {socket.gethostname()}: {error}", file=sys.stderr)


def _limit_wait_for_other_ranks(seconds: float) -> None:
    """Ends this rank if it waits for the others longer than this at the end of a run.

    The watchdogs have stopped by then.

    Args:
      seconds: 0 for no limit.
    """

    def end() -> None:
        print(
            f"error: rank {launcher_rank()} has waited for {seconds:g} s until the others end."
            " Look for the rank or the host that hangs.",
            file=sys.stderr,
        )
        _end_process(EXIT_STALLED)

    if seconds:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


def _end_process(exit_code: int) -> NoReturn:
    """Ends the process at once, so that a rank that failed does not wait in a collective."""
    notify_exit(exit_code)
    rank_failure.exit_at_once(exit_code)
