"""Runs all measurements of one GPU within a few minutes: `hybrid-imagenet bench gpu --arms`.

    hybrid-imagenet bench gpu --arms --minutes=9 --out=arms

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
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import scaling, start
from hybrid_imagenet.benchmarks.arms_table import ARMS, SPEED, Arm, Row
from hybrid_imagenet.comm import gpus
from hybrid_imagenet.errors import EXIT_OK, UserError
from hybrid_imagenet.tools import command_line

_EPILOG = """\
Examples:
Measure one GPU in less than ten minutes:
  hybrid-imagenet bench gpu --arms
Try the arms without a GPU:
  hybrid-imagenet bench gpu --arms --rehearse --minutes=5"""

MEASURED, FAILED, CUT, NOT_RUN = "measured", "failed", "cut", "not run"
_ROOT = Path(__file__).parents[2]
_LOOK_SECONDS = 0.1
_GRACE_SECONDS = 3.0
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
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the arms too
    try:
        run(arms, table, options, deadline)
    finally:
        signal.signal(signal.SIGTERM, before)
        table.write()
        print("\n".join(table.lines()), flush=True)
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser("bench gpu --arms", (__doc__ or "").split("\n")[0], epilog=_EPILOG)
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
        "--again",
        action="store_true",
        help="repeat measurements that the table in --out already has",
    )
    scaling.add_round_options(parser, steps=20, rounds=3)
    parser.add_argument(
        "--parallel", type=command_line.positive_int,
        default=max(1, len(os.sched_getaffinity(0)) // 2),
        help="measurements that prepare at the same time (default: half of the cores, %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--patience",
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
    return [arm for arm in ARMS if not names or arm.name in names]


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
        first = subprocess.run(
            words, capture_output=True, text=True, check=True
        ).stdout.splitlines()[0]
        name, memory, free, driver = (word.strip() for word in first.split(","))
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
        done = subprocess.run(words, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


class Table:
    """The arms with what became of them, kept in a directory.

    Attributes:
      folder: of the table; each arm has a directory in it.
      arms: in their order.
      machine: see `_machine`.
      rows: what was measured, by the arm's name, with `status` and, of a failed arm, `reason`.
    """

    def __init__(self, folder: Path, arms: Sequence[Arm], machine: Row) -> None:
        """Reads what an earlier start has left in the directory.

        Raises:
          UserError: if the directory cannot be used.
        """
        self.folder, self.arms, self.machine = folder, list(arms), machine
        self.rows: dict[str, Row] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            found = json.loads((folder / "arms.json").read_text(encoding="utf-8"))
            self.rows = {row.pop("arm"): row for row in found["arms"] if row["status"] != NOT_RUN}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"--out={folder}: cannot be used ({error}): give another directory"
            ) from None

    def add(self, arm: Arm, row: Row) -> None:
        """Takes what became of an arm, writes the table and prints a line."""
        self.rows[arm.name] = row
        self.write()
        print(f"{arm.name}: {self.verdict(arm)}", flush=True)

    def verdict(self, arm: Arm) -> str:
        """Returns the verdict of an arm's rule on the rows so far, or why it has no row."""
        row = self.rows.get(arm.name, {"status": NOT_RUN})
        if row["status"] != MEASURED:
            return ": ".join(filter(None, [row["status"], row.get("reason", "")]))
        other = self.rows.get(arm.than, {"status": NOT_RUN})
        if arm.than and other["status"] != MEASURED:
            return f"no verdict: {arm.than} was not measured"
        base, again = (
            self.rows.get(name, {}).get("images_per_second") for name in ("base", "again")
        )
        noise = abs(again / base - 1) if base and again else 0.0
        return arm.judge(row, other | {"arm": arm.than}, self.machine | {"noise": noise})

    def write(self) -> None:
        """Writes arms.json and arms.md, each whole or not at all."""
        rows = [
            {"arm": arm.name, "rule": arm.rule, "verdict": self.verdict(arm)}
            | self.rows.get(arm.name, {"status": NOT_RUN})
            for arm in self.arms
        ]
        report = {"benchmark": "arms", "commit": commit(), "machine": self.machine, "arms": rows}
        for name, text in (
            ("arms.json", json.dumps(report, indent=1)),
            ("arms.md", "\n".join(self.lines())),
        ):
            with files.atomic_replace(self.folder / name) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")

    def lines(self) -> Iterator[str]:
        """The table in Markdown."""
        yield f"{self.machine['gpu'] or 'no GPU: a rehearsal'}, {self.machine['memory_gb']:.0f} GB"
        yield ""
        yield "| arm | images/s | ms a step | first steps s | memory GB | rule | verdict |"
        yield "|---|---:|---:|---:|---:|---|---|"
        for arm in self.arms:
            row = self.rows.get(arm.name, {})
            numbers = (
                ("images_per_second", 1),
                ("step_seconds", 1e3),
                ("first_seconds", 1),
                ("gpu_bytes", 1e-9),
            )
            cells = [f"{row[key] * scale:,.1f}" if row.get(key) else "" for key, scale in numbers]
            words = [text.replace("|", "/") for text in (arm.rule, self.verdict(arm))]
            yield f"| {arm.name} | {' | '.join([*cells, *words])} |"


@dataclasses.dataclass
class Running:
    """An arm whose process runs.

    Attributes:
      arm: the arm.
      folder: where its process writes.
      process: the process.
      since: when it started, or when its turn began.
      going: whether its turn has begun.
      others_warming_up: how many arms were warming up when its turn began.
    """

    arm: Arm
    folder: Path
    process: subprocess.Popen[bytes]
    since: float
    going: bool = False
    others_warming_up: int = 0

    def ready(self) -> bool:
        """Whether it waits for its turn."""
        return not self.going and (self.folder / scaling.READY_FILE).exists()

    def go(self, others_warming_up: int) -> None:
        """Lets it be timed while this many arms still warm up."""
        (self.folder / scaling.GO_FILE).touch()
        self.going = True
        self.others_warming_up = others_warming_up
        self.since = time.monotonic()


def run(arms: Sequence[Arm], table: Table, options: argparse.Namespace, deadline: float) -> None:
    """Runs those arms that the table lacks in waves, until all have ended or the time is over."""
    failed = {
        name for name, row in table.rows.items() if row["status"] == FAILED
    }  # memory may have been short
    waiting = [
        arm for arm in arms if options.again or arm.name not in table.rows or arm.name in failed
    ]
    waiting.sort(key=lambda arm: arm.name in failed)
    table.rows = {
        name: row for name, row in table.rows.items() if name not in {arm.name for arm in waiting}
    }
    for arm in list(waiting):
        if missing := arm.missing(options):
            waiting.remove(arm)
            table.add(arm, {"status": NOT_RUN, "reason": missing})
    while waiting and time.monotonic() < deadline:
        chosen = _wave(waiting, options, _MEMORY_SHARE * table.machine["memory_gb"])
        running = [_start(arm, table, options) for arm in chosen]
        waiting = [arm for arm in waiting if arm not in chosen]
        try:
            _finish(running, table, options, deadline)
        finally:
            for one in running:
                start.end(one.process, _GRACE_SECONDS)


def _wave(waiting: Sequence[Arm], options: argparse.Namespace, gigabytes: float) -> list[Arm]:
    """Returns the arms that run at the same time next.

    These are the first one, and later ones of its kind that fit into memory with it.
    """
    chosen = [waiting[0]]
    for arm in waiting[1:]:
        alike = arm.timed == chosen[0].timed and not arm.alone and not chosen[0].alone
        room = sum(one.gigabytes for one in [*chosen, arm]) <= gigabytes
        if alike and room and len(chosen) < options.parallel:
            chosen.append(arm)
    return chosen


def _start(arm: Arm, table: Table, options: argparse.Namespace) -> Running:
    folder = (table.folder / arm.name).resolve()
    # An earlier start may have left it.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    added = {name: value.format(out=folder.parent) for name, value in arm.environment}
    environment = os.environ | added | {scaling.TURN_VARIABLE: str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])
    )
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
    return Running(arm, folder, process, time.monotonic())


def _finish(
    running: list[Running], table: Table, options: argparse.Namespace, deadline: float
) -> None:
    """Waits for the arms of a wave and gives each its turn; those that take too long are ended."""
    began = time.monotonic()
    while running:
        now = time.monotonic()
        for one in list(running):
            if one.process.poll() is not None:
                row = _outcome(one)
            elif now > deadline:
                row = {"status": NOT_RUN, "reason": "cut at the end of --minutes"}
            elif now - one.since > one.arm.seconds and not one.ready():
                row = {"status": CUT, "reason": f"took more than {one.arm.seconds:.0f} s"}
            else:
                continue
            start.end(one.process, _GRACE_SECONDS)
            table.add(one.arm, row)
            running.remove(one)
        warming = [one for one in running if not one.going and not one.ready()]
        if not any(one.going for one in running) and (
            not warming or now - began > options.patience
        ):
            for one in [one for one in running if one.ready()][:1]:
                one.go(len(warming))
        time.sleep(_LOOK_SECONDS)


def _outcome(one: Running) -> Row:
    """Returns the row of an arm that ended: a benchmark's JSON, a run's summary, or its code."""
    said = (one.folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    if one.process.returncode:
        return {
            "status": FAILED,
            "reason": f"code {one.process.returncode}: {scaling.failure_reason(said)[:200]}",
        }
    row: Mapping[str, Any] = {}
    for name in ("row.json", "run/summary.json"):
        if (one.folder / name).exists():
            row = files.read_json(one.folder / name)
    return {
        **scaling.parse_result(said),
        **row,
        "beside": one.others_warming_up,
        "status": MEASURED,
    }
