"""Loses a rank or a host of a training at each moment and writes how the job ends. Needs root.

    launch/lab.sh --hosts=3 --slots=1 -- python -m tests.launch.losses [WORD ...]

It prints the rows that hold all the words. Without words it writes them to docs/dev/ends.md.
"""

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from tests.support import ends, program

PATIENCE = 400.0  # seconds for a moment to come, and for an end
GONE = 120.0  # seconds for the processes of an ended job to go
EVERY = 100  # steps between two validations
FLAGS = (
    *(
        "--dataset=synthetic",
        "--num_examples=240000",
        "--model=tests.training.own_networks:small",
        "--image_size=16",
    ),
    *(
        "--precision=float32",
        "--per_gpu_batch=8",
        "--epochs=1",
        "--log_every_steps=10",
        "--stall_timeout=20",
    ),
    *(
        "--checkpoint_every_steps=10",
        "--keep_best=false",
        f"--eval_every_epochs={EVERY * 24 / 240000}",
    ),
)
START, TRAINING, VALIDATION = "start", "training", "validation"
KILLED, STOPPED, CUT, NO_DAEMON = (
    "rank killed",
    "rank stopped",
    "host cut",
    "mpirun's daemon killed",
)
RANK = "[b]in/python.*hybrid_imagenet.main"
SIGNAL = f"until pgrep -f '{RANK}'; do sleep 0.1; done; kill -%s $(pgrep -n -f '{RANK}')"
WAYS = {
    KILLED: SIGNAL % "KILL",
    STOPPED: SIGNAL % "STOP",
    CUT: (
        "ip link set eth0 down; until [ -e {folder}/over ]; do sleep 0.1; done; ip link set eth0 up"
    ),
    NO_DAEMON: "pkill -KILL orted",
}
WATCH = "while pgrep -f '{processes}'; do sleep 0.1; done; touch {folder}/gone-{host}"
OURS = "[h]ybrid_imagenet.main|[o]rted|[m]pirun"


@dataclasses.dataclass(frozen=True)
class Loss:
    """A row: what connects the ranks, the moment, and what is lost."""

    engine: str
    moment: str
    way: str


@dataclasses.dataclass(frozen=True)
class End:
    """What became of the job.

    Attributes:
      code: the exit code.
      seconds: from the loss to the job's end.
      saved: the step of the newest checkpoint, and the last one recorded.
      left: hosts on which a process of the job stays.
      lines: those on standard error that name a culprit, without the stacks.
      stack: the innermost frame of the first stack.
    """

    code: int
    seconds: float
    saved: str
    left: tuple[str, ...]
    lines: tuple[str, ...]
    stack: str


def losses() -> Iterator[Loss]:
    """Yields the rows in order."""
    for engine in ("horovod", "tensorflow"):
        for moment in (START, TRAINING, VALIDATION):
            yield from (Loss(engine, moment, way) for way in (KILLED, STOPPED, CUT))
        yield Loss(engine, TRAINING, NO_DAEMON)


def end(loss: Loss, hosts: str, folder: pathlib.Path) -> End:
    """Runs a training, loses what the row says of the last host, and waits for the end."""
    names = [host.partition(":")[0] for host in hosts.split(",")]
    words = [
        sys.executable,
        "-m",
        "hybrid_imagenet",
        "run",
        "-H",
        hosts,
        "--network-interfaces",
        "eth0",
        "--",
        *FLAGS,
    ]
    with (folder / "log").open("w") as log:
        job = subprocess.Popen(
            [*words, f"--engine={loss.engine}", f"--run_dir={folder}/run"], stdout=log, stderr=log
        )
    _wait(lambda: _reached(loss.moment, folder), job, folder)
    time.sleep(1.0 if loss.moment == VALIDATION else 0.0)
    for host in names:
        # A daemon that was cut off while it sent a rank's output waits until TCP gives up.
        ours = RANK if (loss.way, host) == (CUT, names[-1]) else OURS
        _begin(host, WATCH.format(processes=ours, folder=folder, host=host))
    began = time.time()
    _begin(names[-1], WAYS[loss.way].format(folder=folder))
    code = job.wait(PATIENCE)
    seconds, until = time.time() - began, time.time() + GONE
    while len(list(folder.glob("gone-*"))) < len(names) and time.time() < until:
        time.sleep(0.1)
    left = tuple(host for host in names if not (folder / f"gone-{host}").exists())
    (folder / "over").touch()
    while subprocess.run(
        ["ssh", "-o", "ConnectTimeout=1", names[-1], "true"], capture_output=True
    ).returncode:
        time.sleep(0.1)
    lines = (folder / "log").read_text(errors="replace").splitlines()
    said = tuple(line for line in lines if re.match(r"error: |stall: rank|ssh: |Timeout,", line))
    stack = next(
        (
            re.sub(r"\S*site-packages/", "", line[9:])
            for line in lines
            if line.startswith("stall:   ")
        ),
        "",
    )
    return End(code, seconds, _saved(folder), left, said, stack)


def _begin(host: str, command: str) -> None:
    """Starts a command of the shell that needs no connection any more."""
    words = f"setsid sh -c {shlex.quote(command)} >/dev/null 2>&1 </dev/null &"
    subprocess.run(["ssh", host, words], check=True)


def _wait(reached, job: subprocess.Popen[bytes], folder: pathlib.Path) -> None:
    until = time.monotonic() + PATIENCE
    while not reached():
        if job.poll() is not None or time.monotonic() > until:
            raise SystemExit(
                f"the moment did not come, exit code {job.poll()}\n{(folder / 'log').read_text()}"
            )
        time.sleep(0.1)


def _steps(folder: pathlib.Path) -> int:
    return max((r["step"] for r in program.records(folder / "run") if "step" in r), default=0)


def _reached(moment: str, folder: pathlib.Path) -> bool:
    if moment == START:
        return "loading TensorFlow" in (folder / "log").read_text()
    return _steps(folder) >= (20 if moment == TRAINING else EVERY)


def _saved(folder: pathlib.Path) -> str:
    newest = max(
        (int(path.stem[5:]) for path in folder.glob("run/checkpoints/step-*.npz")), default=0
    )
    return f"{newest} of {_steps(folder)}" if newest else "nothing"


def table(found: dict[Loss, End]) -> str:
    """Returns the section of the page."""
    lines = [
        ends.SEVERAL,
        (
            "Written by `launch/lab.sh --hosts=3 --slots=1 -- python -m tests.launch.losses` from"
            " real runs: do not edit."
        ),
        (
            "A training of a rank on each of three hosts loses the last one. As `--stall_timeout`"
            " is 20, a hung rank is"
        ),
        (
            "named after 10 s, not after 30 s. `seconds`: from the loss to the end of the job."
            " `saved`: the step of the"
        ),
        (
            "newest checkpoint of the last recorded one. `left`: hosts on which a process of the"
            " job stays; of one that is"
        ),
        "cut off, ranks alone count.",
        "",
        "| engine | moment | lost | exit code | seconds | saved | left | on standard error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for loss, end in found.items():
        said = "<br>".join(
            [*end.lines, *([f"(stack: {end.stack} ...)"] if end.stack else [])]
        ).replace("|", "\\|")
        cells = (
            *dataclasses.astuple(loss),
            end.code,
            f"{end.seconds:.0f}",
            end.saved,
            ", ".join(end.left) or "none",
        )
        lines.append(f"| {' | '.join(map(str, cells))} | {said} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs the rows."""
    found = {}
    for loss in losses():
        if all(word in " ".join(dataclasses.astuple(loss)) for word in sys.argv[1:]):
            with tempfile.TemporaryDirectory() as folder:
                found[loss] = end(loss, os.environ["HOSTS"], pathlib.Path(folder))
                log = (pathlib.Path(folder) / "log").read_text(errors="replace")
            print(table({loss: found[loss]}).splitlines()[-1], flush=True)
            if "LOG" in os.environ:
                print(log, flush=True)
            if not sys.argv[1:]:
                ends.PAGE.write_text(
                    ends.PAGE.read_text().partition(ends.SEVERAL)[0] + table(found)
                )


if __name__ == "__main__":
    main()
