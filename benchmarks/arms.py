"""Runs all measurements of one GPU within a few minutes: `python -m benchmarks arms`.

    python -m benchmarks arms --minutes=9 --out=arms

Each arm is a command line of another benchmark, of the tests or of training, in its own process.
The processes of a wave trace and compile side by side; then they are timed one after the
other. Arms that decide a default warm up alone, since cuDNN chooses its kernels by their time. The
table (arms.md, arms.json) is written after each arm, with a verdict by the arm's rule. The same
command continues with the arms that are missing there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import start, turns
from benchmarks.arms_table import ARMS, SPEED, Arm, Row
from hybrid_imagenet import files
from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_OK, UserError

_EPILOG = """\
Examples:
Measure one GPU in less than ten minutes:
  python -m benchmarks arms
Try the arms without a GPU:
  python -m benchmarks arms --rehearse --minutes=5"""

MEASURED = "measured"
FAILED = "failed"
CUT = "cut"
NOT_RUN = "not run"
_ROOT = Path(__file__).parents[1]
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 3.0
# Columns of numbers in the table, and the factor to their unit.
_SCALE_BY_COLUMN = {
    "images_per_second": 1,
    "step_seconds": 1e3,
    "first_seconds": 1,
    "gpu_bytes": 1e-9,
}
# Part of --minutes that is kept to end processes and write the table.
_RESERVED_SECONDS = 8.0
# Fraction of a GPU's memory that the arms of a wave may take together.
_MEMORY_SHARE = 0.9


def main(argv: Sequence[str]) -> int:
    """Runs the arms and writes the table.

    Returns:
      0, also if an arm has failed, because the table names it.
    """
    options = _parser().parse_args(list(argv))
    deadline = time.monotonic() + 60 * options.minutes - _RESERVED_SECONDS
    arms = _chosen(options)
    table = Table(files.output_path("--out", options.out), ARMS, _machine())
    # SIGTERM raises KeyboardInterrupt, so that `run` ends the processes of the arms.
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run(arms, table, options, deadline)
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        table.write()
        print("\n".join(table.lines()), flush=True)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        prog="python -m benchmarks arms",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--minutes",
        type=command_line.positive_float,
        default=9.5,
        help="minutes after which the command ends (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        default="gpu-arms",
        metavar="DIR",
        help="directory of the table and the logs (default: %(default)s)",
    )
    parser.add_argument(
        "--only",
        default="",
        metavar="ARM,...",
        help=(
            "run these measurements only; speed means all forms of the step, and JAX (default: all)"
        ),
    )
    parser.add_argument(
        "--remeasure",
        action="store_true",
        help="repeat measurements that the table in --out already has",
    )
    scaling.add_round_options(parser, steps=20, rounds=3)
    parser.add_argument(
        "--parallel",
        type=command_line.positive_int,
        default=max(1, len(os.sched_getaffinity(0)) // 2),
        help="measurements that prepare at the same time (default: half of the cores, %(default)s)",
    )
    parser.add_argument(
        "--prepare_timeout",
        type=command_line.positive_float,
        default=120,
        help="seconds that measurements may take to prepare (default: %(default)s)",
    )
    parser.add_argument(
        "--peer_python",
        default="python3",
        metavar="PYTHON",
        help="Python that has PyTorch or JAX (default: %(default)s)",
    )
    parser.add_argument(
        "--fashion_mnist",
        default="",
        metavar="DIR",
        help="directory of the four IDX files, for the measurement that trains",
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="use a small network, to try the measurements without a GPU",
    )
    return parser


def _chosen(options: argparse.Namespace) -> list[Arm]:
    allowed = ["speed", *(arm.name for arm in ARMS)]
    names = command_line.parse_names("--only", options.only, allowed)
    if "speed" in names:
        names = [*(name for name in names if name != "speed"), *SPEED]
    if not gpus.count() and not options.rehearse:
        raise UserError("No GPU is visible. Add --rehearse to try the measurements on the CPU.")
    if not names:
        return list(ARMS)
    arms = {arm.name: arm for arm in ARMS}
    return [arms[name] for name in dict.fromkeys(names)]


def _machine() -> Row:
    """Returns the GPU's name, key in `published.GPUS`, free memory in GB and driver.

    Without a GPU the memory of the host is returned.
    """
    words = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free,driver_version",
        "--format=csv,noheader,nounits",
    ]
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        process = subprocess.run(words, capture_output=True, text=True, check=True)
        first_gpu = process.stdout.splitlines()[0]
        name, memory, free, driver = (word.strip() for word in first_gpu.split(","))
        # A part of a GPU (MIG) reports no number. With 0, one arm runs at a time.
        free_gb = int(free) * 2**20 / 1e9 if free.isdigit() else 0.0
        return {
            "gpu": name,
            "key": published.recognize_gpu(name, memory),
            "memory_gb": free_gb,
            "driver": driver,
        }
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"gpu": None, "key": None, "memory_gb": memory_bytes / 1e9, "driver": None}


def commit() -> str:
    """Returns the commit of this checkout, which launch/pack.sh writes to a file; "" if unknown."""
    packed = _ROOT / ".commit"
    if packed.exists():
        return packed.read_text().strip()
    words = ["git", "-C", str(_ROOT), "rev-parse", "HEAD"]
    try:
        process = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return process.stdout.strip()


def _software(machine: Row) -> str:
    """Returns a directory name for the GPU, its driver and the packages that compile for it."""
    words = [str(machine["gpu"]), f"driver{machine['driver']}"]
    for package in ("tensorflow", "tensorflow-cpu", "nvidia-cudnn-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            words.append(f"{package}{importlib.metadata.version(package)}")
    return re.sub(r"[^A-Za-z0-9.]+", "-", "-".join(words))


class Table:
    """The results of the arms, stored in a directory.

    Attributes:
      folder: Directory of the table, in which each arm has its own.
      arms: All arms, in the order of the table.
      machine: See `_machine`.
      rows: Result of each arm by its name, with `status` and, if it failed, `reason`.
    """

    def __init__(self, folder: Path, arms: Sequence[Arm], machine: Row) -> None:
        """Reads the results of an earlier start from the directory.

        Raises:
          UserError: If the directory cannot be used.
        """
        self.folder = folder
        self.arms = list(arms)
        self.machine = machine
        self.rows: dict[str, Row] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            report = json.loads((folder / "arms.json").read_text(encoding="utf-8"))
            for row in report["arms"]:
                if row["status"] != NOT_RUN:
                    self.rows[row.pop("arm")] = row
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"--out={folder} cannot be used ({error}). Pass another directory."
            ) from None

    def add(self, arm: Arm, row: Row) -> None:
        """Adds the result of an arm, writes the table and prints a line."""
        self.rows[arm.name] = row
        self.write()
        print(f"{arm.name}: {self.verdict(arm)}", flush=True)

    def verdict(self, arm: Arm) -> str:
        """Returns the verdict of an arm's rule on the rows so far, or why it has no row."""
        row = self.rows.get(arm.name, {"status": NOT_RUN})
        if row["status"] != MEASURED:
            reason = row.get("reason")
            return f"{row['status']}: {reason}" if reason else row["status"]
        other = self.rows.get(arm.baseline, {"status": NOT_RUN})
        if arm.baseline and other["status"] != MEASURED:
            return f"no verdict: {arm.baseline} was not measured"
        return arm.judge(
            row, other | {"arm": arm.baseline}, self.machine | {"noise": self._noise()}
        )

    def _noise(self) -> float:
        """Returns the relative difference between two measurements of the same command."""
        base = self.rows.get("base", {}).get("images_per_second")
        again = self.rows.get("again", {}).get("images_per_second")
        return abs(again / base - 1) if base and again else 0.0

    def write(self) -> None:
        """Writes arms.json and arms.md, each whole or not at all."""
        rows = []
        for arm in self.arms:
            row = {"arm": arm.name, "rule": arm.rule, "verdict": self.verdict(arm)}
            rows.append(row | self.rows.get(arm.name, {"status": NOT_RUN}))
        report = {"benchmark": "arms", "commit": commit(), "machine": self.machine, "arms": rows}
        self._write_file("arms.json", json.dumps(report, indent=1))
        self._write_file("arms.md", "\n".join(self.lines()))

    def _write_file(self, name: str, text: str) -> None:
        with files.atomic_replace(self.folder / name) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """Yields the lines of the table in Markdown."""
        yield f"{self.machine['gpu'] or 'no GPU: a rehearsal'}, {self.machine['memory_gb']:.0f} GB"
        yield ""
        yield "| arm | images/s | ms a step | first steps s | memory GB | rule | verdict |"
        yield "|---|---:|---:|---:|---:|---|---|"
        for arm in self.arms:
            row = self.rows.get(arm.name, {})
            cells = [arm.name]
            for key, scale in _SCALE_BY_COLUMN.items():
                cells.append(f"{row[key] * scale:,.1f}" if row.get(key) else "")
            for text in (arm.rule, self.verdict(arm)):
                cells.append(text.replace("|", "/"))
            yield f"| {' | '.join(cells)} |"


@dataclasses.dataclass
class RunningArm:
    """An arm whose process runs.

    Attributes:
      arm: The arm.
      folder: Directory in which its process writes.
      process: The process.
      start_time: When the process started, or when its turn began.
      has_turn: Whether its turn has begun.
      others_warming_up: How many arms were warming up when its turn began.
    """

    arm: Arm
    folder: Path
    process: subprocess.Popen[bytes]
    start_time: float
    has_turn: bool = False
    others_warming_up: int = 0

    def is_waiting(self) -> bool:
        """Returns whether the arm waits for its turn."""
        return not self.has_turn and (self.folder / turns.READY_FILE).exists()

    def begin_turn(self, others_warming_up: int) -> None:
        """Lets the arm be timed while this many arms still warm up."""
        (self.folder / turns.GO_FILE).touch()
        self.has_turn = True
        self.others_warming_up = others_warming_up
        self.start_time = time.monotonic()


def run(arms: Sequence[Arm], table: Table, options: argparse.Namespace, deadline: float) -> None:
    """Runs those arms that the table lacks in waves, until all have ended or the time is over."""
    # An arm that failed is repeated, after the others, because memory may have been short.
    failed = {name for name, row in table.rows.items() if row["status"] == FAILED}
    waiting = [
        arm for arm in arms if options.remeasure or arm.name not in table.rows or arm.name in failed
    ]
    waiting.sort(key=lambda arm: arm.name in failed)
    for arm in waiting:
        table.rows.pop(arm.name, None)
    for arm in list(waiting):
        missing = arm.missing(options)
        if missing:
            waiting.remove(arm)
            table.add(arm, {"status": NOT_RUN, "reason": missing})
    while waiting and time.monotonic() < deadline:
        chosen = _wave(waiting, options, _MEMORY_SHARE * table.machine["memory_gb"])
        running = [_start(arm, table, options) for arm in chosen]
        waiting = [arm for arm in waiting if arm not in chosen]
        try:
            _finish(running, table, options, deadline)
        finally:
            for running_arm in running:
                start.end(running_arm.process, _GRACE_SECONDS)


def _wave(waiting: Sequence[Arm], options: argparse.Namespace, gigabytes: float) -> list[Arm]:
    """Returns the arms that run at the same time next.

    These are the first one, and later ones of its kind that fit into memory with it.
    """
    first = waiting[0]
    chosen = [first]
    for arm in waiting[1:]:
        can_share = arm.timed == first.timed and not arm.exclusive and not first.exclusive
        total_gigabytes = sum(other.gigabytes for other in chosen) + arm.gigabytes
        if can_share and total_gigabytes <= gigabytes and len(chosen) < options.parallel:
            chosen.append(arm)
    return chosen


def _start(arm: Arm, table: Table, options: argparse.Namespace) -> RunningArm:
    folder = (table.folder / arm.name).resolve()
    # The directory of an earlier start would count as a result of this one.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    environment = dict(os.environ)
    for name, value in arm.environment:
        environment[name] = value.format(out=folder.parent, software=_software(table.machine))
    environment[turns.TURN_VARIABLE] = str(folder)
    search_path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{search_path}" if search_path else str(_ROOT)
    words = [sys.executable, *arm.command(folder, options)]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            words,
            env=environment,
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RunningArm(arm, folder, process, time.monotonic())


def _finish(
    running: list[RunningArm], table: Table, options: argparse.Namespace, deadline: float
) -> None:
    """Waits for the arms of a wave and gives each its turn; those that take too long are ended."""
    wave_start = time.monotonic()
    while running:
        now = time.monotonic()
        for running_arm in list(running):
            row = _result(running_arm, now, deadline)
            if row is not None:
                start.end(running_arm.process, _GRACE_SECONDS)
                table.add(running_arm.arm, row)
                running.remove(running_arm)
        _begin_next_turn(running, is_patient=now - wave_start <= options.prepare_timeout)
        time.sleep(_POLL_SECONDS)


def _result(running_arm: RunningArm, now: float, deadline: float) -> Row | None:
    """Returns the row of an arm that has ended or must be ended; None if it may continue."""
    if running_arm.process.poll() is not None:
        return _outcome(running_arm)
    if now > deadline:
        return {"status": NOT_RUN, "reason": "cut at the end of --minutes"}
    limit = running_arm.arm.seconds
    if now - running_arm.start_time > limit and not running_arm.is_waiting():
        return {"status": CUT, "reason": f"took more than {limit:.0f} s"}
    return None


def _begin_next_turn(running: Sequence[RunningArm], *, is_patient: bool) -> None:
    """Begins the turn of an arm that waits, if no other arm has its turn.

    Args:
      running: The arms of a wave.
      is_patient: Whether to wait first until no arm warms up any more.
    """
    if any(running_arm.has_turn for running_arm in running):
        return
    waiting = [running_arm for running_arm in running if running_arm.is_waiting()]
    others_warming_up = len(running) - len(waiting)
    if waiting and not (others_warming_up and is_patient):
        waiting[0].begin_turn(others_warming_up)


def _outcome(running_arm: RunningArm) -> Row:
    """Returns the row of an arm that ended: a benchmark's JSON, a run's summary, or its code."""
    folder = running_arm.folder
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    code = running_arm.process.returncode
    if code:
        return {
            "status": FAILED,
            "reason": f"code {code}: {scaling.failure_reason(log)[:200]}",
        }
    row: Mapping[str, Any] = {}
    for name in ("row.json", "run/summary.json"):
        if (folder / name).exists():
            row = files.read_json(folder / name)
    # The next start runs it again, perhaps with another --peer_python.
    if row.get("skipped") or row.get("peers") == {}:
        # The rest of the text is about options of another command.
        reason = str(row.get("skipped") or "the peer is not installed").partition(". ")[0]
        return {"status": NOT_RUN, "reason": f"{reason}; pass --peer_python"}
    return {
        **scaling.parse_result(log),
        **row,
        "beside": running_arm.others_warming_up,
        "status": MEASURED,
    }
