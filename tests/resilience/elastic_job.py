"""An elastic job on this machine, with a host list that a test changes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import time

from tests.ranks import ROOT
from tests.support import program

# Names of this machine: the launcher takes each for a host of its own, which it drops when one of its ranks fails.
HOSTS = ("localhost", "127.0.0.1", "127.1", "127.0.1", "127.0x1", "0177.1")


class Job:
    """A launcher with elastic ranks, in a session of its own."""

    def __init__(self, folder: pathlib.Path, hosts: int, least: int, *flags: str, most: int = 4):
        self.run_dir = folder / "run"
        self.notes = folder / "notes"
        self.notes.mkdir()
        self._list = folder / "hosts"
        self.hosts = list(HOSTS[:hosts])
        self.tell()
        script = folder / "discover.sh"
        script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        script.chmod(0o755)
        counts = ["-np", str(hosts), "--min-np", str(least), "--max-np", str(most)]
        launch = [sys.executable, "-m", "hybrid_imagenet", "run", *counts, "--host-discovery-script", str(script)]
        launch += ["--blacklist-cooldown-range", "3600", "3600"]  # what is lost stays away
        self._log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [*launch, "--module", "tests.resilience.noted_rank", "--", f"--run_dir={self.run_dir}", *flags],
            env=program.environment() | {"HYBRID_IMAGENET_NOTES": str(self.notes)},
            cwd=ROOT,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def tell(self) -> None:
        """Writes the list of hosts, which the launcher reads once a second."""
        temporary = self._list.with_suffix(".new")
        temporary.write_text("".join(f"{host}:1\n" for host in self.hosts))
        temporary.replace(self._list)

    def output(self) -> str:
        """What it has printed so far."""
        return pathlib.Path(self._log.name).read_text()

    def records(self, kind: str) -> list[dict]:
        """The records of a kind so far."""
        return [record for record in program.records(self.run_dir) if record["kind"] == kind]

    def wait_for(self, what, timeout: float = 240) -> None:
        """Returns when `what(self)` is true."""
        deadline = time.monotonic() + timeout
        while not what(self):
            if self.process.poll() is not None:
                raise AssertionError(f"ended early ({self.process.returncode}): {self.output()[-6000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(f"not in time: {self.output()[-6000:]}")
            time.sleep(0.05)

    def wait_for_step(self, step: int, world_size: int | None = None) -> None:
        """Returns when a record of this step or a later one exists, made by so many ranks."""

        def there(job: Job) -> bool:
            found = program.records(job.run_dir)
            sizes = [r["world_size"] for r in found if r["kind"] == "ranks"]
            if world_size is not None and sizes[-1:] != [world_size]:
                return False
            return max((r["step"] for r in found if r["kind"] == "step"), default=0) >= step

        self.wait_for(there)

    def rank_process(self, host: str) -> int:
        """The process of the rank on a host."""
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            ours = f"--run_dir={self.run_dir}".encode() in words and words[0].endswith(b"python")
            if ours and f"HOROVOD_HOSTNAME={host}".encode() in variables:
                return int(entry.name)
        raise AssertionError(f"no rank on {host}: {self.output()[-3000:]}")

    def kill(self, host: str) -> None:
        """SIGKILL to the rank on a host."""
        os.kill(self.rank_process(host), signal.SIGKILL)

    def finish(self, timeout: float = 240) -> int:
        """Waits for the end; the exit code of the job."""
        return self.process.wait(timeout)

    def close(self) -> None:
        """Leaves nothing behind, whatever happened."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self._log.close()
