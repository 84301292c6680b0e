"""Stops real commands in every way and writes how they end.

`python -m tests.support.ends` writes tests/ends.csv, which takes six minutes on two idle cores.
`tests/resilience/test_ends.py --long` compares the exit codes with the table.

A row is a command, the moment at which it was stopped, and how: by signals, which are half a second
apart, or by the end of its reader. The other columns are fields of `End`.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from tests.data.support import jpeg
from tests.ranks import ROOT, environment
from tests.support import processes, program

TABLE = ROOT / "tests" / "ends.csv"
COLUMNS = ("command", "moment", "stopped_by", "exit_code", "saved", "answer_seconds", "stderr")
# How long to wait for the moment at which a command is stopped, and for its end.
PATIENCE = 300.0
BETWEEN_SIGNALS_SECONDS = 0.5

START = "start"
LOADING = "TensorFlow loads"
COMPILING = "the step compiles"
TRAINING = "training"
VALIDATION = "validation"
HEAD = "| head"
TEE = "Ctrl-C, 2>&1 | tee log"
TERMINAL = "terminal closed"
TRAIN = ("train",)
RUN = ("run", "-np", "2", "--")
FLAGS = (
    "--optimizer=sgd",
    "--model=resnet8",
    "--model_width=4",
    "--image_size=8",
    "--log_every_steps=1",
    "--checkpoint_every_epochs=5000",
    "--keep_best=false",
)
_DATA = ("--dataset=tfrecord", "--data_dir=DATA")
# Other commands. RUN and DATA are replaced by directories.
OTHERS = (
    ("evaluate", "RUN", *_DATA),
    ("predict", "RUN", "DATA/image.jpg"),
    ("export", "RUN", "--to=DATA/network.keras"),
    ("report", "RUN", "--out=DATA/report"),
    ("data check", *_DATA, "--num_classes=4", "--workers=2"),
    ("plan",),
    ("doctor",),
    ("bench input", "--source=synthetic"),
)
# How a training is stopped at each moment.
_STOPS = {
    START: ("INT", "TERM", "HUP", "USR1"),
    LOADING: ("INT", "TERM", TEE),
    COMPILING: ("INT", "INT INT", "INT INT INT", "TERM"),
    TRAINING: ("INT", "TERM", "HUP", "HUP HUP", "USR1", "USR1 TERM", HEAD, TEE, TERMINAL),
    VALIDATION: ("INT", "TERM"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Describes a row of the table: a command, the moment at which it is stopped, and how.

    A command is stopped by signals, one after the other, or by the end of its reader.
    """

    words: tuple[str, ...]
    moment: str
    stop: str

    @property
    def name(self) -> str:
        """Returns the command as the table names it."""
        return " ".join(self.words[:-1]) if self.words == RUN else self.words[0]

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the first cells of the row."""
        return self.name, self.moment, self.stop

    @property
    def trains(self) -> bool:
        """Returns whether the command trains."""
        return self.words in (TRAIN, RUN)


@dataclasses.dataclass(frozen=True)
class End:
    """Describes how a command ended.

    Attributes:
      code: The exit code.
      lines: Standard error after the stop.
      saved: How many of the steps are in the latest checkpoint.
      answer: Seconds until the first line on standard error; None if there was none.
      left: Names of the files that remained in the directory of temporary files.
    """

    code: int
    lines: tuple[str, ...]
    saved: str
    answer: float | None
    left: tuple[str, ...]


def cases() -> Iterator[Case]:
    """Yields the rows of the table in order."""
    for words in (TRAIN, RUN):
        for moment, stops in _STOPS.items():
            yield from (Case(words, moment, stop) for stop in stops)
    for words in OTHERS:
        yield Case(words, START, "INT")
    for words in OTHERS[:3]:
        yield Case(words, LOADING, "INT")
    yield Case(OTHERS[0], LOADING, "INT INT")
    yield Case(OTHERS[0], LOADING, TEE)
    yield Case(("plan",), START, HEAD)


def make_data(folder: pathlib.Path) -> None:
    """Makes the data that all commands need."""
    (folder / "DATA").mkdir()
    program.make_data(folder / "DATA")
    (folder / "DATA" / "image.jpg").write_bytes(jpeg(0, 40, 40))


def train(folder: pathlib.Path) -> None:
    """Trains one epoch, because the other commands need a run."""
    done = program.train(1, folder / "DATA", folder / "RUN", *FLAGS, "--epochs=1")
    assert done.returncode == 0, done.stderr


def end(case: Case, folder: pathlib.Path) -> End:
    """Runs a case to its end in a folder with data."""
    with tempfile.TemporaryDirectory(dir=folder) as case_folder:
        job = _Job(case, folder, pathlib.Path(case_folder))
        try:
            return job.end()
        finally:
            job.close()


class _Job:
    """Runs a case."""

    def __init__(self, case: Case, folder: pathlib.Path, case_folder: pathlib.Path):
        self.case = case
        self.run_dir = case_folder / "run"
        self.output = case_folder / "output"
        self.errors = case_folder / "errors"
        self.temporary = case_folder / "temporary"
        self.temporary.mkdir()
        words = [
            w.replace("RUN", str(folder / "RUN")).replace("DATA", str(folder / "DATA"))
            for w in case.words[1:]
        ]
        if case.trains:
            words += [
                *program.FLAGS,
                *FLAGS,
                f"--data_dir={folder}/DATA",
                f"--run_dir={self.run_dir}",
            ]
            words += [f"--epochs={3 if case.stop == HEAD else 5000}"]
            if case.moment == COMPILING and " " in case.stop:
                # The compilation must be long enough for three signals.
                words += ["--model=resnet50"]
        self.command = [sys.executable, "-m", "hybrid_imagenet", *case.words[0].split(), *words]
        self.reader: subprocess.Popen[bytes] | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        stop = self.case.stop
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            if stop == TERMINAL:
                self.master, terminal = pty.openpty()
                with os.fdopen(terminal, "wb") as end:
                    return self._popen(["setsid", "--ctty", *self.command], end, end, stdin=end)
            if stop in (HEAD, TEE):
                words = ["head", "-n", "1"] if stop == HEAD else ["tee", str(self.errors)]
                self.reader = self._popen(words, out, out, stdin=subprocess.PIPE, group=0)
                with self.reader.stdin as pipe:
                    return self._popen(
                        self.command, pipe, err if stop == HEAD else pipe, group=self.reader.pid
                    )
            return self._popen(self.command, out, err, group=0)

    def _popen(
        self, command, stdout, stderr, *, stdin=subprocess.DEVNULL, group=None
    ) -> subprocess.Popen[bytes]:
        # A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. The commands
        # would inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        set_group = None if group is None else lambda: os.setpgid(0, group)
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {"TMPDIR": str(self.temporary)},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=set_group,
        )

    def end(self) -> End:
        """Waits for the moment, stops the command, and waits for its end."""
        self._wait(self._reached)
        before = self.errors.stat().st_size
        start_time = time.monotonic()
        first, *others = self._stop_actions()
        first()
        self._wait(lambda: self.process.poll() is not None or self.errors.stat().st_size > before)
        answer = time.monotonic() - start_time if self.errors.stat().st_size > before else None
        for action in others:
            time.sleep(BETWEEN_SIGNALS_SECONDS)
            action()
        code = self.process.wait(PATIENCE)
        lines = self.errors.read_bytes()[before:].decode().splitlines()
        left = tuple(path.name for path in self.temporary.iterdir())
        return End(128 - code if code < 0 else code, tuple(lines), self._saved(), answer, left)

    def close(self) -> None:
        """Ends all processes."""
        for each in filter(None, (self.process, self.reader)):
            each.kill()
            each.wait()

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not reached():
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.case}: not in time: {self.errors.read_text()}")
            time.sleep(0.005)

    def _reached(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"{self.case} ended by itself: {self.errors.read_text()}")
        if self.case.moment == START:
            return _imports(self.process.pid)
        if self.case.moment == LOADING:
            pid = self.process.pid
            return any(
                "libtensorflow" in _read(f"/proc/{process}/maps")
                for process in (pid, *processes.descendants(pid))
            )
        if self.case.moment == COMPILING:
            return "compiling the step" in self.output.read_text()
        kinds = [record["kind"] for record in program.records(self.run_dir)]
        steps = kinds.count("step")
        epochs = kinds.count("epoch")
        steps_per_epoch = program.TRAIN // (8 if self.case.words == TRAIN else 16)
        if self.case.moment == VALIDATION:
            return steps == steps_per_epoch * (epochs + 1)
        return steps > steps_per_epoch

    def _stop_actions(self) -> list[Callable[[], None]]:
        """Returns functions that stop the command when they are called one after the other."""
        if self.case.stop == TERMINAL:
            return [lambda: os.close(self.master)]
        if self.case.stop == TEE:
            return [lambda: os.killpg(self.reader.pid, signal.SIGINT)]
        if self.case.stop == HEAD:
            return [self.reader.wait]
        actions = []
        for name in self.case.stop.split():
            # Ctrl-C reaches all processes in the foreground of the terminal.
            send = os.killpg if name == "INT" else os.kill
            actions.append(functools.partial(send, self.process.pid, getattr(signal, f"SIG{name}")))
        return actions

    def _saved(self) -> str:
        if not self.case.trains:
            return ""
        newest = max(
            (int(path.stem[5:]) for path in self.run_dir.glob("checkpoints/step-*.npz")), default=0
        )
        steps = max((record["step"] for record in program.records(self.run_dir)), default=0)
        if not newest:
            return "nothing"
        return "all" if newest >= steps else f"{newest} of {steps} steps"


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def _imports(process: int) -> bool:
    """Returns whether a command has set its signal handlers and imports its modules.

    It then catches SIGHUP or has loaded NumPy.
    """
    caught_signals = re.search(r"^SigCgt:\s*(\w+)", _read(f"/proc/{process}/status"), re.MULTILINE)
    hangup_bit = 1 << (signal.SIGHUP - 1)
    catches_hangup = bool(caught_signals) and bool(int(caught_signals[1], 16) & hangup_bit)
    return catches_hangup or "numpy" in _read(f"/proc/{process}/maps")


def write_table(ends: dict[Case, End]) -> None:
    """Writes the table."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for case, end in ends.items():
            answer = "" if end.answer is None else f"{end.answer:.1f}"
            writer.writerow([*case.key, end.code, end.saved, answer, "\n".join(end.lines)])


def main() -> None:
    """Runs all cases whose row contains the words of the command line, and prints how they ended.

    Without words, it runs all cases and writes the table.
    """
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        make_data(pathlib.Path(folder))
        train(pathlib.Path(folder))
        for case in cases():
            if all(word in " ".join(case.key) for word in sys.argv[1:]):
                results[case] = end(case, pathlib.Path(folder))
                print(*case.key, results[case], flush=True)
    if not sys.argv[1:]:
        write_table(results)


if __name__ == "__main__":
    main()
