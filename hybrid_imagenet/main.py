"""Trains, started once, or once per rank by horovodrun (`python -m hybrid_imagenet.main`)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence

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
    without_secrets,
)

if (
    __name__ == "__main__"
):  # the command `train`, also of a rank; before the imports below, which take time
    from hybrid_imagenet.__main__ import run_process

    sys.exit(run_process(["train", *sys.argv[1:]]))

from hybrid_imagenet import config as configuration
from hybrid_imagenet import print_config, recipes
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.config import derived
from hybrid_imagenet.config import help as flag_help
from hybrid_imagenet.resilience.exit_code import notify_exit
from hybrid_imagenet.resilience.launcher import follow_launcher, launcher_rank
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.resilience.watchdog import watch_startup
from hybrid_imagenet.startup import STARTUP_PROGRESS, is_terminal_output
from hybrid_imagenet.training import preflight, smaller_batch_advice

_FIRST_SPEAKS = 5.0  # seconds for the first rank of a host to say what is wrong with it


def main(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code (see `hybrid_imagenet.errors`)."""
    if not arguments:
        if launcher_rank() == 0:
            print(flag_help.first_commands("hybrid-imagenet train"), file=sys.stderr)
        notify_exit(EXIT_USAGE)
        return EXIT_USAGE
    if "--recipe=list" in arguments:
        print(recipes.table())
        return EXIT_OK
    try:
        if (about := flag_help.topic(arguments)) is not None:
            print(flag_help.text(about))
            return EXIT_OK
        config = configuration.resolve(arguments, placement().size)
        if not config.print_config:
            preflight.run(config)
    except UserError as error:
        if launcher_rank() == 0:
            print(f"error: {error}", file=sys.stderr)
        notify_exit(error.exit_code)
        return error.exit_code
    if config.check_only:
        return EXIT_OK
    if config.print_config:
        return _print_config(config)
    return _train(config)


def _print_config(config: configuration.RunConfig) -> int:
    try:
        write = print_config.describe if config.print_config_all else print_config.summarize
        print(write(config, preflight.training_images(config)))
    except UserError as error:
        _report(error)
        return error.exit_code
    return EXIT_OK


def _train(config: configuration.RunConfig) -> int:
    # Imported late: a wrong flag answers without TensorFlow, and TensorFlow starts with the threads
    # that comm sets.
    from hybrid_imagenet import comm

    follow_launcher()
    watch_startup(STARTUP_PROGRESS, config.stall_timeout, launcher_rank(), config.ranks)
    if launcher_rank() == 0 and config.progress != "none":
        STARTUP_PROGRESS.open(
            derived.title(config),
            sys.stdout,
            terminal=is_terminal_output(config.progress, placement().size),
        )
    STARTUP_PROGRESS.begin("loading TensorFlow")
    try:
        communicator = comm.start(
            derived.communication(config), persistent_batch_norm=config.persistent_batch_norm
        )
        STARTUP_PROGRESS.begin("loading Keras")
        from hybrid_imagenet import train

        outcome = train.run(config, communicator)
    except UserError as error:
        _report(error)
        return _leave(error.exit_code)
    except ModuleNotFoundError as missing:
        print(missing_module_message(missing), file=sys.stderr)
        return _leave(EXIT_USAGE)
    except Exception as error:
        from hybrid_imagenet.comm import lost_rank, out_of_memory

        if out_of_memory.is_out_of_memory(error):
            shortage = out_of_memory.user_error(error, smaller_batch_advice.advice(config))
            _report(shortage)
            return _leave(shortage.exit_code)
        if lost_rank.is_lost_rank_error(error):
            print(UserError(lost_rank.lost_rank_message(error)), file=sys.stderr)
            return _leave(EXIT_STALLED)
        print(
            f"rank {launcher_rank()}: unexpected error\n{without_secrets(traceback.format_exc())}",
            file=sys.stderr,
        )
        return _leave(EXIT_FAILURE)
    _end_within(config.stall_timeout)
    with contextlib.suppress(Exception):  # a rank was lost here: all that must be saved is saved
        # the launcher ends all ranks as soon as one leaves with another code than 0
        communicator.barrier()
    communicator.shutdown()
    if REQUESTS.stop and outcome != "preempted" and launcher_rank() == 0:
        print("stopped after the last step: the run is complete", file=sys.stderr)
    if REQUESTS.stop or outcome == "preempted":
        notify_exit(EXIT_PREEMPTED)
        return EXIT_PREEMPTED
    return EXIT_OK


def _end_within(seconds: float) -> None:
    """Ends this rank if the others do not come to the end with it: the watchdogs have stopped."""

    def end() -> None:
        print(
            f"error: rank {launcher_rank()} waited for the others at the end for {seconds:g} s",
            file=sys.stderr,
        )
        _leave(EXIT_STALLED)

    if seconds:
        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


def _report(error: UserError) -> None:
    rank = launcher_rank()
    STARTUP_PROGRESS.close()
    if isinstance(error, HostError) and placement().local_rank:
        time.sleep(_FIRST_SPEAKS)  # with the first rank's end the launcher ends this one
    if rank == 0:
        print(f"error: {error}", file=sys.stderr)
    elif not isinstance(error, SharedError):
        print(f"error: rank {rank}: {error}", file=sys.stderr)


def _leave(code: int) -> int:
    """Ends the process at once: a rank that failed must not wait in a collective of the others."""
    sys.stdout.flush()
    sys.stderr.flush()
    notify_exit(code)
    os._exit(code)
