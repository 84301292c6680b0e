"""A job on three hosts with a fault a minute: `python -m tests.resilience.soak --minutes 30`. Needs root.

The hosts are those of launch/lab.sh: real sshd, real links. Whenever a fault ends the job it must end with the exit
code of docs/runs.md, within --stall_timeout + 30 s and with no process left on a host that can be reached; it is
started again with --resume. When the time is over it is finished undisturbed.
Then every epoch must be recorded once with the right number of steps, every example of every epoch must be trained on
once or counted as dropped (told by what the ranks noted of their batches, and by the records), no process, temporary
file or shared memory may be left, and neither memory nor file handles may have grown. Prints a line per fault and the
figures; exits with 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import collections
import os
import pathlib
import random
import resource
import signal
import sys
import tempfile
import time

from hybrid_imagenet.data.sources.tfrecord import scan
from tests.resilience import soak_job
from tests.resilience.soak_job import RANKS, STALL, STEPS, Session, last_step
from tests.support import processes, program
from tests.support.lab import Lab

GROWTH_MB, GROWTH_FILES = 100, 5  # within a session, after its first epochs
LOST = "link of a host lost"
ENDS = {  # the exit codes that are right
    "rank killed": {137},
    "launcher killed": {-9},
    "all killed": {-9},
    "signal to stop": {75},
    "rank stopped": {4},
    "disk full": {2},
    LOST: {4},
    "newest checkpoint cut": {-9},
    "newest checkpoint with a flipped bit": {-9},
}
GOES_ON = ("rank paused for 3 s", "link away for 5 s", "shard damaged", "shard mended")
AT_ONCE = 15.0  # seconds for a job that is killed or fails by itself to be gone from all hosts


class Soak:
    """The job, its faults, and what was wrong."""

    def __init__(self, lab: Lab, folder: pathlib.Path, seed: int):
        """Makes the data and starts the job."""
        self.lab, self.folder, self.generator = lab, folder, random.Random(seed)
        self.data, self.run_dir = soak_job.make_data(folder / "data"), folder / "run"
        self.wrong: list[str] = []
        self.faults: collections.Counter[str] = collections.Counter()
        self.growths, self.starts, self.began = [(0.0, 0)], 0, time.monotonic()
        self.sound: tuple[pathlib.Path, bytes] | None = None  # a shard as it was before it was damaged
        self.session = self.start()

    def tell(self, text: str) -> None:
        """Notes and prints what is wrong."""
        self.wrong.append(text)
        print(f"WRONG: {text}", flush=True)

    def start(self, *flags: str) -> Session:
        """Starts the job, or starts it again, and waits until it trains."""
        session = Session(
            self.lab, self.folder, self.starts, "--epochs=1000000", *(["--resume"] if self.starts else []), *flags
        )
        self.starts += 1
        session.get_going()
        return session

    def run(self, minutes: float, every: float) -> None:
        """Inflicts a fault every so many seconds, or as soon after it as the job trains again."""
        queue: list[str] = []
        due = time.monotonic() + every
        while (now := time.monotonic()) < self.began + 60 * minutes:
            self.session.watch(min(max(due, now + 5), self.began + 60 * minutes))
            if not queue:
                queue = [*ENDS, *GOES_ON]
                self.generator.shuffle(queue)
                queue.sort(key=lambda fault: fault == "shard mended")  # after it was damaged
            due = time.monotonic() + every
            self.fault(queue.pop(0))
        self.mend_shard()
        self.fault("signal to stop", again=False)

    def fault(self, name: str, *, again: bool = True) -> None:
        """Inflicts one, checks what becomes of the job, and starts it again if it has ended."""
        session = self.session
        if session.process.poll() is not None:
            raise SystemExit(f"ended without a fault:\n{session.output[-5000:]}")
        at, step = time.monotonic(), last_step(self.run_dir)
        cut = self.strike(name)
        self.faults[name] += 1
        code, took = None, 0.0
        if name in ENDS:
            code = session.end(STALL + 30)
            took = time.monotonic() - at
            if code not in ENDS[name]:
                told = f"exit code {code} after {took:.0f} s"
                self.tell(f"{name}, {told}, not {ENDS[name]}\n{session.output[-3000:]}")
            self.growths.append(session.growth())
            # Ranks whose launcher is gone have 8 s to save; those that only wait for others end after the watchdog.
            reached = [host for host in self.lab.hosts if host is not cut]
            self.gone(name, AT_ONCE if name != LOST else STALL + 15 + AT_ONCE, reached)
            if cut is not None:
                cut.link("up")
                self.gone(f"{name}, and back", STALL + 15 + 30, [cut])
        how = f"exit code {code} after {took:.0f} s" if name in ENDS else "goes on"
        print(f"{at - self.began:6.0f} s  step {step:6d}  {name}: {how}", flush=True)
        if name.startswith("newest checkpoint"):
            damage_checkpoint(self.run_dir, self.generator, cut=name.endswith("cut"))
        if not again:
            return
        if name in ENDS:
            self.session = self.start()
            if name.startswith("newest checkpoint") and "damaged checkpoint set aside" not in self.session.output:
                self.tell(f"the damaged checkpoint was not told\n{self.session.output}")
        else:
            self.goes_on(name)

    def goes_on(self, name: str) -> None:
        """Two more epochs must be done."""
        target, until = last_step(self.run_dir) + 2 * STEPS, time.monotonic() + STALL + 30
        while last_step(self.run_dir) < target:
            if time.monotonic() > until or self.session.process.poll() is not None:
                self.tell(f"{name}: the job does not go on\n{self.session.output[-3000:]}")
                self.session.process.kill()
                raise SystemExit(self.wrong[-1])
            time.sleep(0.5)

    def gone(self, name: str, seconds: float, hosts) -> None:
        """Notes processes that are left on hosts after some seconds."""
        if left := self.lab.quiet_within(seconds, hosts):
            self.tell(f"{name}: left after {seconds:g} s: {left}")
            for host in hosts:
                for process in host.processes():
                    os.kill(process, signal.SIGKILL)

    def strike(self, fault: str):
        """Does it; returns the host whose link is cut, if one is."""
        session, generator = self.session, self.generator
        victim = session.ranks[generator.randrange(RANKS)]
        host = generator.choice(self.lab.hosts)
        if fault == "rank killed":
            os.kill(victim, signal.SIGKILL)
        elif fault == "launcher killed":
            os.kill(session.supervisor, signal.SIGKILL)
        elif fault == "signal to stop":
            os.kill(session.supervisor, signal.SIGUSR1)
        elif fault == "rank stopped":
            os.kill(victim, signal.SIGSTOP)
        elif fault == "disk full":  # the system's limit on the size of files stands in for it
            resource.prlimit(session.ranks[0], resource.RLIMIT_FSIZE, (20 << 10, 20 << 10))
        elif fault == "rank paused for 3 s":
            os.kill(victim, signal.SIGSTOP)
            time.sleep(3)
            os.kill(victim, signal.SIGCONT)
        elif fault == LOST:
            host.link("down")
            return host
        elif fault == "link away for 5 s":
            host.link("down")
            time.sleep(5)
            host.link("up")
        elif fault == "shard damaged":
            self.damage_shard()
        elif fault == "shard mended":
            self.mend_shard()
        else:  # all of it, everywhere, at once
            for process in [session.supervisor, *(p for each in self.lab.hosts for p in each.processes())]:
                if processes.alive(process):
                    os.kill(process, signal.SIGKILL)
        return None

    def damage_shard(self) -> None:
        """Flips a bit in a training record."""
        if self.sound is None:
            path = self.generator.choice(sorted(self.data.glob("train-*")))
            self.sound = path, path.read_bytes()
            offsets, lengths, _ = scan(path)
            number = self.generator.randrange(len(offsets))
            with path.open("r+b") as file:
                file.seek(offsets[number] + lengths[number] // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))

    def mend_shard(self) -> None:
        """Undoes it, in place: the file stays open in the ranks."""
        if self.sound is not None:
            path, content = self.sound
            with path.open("r+b") as file:
                file.write(content)
            self.sound = None

    def finish(self) -> None:
        """Ends the run undisturbed and looks at all that it has left."""
        epochs = last_step(self.run_dir) // STEPS + 3
        last = Session(self.lab, self.folder, self.starts, f"--epochs={epochs}", "--resume")
        if (code := last.end(400)) != 0:
            self.tell(f"the last session: exit code {code}\n{last.output[-5000:]}")
        self.gone("the last session", AT_ONCE, self.lab.hosts)
        for text in soak_job.check(self.run_dir, self.folder / "notes", epochs):
            self.tell(text)
        records = [r for r in program.records(self.run_dir) if r["kind"] == "epoch"]
        dropped = sum(r["train_dropped"] > 0 for r in records)
        damaged = self.faults["shard damaged"]
        if bool(dropped) != bool(damaged):
            self.tell(f"{damaged} damaged shards, and {dropped} epochs with dropped images")
        grown_mb, grown_files = max(m for m, _ in self.growths), max(f for _, f in self.growths)
        if grown_mb > GROWTH_MB or grown_files > GROWTH_FILES:
            self.tell(f"memory or open files grew: {grown_mb:.0f} MB, {grown_files}")
        minutes = (time.monotonic() - self.began) / 60
        print(f"{minutes:.1f} minutes, {sum(self.faults.values())} faults, {self.starts + 1} starts")
        print(f"{epochs} epochs, {epochs * STEPS} steps, {dropped} epochs with a dropped image")
        print(f"growth within a session at most {grown_mb:.0f} MB and {grown_files} open files")
        for name, count in sorted(self.faults.items()):
            print(f"{count:4} x {name}")


def damage_checkpoint(run_dir: pathlib.Path, generator: random.Random, *, cut: bool) -> None:
    """Cuts the newest checkpoint short, or flips a bit of it."""
    newest = sorted((run_dir / "checkpoints").glob("step-*.npz"))[-1]
    content = bytearray(newest.read_bytes())
    place = generator.randrange(len(content))
    content[place] ^= 1
    newest.write_bytes(content[:place] if cut else content)


def main() -> int:
    """Parses the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every", type=float, default=60, help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts go too
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        with Lab(RANKS, folder) as lab:
            soak = Soak(lab, folder, arguments.seed)
            soak.run(arguments.minutes, arguments.every)
            soak.finish()
    print("failed" if soak.wrong else "passed")
    return bool(soak.wrong)


if __name__ == "__main__":
    sys.exit(main())
