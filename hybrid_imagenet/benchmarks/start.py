"""`benchmarks start`: how long --help takes, and a job of two ranks from its launch to the end of its first step.

    python -m hybrid_imagenet.benchmarks start --json=start.json

The job trains on the digits (flags after `--` replace its flags) and is stopped after its first step.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hybrid_imagenet.benchmarks.step import processor
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools import command_line

_MAIN = [sys.executable, "-m", "hybrid_imagenet.main"]
_DIGITS = Path(__file__).parents[2] / "flags" / "digits.flags"
_GRACE = 30  # seconds for the job to end by itself


def main(argv: Sequence[str]) -> int:
    """Measures, prints the figures and writes --json."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:place])
    flags = words[place + 1 :] or [f"--flagfile={_DIGITS}"]
    helps = [help_seconds() for _ in range(options.rounds)]
    launcher = shlex.split(options.launcher) if options.launcher else []
    firsts = [first_step_seconds(launcher, flags, options.timeout) for _ in range(options.rounds)]
    report = {
        "benchmark": "start",
        "help_seconds": statistics.median(helps),
        "first_step_seconds": statistics.median(firsts),
        "launcher": options.launcher,
        "flags": flags,
        "machine": processor(),
        "date": datetime.date.today().isoformat(),
    }
    print(
        f"--help {report['help_seconds']:.2f} s; first step of `{options.launcher}` after "
        f"{report['first_step_seconds']:.1f} s (medians of {options.rounds})"
    )
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser("bench start", (__doc__ or "").split("\n")[0])
    parser.add_argument("--launcher", default="horovodrun -np 2", help="what starts the ranks (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="launches of each kind (%(default)s)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds to wait for a first step (%(default)s)")
    parser.add_argument("--json", help="file for the result")
    return parser


def help_seconds() -> float:
    """Seconds that --help takes."""
    began = time.perf_counter()
    subprocess.run([*_MAIN, "--help"], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def first_step_seconds(launcher: Sequence[str], flags: Sequence[str], timeout: float) -> float:
    """Seconds from a job's launch to the record of its first step; the job is stopped then.

    Raises:
      UserError: if the job cannot be started, or ends or takes too long before its first step.
    """
    # Ranks may still be writing when their launcher has gone.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        records, log = Path(folder, "run", "metrics.jsonl"), Path(folder, "log")
        command = [*launcher, *_MAIN, *flags, f"--run_dir={folder}/run", "--log_every_steps=1", "--progress=none"]
        began = time.perf_counter()
        with log.open("wb") as output:
            try:
                job = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
            except FileNotFoundError:
                raise UserError(f"--launcher={shlex.join(launcher)}: {command[0]} is not installed") from None
            try:
                while not (records.is_file() and '"step"' in records.read_text()):
                    if job.poll() is not None or time.perf_counter() - began > timeout:
                        reason = " | ".join(log.read_text(errors="replace").strip().splitlines()[-5:])
                        raise UserError(f"no first step after {time.perf_counter() - began:.0f} s: {reason}")
                    time.sleep(0.05)
                return time.perf_counter() - began
            finally:
                _end(job)


def _end(job: subprocess.Popen) -> None:
    """Stops the job, gently at first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(timeout=_GRACE)
            return
