"""Stops real commands in every way and writes how they end: `python -m tests.support.ends` makes
docs/dev/ends.md.

It takes six minutes on two idle cores. `tests/resilience/test_ends.py --long` compares the exit
codes with the page.
"""

from __future__ import annotations

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

PAGE = ROOT / "docs" / "dev" / "ends.md"
SEVERAL = "\n## On several hosts\n"
"""The heading of what `tests.launch.losses` writes on the page."""
PATIENCE = 300.0  # seconds for a moment to come, and for an end
BETWEEN = 0.5  # seconds between two signals

START, LOADING, COMPILING = "start", "TensorFlow loads", "the step compiles"
TRAINING, VALIDATION = "training", "validation"
HEAD, TEE, TERMINAL = "`\\| head`", "Ctrl-C, `2>&1 \\| tee log`", "terminal closed"
TRAIN, RUN = ("train",), ("run", "-np", "2", "--")
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
"""Other commands; RUN and DATA stand for directories."""
_WAYS = {
    START: ("INT", "TERM", "HUP", "USR1"),
    LOADING: ("INT", "TERM", TEE),
    COMPILING: ("INT", "INT INT", "INT INT INT", "TERM"),
    TRAINING: ("INT", "TERM", "HUP", "HUP HUP", "USR1", "USR1 TERM", HEAD, TEE, TERMINAL),
    VALIDATION: ("INT", "TERM"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A row: a command, the moment at which it is stopped, and how: signals one after the other, or
    by its output.
    """

    words: tuple[str, ...]
    moment: str
    way: str

    @property
    def name(self) -> str:
        """The command as the table names it."""
        return " ".join(self.words[:-1]) if self.words == RUN else self.words[0]

    @property
    def key(self) -> tuple[str, str, str]:
        """The first cells of its row."""
        return self.name, self.moment, self.way

    @property
    def trains(self) -> bool:
        """Whether it trains."""
        return self.words in (TRAIN, RUN)


@dataclasses.dataclass(frozen=True)
class End:
    """What became of it.

    Attributes:
      answer: seconds until the first line on standard error, None without one.
      left: what lies in the directory of temporary files.
    """

    code: int
    lines: tuple[str, ...]
    saved: str
    answer: float | None
    left: tuple[str, ...]


def cases() -> Iterator[Case]:
    """Yields the rows of the table in order."""
    for words in (TRAIN, RUN):
        for moment, ways in _WAYS.items():
            yield from (Case(words, moment, way) for way in ways)
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
    """Makes the run of one epoch that the other commands need, too."""
    done = program.train(1, folder / "DATA", folder / "RUN", *FLAGS, "--epochs=1")
    assert done.returncode == 0, done.stderr


def end(case: Case, folder: pathlib.Path) -> End:
    """Runs a case to its end in a folder with data."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        job = _Job(case, folder, pathlib.Path(own))
        try:
            return job.end()
        finally:
            job.close()


class _Job:
    """A case under way."""

    def __init__(self, case: Case, folder: pathlib.Path, own: pathlib.Path):
        self.case, self.run_dir = case, own / "run"
        self.output, self.errors, self.temporary = own / "output", own / "errors", own / "temporary"
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
            words += [f"--epochs={3 if case.way == HEAD else 5000}"]
            if case.moment == COMPILING and " " in case.way:
                words += ["--model=resnet50"]  # long enough for three signals
        self.command = [sys.executable, "-m", "hybrid_imagenet", *case.words[0].split(), *words]
        self.reader: subprocess.Popen[bytes] | None = None
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        way = self.case.way
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            if way == TERMINAL:
                self.master, terminal = pty.openpty()
                with os.fdopen(terminal, "wb") as end:
                    return self._popen(["setsid", "--ctty", *self.command], end, end, stdin=end)
            if way in (HEAD, TEE):
                words = ["head", "-n", "1"] if way == HEAD else ["tee", str(self.errors)]
                self.reader = self._popen(words, out, out, stdin=subprocess.PIPE, group=0)
                with self.reader.stdin as pipe:
                    return self._popen(
                        self.command, pipe, err if way == HEAD else pipe, group=self.reader.pid
                    )
            return self._popen(self.command, out, err, group=0)

    def _popen(
        self, command, stdout, stderr, *, stdin=subprocess.DEVNULL, group=None
    ) -> subprocess.Popen[bytes]:
        # A shell makes what it starts in the background ignore SIGINT, and nohup SIGHUP; our
        # processes would, too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        own = None if group is None else lambda: os.setpgid(0, group)
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment() | {"TMPDIR": str(self.temporary)},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            preexec_fn=own,
        )

    def end(self) -> End:
        """Waits for the moment, stops the command, and waits for its end."""
        self._wait(self._reached)
        before, began = self.errors.stat().st_size, time.monotonic()
        first, *further = self._ways()
        first()
        self._wait(lambda: self.process.poll() is not None or self.errors.stat().st_size > before)
        answer = time.monotonic() - began if self.errors.stat().st_size > before else None
        for way in further:
            time.sleep(BETWEEN)
            way()
        code = self.process.wait(PATIENCE)
        lines = self.errors.read_bytes()[before:].decode().splitlines()
        left = tuple(path.name for path in self.temporary.iterdir())
        return End(128 - code if code < 0 else code, tuple(lines), self._saved(), answer, left)

    def close(self) -> None:
        """Leaves no process."""
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
            own = self.process.pid
            return any(
                "libtensorflow" in _read(f"/proc/{each}/maps")
                for each in (own, *processes.descendants(own))
            )
        if self.case.moment == COMPILING:
            return "compiling the step" in self.output.read_text()
        steps, epochs = (
            sum(record["kind"] == kind for record in program.records(self.run_dir))
            for kind in ("step", "epoch")
        )
        whole = program.TRAIN // (8 if self.case.words == TRAIN else 16)
        return steps == whole * (epochs + 1) if self.case.moment == VALIDATION else steps > whole

    def _ways(self) -> list[Callable[[], None]]:
        """Returns what stops it, one after the other."""
        if self.case.way == TERMINAL:
            return [lambda: os.close(self.master)]
        if self.case.way == TEE:
            return [lambda: os.killpg(self.reader.pid, signal.SIGINT)]
        if self.case.way == HEAD:
            return [self.reader.wait]
        own, ways = self.process.pid, []
        for name in self.case.way.split():
            send = (
                os.killpg if name == "INT" else os.kill
            )  # Ctrl-C is for all in the terminal's foreground
            ways.append(functools.partial(send, own, getattr(signal, f"SIG{name}")))
        return ways

    def _saved(self) -> str:
        if not self.case.trains:
            return ""
        newest = max(
            (int(path.stem[5:]) for path in self.run_dir.glob("checkpoints/step-*.npz")), default=0
        )
        steps = max((record["step"] for record in program.records(self.run_dir)), default=0)
        return (
            "all"
            if newest and newest >= steps
            else f"{newest} of {steps} steps"
            if newest
            else "nothing"
        )


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def _imports(process: int) -> bool:
    """Whether a command has its handlers and imports its modules: it reads the package's files or
    has NumPy already.
    """
    caught = re.search(r"^SigCgt:\s*(\w+)", _read(f"/proc/{process}/status"), re.MULTILINE)
    hangs_up = bool(caught) and bool(int(caught[1], 16) & 1 << (signal.SIGHUP - 1))
    return hangs_up or "numpy" in _read(f"/proc/{process}/maps")


def table(ends: dict[Case, End]) -> str:
    """Returns the page."""
    lines = [
        "# How commands end",
        "",
        (
            "Written by `python -m tests.support.ends` from real runs: do not edit. A row is a"
            " command, the moment at"
        ),
        (
            "which it was stopped, and how. Signals are half a second apart. `saved`: which of the"
            " steps done are in the"
        ),
        "newest checkpoint. `answer`: seconds until the first line on standard error.",
        "",
        "| command | moment | stopped by | exit code | saved | answer | on standard error |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, end in ends.items():
        said = "<br>".join(end.lines).replace("|", "\\|")
        answer = "" if end.answer is None else f"{end.answer:.1f}"
        lines.append(
            f"| {case.name} | {case.moment} | {case.way} | {end.code} | {end.saved} | {answer} |"
            f" {said} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs all cases whose row holds the words of the command line, and prints them; without words,
    writes the page.
    """
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        make_data(pathlib.Path(folder))
        train(pathlib.Path(folder))
        for case in cases():
            if all(word in " ".join(case.key) for word in sys.argv[1:]):
                found[case] = end(case, pathlib.Path(folder))
                print(*case.key, found[case], flush=True)
    if not sys.argv[1:]:
        PAGE.write_text("".join((table(found), *PAGE.read_text().partition(SEVERAL)[1:])))


if __name__ == "__main__":
    main()
