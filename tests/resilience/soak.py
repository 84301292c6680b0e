"""A run of two ranks with a random fault every so often: `python -m tests.resilience.soak --minutes 30`.

Whenever a fault ends the run it is started again with --resume. When the time is over it is finished undisturbed; then
every epoch must be recorded once, with the right number of steps, no process and no temporary file may be left, and
neither memory nor file handles may have grown. Prints a line per fault and the figures; exits with 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import threading
import time

from tests.support import processes, program

RANKS = 2
STEPS = program.TRAIN // (8 * RANKS)  # per epoch
FLAGS = ("--optimizer=sgd", "--checkpoint_every_epochs=2", "--stall_seconds=45", "--progress=plain")
GROWTH_MB, GROWTH_FILES = 100, 5  # within a session, after its first epochs
FAULTS = (
    *("rank killed", "launcher killed", "all killed", "signal to stop", "rank stopped", "disk full"),
    *("rank paused for 3 s", "newest checkpoint damaged"),
)


class Session:
    """One start of the run, whose ranks' memory and open files are sampled."""

    def __init__(self, data: pathlib.Path, run_dir: pathlib.Path, *flags: str):
        before = max((r["step"] for r in program.records(run_dir)), default=0)
        self.run = program.Running(RANKS, data, run_dir, *FLAGS, *flags)
        self.samples: dict[int, list[tuple[float, int]]] = collections.defaultdict(list)
        self.ranks: dict[int, int] = {}
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        deadline = time.monotonic() + 600
        while max((r["step"] for r in program.records(run_dir)), default=0) < before + 2 * STEPS:
            if self.run.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not get going:\n{self.output}")
            time.sleep(0.2)
        self.ranks = processes.ranks(self.run.process.pid)

    def _read(self) -> None:
        for line in self.run.process.stdout:
            self.output += line

    def watch(self, seconds: float) -> bool:
        """Samples for a time; returns whether the run still goes on."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.run.process.poll() is None:
            for rank, process in self.ranks.items():
                try:
                    pages = int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
                    files = len(list(pathlib.Path(f"/proc/{process}/fd").iterdir()))
                except (OSError, IndexError):
                    continue
                self.samples[rank].append((pages * resource.getpagesize() / 1e6, files))
            time.sleep(1)
        return self.run.process.poll() is None

    def end(self, timeout: float = 300) -> int:
        """The exit code; the ranks must be gone with it."""
        code = self.run.process.wait(timeout)
        if not processes.gone_within(self.ranks.values(), 15):
            raise SystemExit(f"ranks were left behind: {self.ranks}")
        self._reader.join(10)
        return code

    def growth(self) -> tuple[float, int]:
        """MB and open files by which the last third of the samples lies above the first, for the worst rank."""
        grown = [(0.0, 0)]
        for samples in self.samples.values():
            third = len(samples) // 3
            if third >= 5:
                first, last = samples[:third], samples[-third:]
                grown.append(
                    (
                        min(m for m, _ in last) - min(m for m, _ in first),
                        min(f for _, f in last) - min(f for _, f in first),
                    )
                )
        return max(m for m, _ in grown), max(f for _, f in grown)


def strike(fault: str, session: Session, generator: random.Random) -> set[int]:
    """Does it; returns the exit codes that the run may end with, none if it must go on."""
    launcher = session.run.process.pid
    victim = session.ranks[generator.randrange(RANKS)]
    if fault == "rank killed":
        os.kill(victim, signal.SIGKILL)
        return {137}
    if fault == "launcher killed":
        os.kill(launcher, signal.SIGKILL)
        return {-9}
    if fault == "signal to stop":
        os.kill(launcher, signal.SIGUSR1)
        return {75}
    if fault == "rank stopped":
        os.kill(victim, signal.SIGSTOP)
        return {4}
    if fault == "disk full":  # the system's limit on the size of files stands in for it
        resource.prlimit(session.ranks[0], resource.RLIMIT_FSIZE, (20 << 20, 20 << 20))
        return {2}
    if fault == "rank paused for 3 s":
        os.kill(victim, signal.SIGSTOP)
        time.sleep(3)
        os.kill(victim, signal.SIGCONT)
        return set()
    os.killpg(launcher, signal.SIGKILL)
    if fault == "newest checkpoint damaged":
        processes.gone_within(session.ranks.values(), 15)
        damage(session.run.run_dir, generator)
    return {-9}


def damage(run_dir: pathlib.Path, generator: random.Random) -> None:
    """Cuts the newest checkpoint short, if there is an older one."""
    paths = sorted((run_dir / "checkpoints").glob("step-*.npz"))
    if len(paths) > 1:
        os.truncate(paths[-1], generator.randrange(paths[-1].stat().st_size))


def soak(minutes: float, every: float, seed: int, folder: pathlib.Path) -> list[str]:
    """Runs it; returns what was wrong."""
    generator, data, run_dir = random.Random(seed), program.make_data(folder / "data"), folder / "run"
    wrong: list[str] = []
    faults: collections.Counter[str] = collections.Counter()
    growths, began = [(0.0, 0)], time.monotonic()
    queue: list[str] = []
    session = Session(data, run_dir, "--epochs=100000")
    while True:
        session.watch(min(every, max(1.0, began + 60 * minutes - time.monotonic())))
        over = time.monotonic() - began >= 60 * minutes
        queue = queue or generator.sample(FAULTS, len(FAULTS))
        fault = "signal to stop" if over else queue.pop()
        if session.run.process.poll() is not None:
            raise SystemExit(f"ended without a fault:\n{session.output}")
        codes = strike(fault, session, generator)
        faults[fault] += 1
        step = max(r["step"] for r in program.records(run_dir))
        code = session.end() if codes else None
        print(f"{time.monotonic() - began:6.0f} s  step {step:6d}  {fault}: exit {code}", flush=True)
        if codes and code not in codes:
            wrong.append(f"{fault}: exit code {code}, expected {codes}\n{session.output[-3000:]}")
        if codes:
            growths.append(session.growth())
        if over:
            break
        if codes:
            session = Session(data, run_dir, "--epochs=100000", "--resume")
            if fault == "newest checkpoint damaged" and "damaged checkpoint set aside" not in session.output:
                wrong.append(f"the damaged checkpoint was not told\n{session.output}")
    epochs = step // STEPS + 3
    done = program.train(RANKS, data, run_dir, *FLAGS, f"--epochs={epochs}", "--resume")
    if done.returncode:
        wrong.append(f"the last session: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    wrong += check_records(run_dir, epochs)
    grown_mb, grown_files = max(m for m, _ in growths), max(f for _, f in growths)
    if grown_mb > GROWTH_MB or grown_files > GROWTH_FILES:
        wrong.append(f"memory or open files grew: {grown_mb:.0f} MB, {grown_files}")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes, {sum(faults.values())} faults, {epochs * STEPS} steps")
    print(f"growth within a session at most {grown_mb:.0f} MB and {grown_files} open files")
    print(json.dumps(faults, sort_keys=True))
    return wrong


def check_records(run_dir: pathlib.Path, epochs: int) -> list[str]:
    """What is wrong with the records and files of the finished run."""
    wrong = []
    records = [r for r in program.records(run_dir) if r["kind"] == "epoch"]
    if [(r["epoch"], r["step"]) for r in records] != [(e, e * STEPS) for e in range(1, epochs + 1)]:
        wrong.append(f"epochs or steps are not as they should be: {[(r['epoch'], r['step']) for r in records]}")
    left = [str(path) for path in run_dir.rglob(".*")]
    if left:
        wrong.append(f"temporary files are left: {left}")
    return wrong


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=60, help="seconds of training between faults")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = soak(arguments.minutes, arguments.every, arguments.seed, pathlib.Path(folder))
    for line in wrong:
        print(f"WRONG: {line}")
    print("failed" if wrong else "passed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
