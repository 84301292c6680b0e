"""changing_hosts.py LOSSES SEED FLAG...: on lab1, a training on three hosts that loses ranks and hosts at random.

A loss is a killed rank, a host whose network is cut for a while, or a host that leaves the list of hosts and comes
back. After so many losses the job is stopped as a scheduler would stop it. Prints a line for each loss, the exit code,
the records of the epochs and the job's own output.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

ALL = ("lab1", "lab2", "lab3")
KILL = "kill -9 $(pgrep -n -f [b]in/python.*hybrid_imagenet.main)"
CUT = "setsid sh -c 'ip link set eth0 down; sleep 12; ip link set eth0 up' >/dev/null 2>&1 </dev/null &"
PATIENCE = 120.0  # seconds for the next step


class Training:
    """The job, and the hosts on its list."""

    def __init__(self, folder: Path, flags: list[str]):
        """Starts it."""
        self.folder, self.run_dir = folder, folder / "run"
        self.listed = list(ALL)
        self.write_hosts()
        command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "3", "--network-interfaces", "eth0"]
        command += ["--max_restarts=100", "--join_interval=3", f"--host_discovery_script=cat {folder}/hosts", "--"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen([*command, *flags, f"--run_dir={self.run_dir}"], stdout=log, stderr=log)

    def write_hosts(self) -> None:
        """Lists the hosts for the discovery script, in one step."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in self.listed))
        new.replace(self.folder / "hosts")

    def records(self, kind: str) -> list[dict]:
        """The whole records of a kind."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in found if record.get("kind") == kind]

    def starts(self) -> int:
        """How often the job has started again."""
        return sum(("restart " in line or "in place of" in line) for line in self.log().splitlines())

    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def wait_for_a_step(self, since: float) -> None:
        """Waits until a session that has begun after this time of the clock has recorded a step."""
        end, least = time.monotonic() + PATIENCE, None
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"no step after {PATIENCE:g} s, exit code {self.process.poll()}\n{self.log()}")
            time.sleep(0.1)
            config, records = self.run_dir / "config.json", self.run_dir / "metrics.jsonl"
            if config.exists() and config.stat().st_mtime > since and records.exists():  # what is resumed is cut first
                size = records.stat().st_size
                least = size if least is None else min(least, size)
                if size > least:
                    return

    def lose(self, chance: random.Random) -> str:
        """Takes a rank or a host away, or gives one back; says what."""
        away = [host for host in ALL if host not in self.listed]
        kinds = ["kill", "kill", "cut", "join" if away else "leave"]
        kind = chance.choice(kinds)
        host = chance.choice(away if kind == "join" else [h for h in self.listed if kind == "kill" or h != "lab1"])
        if kind == "join":
            self.listed.append(host)
        elif kind == "leave":
            self.listed.remove(host)
        self.write_hosts()
        if kind != "join":
            subprocess.run(["ssh", host, CUT if kind == "cut" else KILL], check=True)
        return f"{kind} {host}"


def main(losses: int, seed: int, flags: list[str]) -> None:
    """Plays the losses."""
    training, chance = Training(Path(os.environ["FOLDER"]), flags), random.Random(seed)
    training.wait_for_a_step(0.0)
    for number in range(losses):
        time.sleep(chance.uniform(0, 4))
        began, starts = time.time(), training.starts()
        what = training.lose(chance)
        while training.starts() == starts and time.time() < began + PATIENCE:
            time.sleep(0.1)
        known = time.time()
        training.wait_for_a_step(known)
        print(
            f"loss {number + 1}: {what}, known after {known - began:.0f} s, next step {time.time() - known:.0f} s later"
        )
        sys.stdout.flush()
    training.process.send_signal(signal.SIGTERM)
    print(f"code {training.process.wait(PATIENCE)}")
    for record in training.records("epoch"):
        print(json.dumps({name: record[name] for name in ("epoch", "train_count", "train_dropped")}))
    print(training.log())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
