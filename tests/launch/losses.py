"""Loses a rank or a host of a job at several moments, and writes how the job ends.

    dev/lab.sh --hosts=3 --slots=1 -- python -m tests.launch.losses [WORD ...]

It needs root. It prints a table as CSV. With words, the table has only the rows that contain all of
them. Without words, it is also written to tests/losses.csv.

Each job trains with one rank on each of three hosts and loses the last one, or the whole host.
`--stall_timeout` is 20, so a hung rank is reported after 10 s instead of 30 s. A row is a `Loss`;
the other columns are fields of `JobEnd`. On a host that is cut off, only ranks count as left.
"""

import csv
import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TextIO

from tests.ranks import ROOT
from tests.support import program

# How long to wait for a moment, and for the end of a job.
PATIENCE_SECONDS = 400.0
# How long the processes of an ended job may remain.
REMAIN_SECONDS = 120.0
VALIDATION_STEPS = 100
IMAGES = 240000
BATCH = 24
FLAGS = (
    "--dataset=synthetic",
    f"--num_examples={IMAGES}",
    "--model=tests.training.own_networks:small",
    "--image_size=16",
    "--precision=float32",
    "--per_gpu_batch=8",
    "--epochs=1",
    "--log_every_steps=10",
    "--stall_timeout=20",
    "--checkpoint_every_steps=10",
    "--keep_best=false",
    f"--eval_every_epochs={VALIDATION_STEPS * BATCH / IMAGES}",
)
START = "start"
TRAINING = "training"
VALIDATION = "validation"
KILLED = "rank killed"
STOPPED = "rank stopped"
CUT = "host cut"
NO_DAEMON = "mpirun's daemon killed"
# Patterns of pgrep. The brackets keep pgrep from finding the shell that contains the pattern.
RANK = "[b]in/python.*hybrid_imagenet.main"
JOB_PROCESSES = "[h]ybrid_imagenet.main|[o]rted|[m]pirun"
SIGNAL = f"until pgrep -f '{RANK}'; do sleep 0.1; done; kill -%s $(pgrep -n -f '{RANK}')"
COMMANDS = {
    KILLED: SIGNAL % "KILL",
    STOPPED: SIGNAL % "STOP",
    CUT: (
        "ip link set eth0 down; until [ -e {folder}/over ]; do sleep 0.1; done; ip link set eth0 up"
    ),
    NO_DAEMON: "pkill -KILL orted",
}
WATCH = "while pgrep -f '{processes}'; do sleep 0.1; done; touch {folder}/gone-{host}"
TABLE = ROOT / "tests" / "losses.csv"
COLUMNS = ("engine", "moment", "lost", "exit_code", "seconds", "saved", "left", "stderr")


@dataclasses.dataclass(frozen=True)
class Loss:
    """Describes a row of the table: the engine, the moment, and what is lost."""

    engine: str
    moment: str
    lost: str


@dataclasses.dataclass(frozen=True)
class JobEnd:
    """Describes how a job ended.

    Attributes:
      code: The exit code.
      seconds: Seconds from the loss to the end of the job.
      saved: The step of the latest checkpoint, and that of the last record.
      left: Hosts on which a process of the job remains.
      lines: Lines on standard error that name a culprit, without stacks.
      frame: The innermost frame of the first stack, or "".
    """

    code: int
    seconds: float
    saved: str
    left: tuple[str, ...]
    lines: tuple[str, ...]
    frame: str


def main() -> None:
    """Runs the jobs."""
    words = sys.argv[1:]
    rows: list[Sequence[str]] = [COLUMNS]
    write_rows(sys.stdout, rows)
    for loss in losses():
        cells = " ".join(dataclasses.astuple(loss))
        if not all(word in cells for word in words):
            continue
        with tempfile.TemporaryDirectory() as folder:
            job_end = run_job(loss, os.environ["HOSTS"], pathlib.Path(folder))
            log = (pathlib.Path(folder) / "log").read_text(errors="replace")
        rows.append(row(loss, job_end))
        write_rows(sys.stdout, rows[-1:])
        if "LOG" in os.environ:
            print(log, file=sys.stderr, flush=True)
        if not words:
            with TABLE.open("w", newline="", encoding="utf-8") as file:
                write_rows(file, rows)


def losses() -> Iterator[Loss]:
    """Yields the rows in order."""
    for engine in ("horovod", "tensorflow"):
        for moment in (START, TRAINING, VALIDATION):
            for lost in (KILLED, STOPPED, CUT):
                yield Loss(engine, moment, lost)
        yield Loss(engine, TRAINING, NO_DAEMON)


def run_job(loss: Loss, hosts: str, folder: pathlib.Path) -> JobEnd:
    """Runs a job, causes a loss on the last host, and waits for the end."""
    names = [host.partition(":")[0] for host in hosts.split(",")]
    launcher = [sys.executable, "-m", "hybrid_imagenet", "run", "-H", hosts]
    launcher += ["--network-interfaces", "eth0", "--"]
    flags = [*FLAGS, f"--engine={loss.engine}", f"--run_dir={folder}/run"]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen([*launcher, *flags], stdout=log, stderr=log)
    _wait(lambda: _has_reached(loss.moment, folder), job, folder)
    if loss.moment == VALIDATION:
        time.sleep(1.0)
    for host in names:
        # Open MPI's daemon on a host that is cut off may wait until TCP gives up, if it was sending
        # the output of a rank. So only the rank counts there.
        is_cut = loss.lost == CUT and host == names[-1]
        processes = RANK if is_cut else JOB_PROCESSES
        _start(host, WATCH.format(processes=processes, folder=folder, host=host))
    began = time.time()
    _start(names[-1], COMMANDS[loss.lost].format(folder=folder))
    code = job.wait(PATIENCE_SECONDS)
    seconds = time.time() - began
    deadline = time.time() + REMAIN_SECONDS
    while len(list(folder.glob("gone-*"))) < len(names) and time.time() < deadline:
        time.sleep(0.1)
    left = tuple(host for host in names if not (folder / f"gone-{host}").exists())
    # Lets a host that was cut off connect again.
    (folder / "over").touch()
    while subprocess.run(
        ["ssh", "-o", "ConnectTimeout=1", names[-1], "true"], capture_output=True
    ).returncode:
        time.sleep(0.1)
    log_lines = (folder / "log").read_text(errors="replace").splitlines()
    culprits = re.compile(r"error: |stall: rank|ssh: |Timeout,")
    frames = [line[9:] for line in log_lines if line.startswith("stall:   ")]
    return JobEnd(
        code=code,
        seconds=seconds,
        saved=_saved(folder),
        left=left,
        lines=tuple(line for line in log_lines if culprits.match(line)),
        frame=re.sub(r"\S*site-packages/", "", frames[0]) if frames else "",
    )


def row(loss: Loss, end: JobEnd) -> list[str]:
    """Returns the row of a job in the table."""
    lines = list(end.lines)
    if end.frame:
        lines.append(f"(stack: {end.frame} ...)")
    return [
        *dataclasses.astuple(loss),
        str(end.code),
        f"{end.seconds:.0f}",
        end.saved,
        ", ".join(end.left) or "none",
        "\n".join(lines),
    ]


def write_rows(file: TextIO, rows: Iterable[Sequence[str]]) -> None:
    """Writes rows as CSV, at once."""
    csv.writer(file, lineterminator="\n").writerows(rows)
    file.flush()


def _start(host: str, command: str) -> None:
    """Starts a shell command on a host, which continues after the connection has ended."""
    words = f"setsid sh -c {shlex.quote(command)} >/dev/null 2>&1 </dev/null &"
    subprocess.run(["ssh", host, words], check=True)


def _wait(
    is_reached: Callable[[], bool], job: subprocess.Popen[bytes], folder: pathlib.Path
) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_reached():
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"the moment did not come, exit code {job.poll()}\n{(folder / 'log').read_text()}"
            )
        time.sleep(0.1)


def _has_reached(moment: str, folder: pathlib.Path) -> bool:
    if moment == START:
        return "loading TensorFlow" in (folder / "log").read_text()
    return _last_step(folder) >= (20 if moment == TRAINING else VALIDATION_STEPS)


def _last_step(folder: pathlib.Path) -> int:
    records = program.records(folder / "run")
    return max((record["step"] for record in records if "step" in record), default=0)


def _saved(folder: pathlib.Path) -> str:
    paths = folder.glob("run/checkpoints/step-*.npz")
    latest = max((int(path.stem.removeprefix("step-")) for path in paths), default=0)
    return f"{latest} of {_last_step(folder)}" if latest else "nothing"


if __name__ == "__main__":
    main()
