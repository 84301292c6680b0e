"""Measures the time of --help, and of a job of two ranks from launch to its first step.

    python -m benchmarks start --json=start.json

The job is launch/local.sh, which trains on the digits (flags after `--` are appended). It is
stopped after its first step. `stages` has the seconds by stage that rank 0 prints then.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.step_rate import processor
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.startup import COMMAND_START_VARIABLE

_EPILOG = """\
Examples:
  python -m benchmarks start
  python -m benchmarks start --launcher="hybrid-imagenet run -np 2 --" --rounds=3"""

_MAIN = [sys.executable, "-m", "hybrid_imagenet.main"]
_LAUNCH_SCRIPTS = Path(__file__).parents[1] / "launch"
_SCRIPT = "launch script and set-up"
# Time in which the job may end by itself after SIGTERM.
_GRACE_SECONDS = 30
_POLL_SECONDS = 0.05


def main(argv: Sequence[str]) -> int:
    """Measures, prints the figures and writes --json."""
    words, flags = scaling.split_arguments(argv)
    options = _parser().parse_args(words)
    seconds_of_help = [help_seconds() for _ in range(options.rounds)]
    command = job(options.launcher, flags)
    first_steps = [first_step(command, options.timeout) for _ in range(options.rounds)]
    stages = {}
    for name in first_steps[0].stages:
        stages[name] = statistics.median(step.stages[name] for step in first_steps)
    report = {
        "benchmark": "start",
        "help_seconds": statistics.median(seconds_of_help),
        "first_step_seconds": statistics.median(step.seconds for step in first_steps),
        "stages": stages,
        "launcher": options.launcher or "launch/local.sh",
        "flags": flags,
        "machine": processor(),
        "date": datetime.date.today().isoformat(),
    }
    print(
        f"--help {report['help_seconds']:.2f} s; first step of `{report['launcher']}` after "
        f"{report['first_step_seconds']:.1f} s (medians of {options.rounds})"
    )
    for name, seconds in stages.items():
        print(f"{name:<28} {seconds:>8.1f} s")
    command_line.write_json(options.json, report)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m benchmarks start",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--launcher",
        help=(
            "command that starts the ranks, such as `horovodrun -np 2` or"
            " `hybrid-imagenet run -np 2 --` (default: launch/local.sh)"
        ),
    )
    parser.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=1,
        help="launches of each kind (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=command_line.positive_float,
        default=300,
        help="seconds to wait for a first step (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    return parser


def help_seconds() -> float:
    """Returns the seconds that --help takes."""
    start = time.perf_counter()
    subprocess.run([*_MAIN, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


class FirstStep(NamedTuple):
    """The start of a job until its first step.

    Attributes:
      seconds: Seconds from the launch to the first step.
      stages: Seconds by stage.
    """

    seconds: float
    stages: dict[str, float]


def job(launcher: str | None, flags: Sequence[str]) -> list[str]:
    """Returns the command of a job.

    It is launch/local.sh if the environment is set up, else a launcher before the program.

    Raises:
      UserError: If the environment cannot be set up.
    """
    if launcher is None:
        setup = _LAUNCH_SCRIPTS / "setup.sh"
        # Not measured, because the script builds Horovod when it runs for the first time.
        if subprocess.run([setup], check=False).returncode:
            raise UserError(f"{setup} failed. Correct what its output above shows, and repeat.")
        return [str(_LAUNCH_SCRIPTS / "local.sh"), *flags]
    command = shlex.split(launcher)
    if command[-1:] != ["--"]:
        command += _MAIN
    return command + list(flags or ["--flagfile=digits"])


def first_step(job: Sequence[str], timeout: float) -> FirstStep:
    """Measures from a job's launch to the record of its first step; stops the job then.

    Raises:
      UserError: If the job cannot be started, or ends or takes too long before its first step.
    """
    # Ranks may still be writing when their launcher has gone.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        run = Path(folder, "run")
        log = Path(folder, "log")
        command = [*job, f"--run_dir={run}", "--log_every_steps=1", "--progress=plain"]
        start = time.perf_counter()
        process = _start_job(command, log)
        try:
            _wait_for_first_step(process, run / "metrics.jsonl", log, timeout)
            seconds = time.perf_counter() - start
        finally:
            end(process, _GRACE_SECONDS)
        return FirstStep(seconds, _stages(log.read_text(errors="replace"), seconds))


def _start_job(command: Sequence[str], log: Path) -> subprocess.Popen:
    """Starts a job whose output goes to a file."""
    environment = dict(os.environ)
    # The time at which this benchmark began is not that of the job.
    environment.pop(COMMAND_START_VARIABLE, None)
    try:
        with log.open("wb") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True
            )
    except FileNotFoundError:
        raise UserError(
            f"The launcher {command[0]} is not installed. Install it, or set --launcher to"
            " another one."
        ) from None


def _wait_for_first_step(
    process: subprocess.Popen, records: Path, log: Path, timeout: float
) -> None:
    """Waits until a job has recorded its first step.

    Raises:
      UserError: If the job stops or takes too long before the first step.
    """
    start = time.perf_counter()
    while not (records.is_file() and '"step"' in records.read_text()):
        seconds = time.perf_counter() - start
        last_lines = log.read_text(errors="replace").strip().splitlines()[-5:]
        if process.poll() is not None:
            raise UserError(
                f"The job ended after {seconds:.0f} s, before its first step. Correct its error:"
                f" {' | '.join(last_lines)}"
            )
        if seconds > timeout:
            raise UserError(
                f"There was no first step within --timeout={timeout:g} s. Raise --timeout, or look"
                f" for the cause in the output: {' | '.join(last_lines)}"
            )
        time.sleep(_POLL_SECONDS)


def _stages(log: str, seconds: float) -> dict[str, float]:
    """Returns the seconds by stage that rank 0 printed, and those before the program."""
    (line,) = re.findall(r"^first step after [0-9.]+ s: (.*)$", log, re.MULTILINE)
    stages = {}
    for name, stage_seconds in re.findall(r"([^,]+?) ([0-9.]+) s(?:, |$)", line):
        stages[name] = float(stage_seconds)
    return {_SCRIPT: max(seconds - sum(stages.values()), 0.0), **stages}


def end(job: subprocess.Popen, grace: float) -> None:
    """Ends the processes of a job by SIGTERM, and by SIGKILL after some seconds.

    SIGKILL follows at once if the first process has ended.
    """
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=grace)
