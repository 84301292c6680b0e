"""Trains on three hosts, loses ranks and hosts at random, and checks that no example is lost.

    dev/lab.sh --hosts=3 --slots=1 -- python -m tests.launch.changing_hosts --minutes 30

It needs root. A loss is a killed or stopped rank, the same with a damaged checkpoint, a host whose
network is cut for a while, or a host that leaves the list of hosts and returns. At the end the job
is stopped as a scheduler would stop it. It must return code 75, and must have recorded each epoch
once and each example once per epoch. The program prints a line for each loss, and returns 1 if
anything is wrong.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ALL_HOSTS = ("lab1", "lab2", "lab3")
EXAMPLES = 6000
FLAGS = (
    "--dataset=synthetic",
    f"--num_examples={EXAMPLES}",
    "--model=tests.training.own_networks:small",
    "--image_size=16",
    "--precision=float32",
    "--per_gpu_batch=8",
    "--epochs=1000000",
    "--log_every_steps=10",
    "--stall_timeout=20",
    "--checkpoint_every_steps=20",
)
RANK = "$(pgrep -n -f [b]in/python.*hybrid_imagenet.main)"
COMMANDS = {
    "kill": f"kill -9 {RANK}",
    "damage": f"kill -9 {RANK}",
    "stop": f"kill -STOP {RANK}",
    "leave": f"kill -9 {RANK}",
    "cut": (
        "setsid sh -c 'ip link set eth0 down; sleep 25; ip link set eth0 up' >/dev/null 2>&1"
        " </dev/null &"
    ),
}
# How long to wait for the next step, for a restart, and for the end of the job.
PATIENCE_SECONDS = 300.0
# The least number of steps between two losses. A job that fails several times in a row at the same
# step does not start again.
STEPS_BETWEEN_LOSSES = 50


class Training:
    """Holds the job, and the hosts on its list."""

    def __init__(self, folder: Path, flags: list[str]):
        """Starts the training."""
        self.folder = folder
        self.run_directory = folder / "run"
        self.listed_hosts = list(ALL_HOSTS)
        self.write_hosts()
        launcher = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "3"]
        launcher += ["--network-interfaces", "eth0", "--max_restarts=1000", "--join_interval=3"]
        launcher += [f"--host_discovery_script=cat {folder}/hosts", "--"]
        command = [*launcher, *FLAGS, *flags, f"--run_dir={self.run_directory}"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def write_hosts(self) -> None:
        """Writes the list of hosts for the discovery script, in one step."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in self.listed_hosts))
        new.replace(self.folder / "hosts")

    def records(self, kind: str) -> list[dict]:
        """Returns the complete records of a kind."""
        lines = (self.run_directory / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in records if record["kind"] == kind]

    def restarts(self) -> int:
        """Returns how often the job has started again."""
        lines = self.log().splitlines()
        return sum("restart " in line or "instead of" in line for line in lines)

    def log(self) -> str:
        """Returns the output of the job."""
        return (self.folder / "log").read_text(errors="replace")

    def wait_for_step_of_new_attempt(self, since: float) -> None:
        """Waits until an attempt that has started after `since` has recorded a step."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        smallest_size = None
        while True:
            code = self.process.poll()
            if code is not None or time.monotonic() > deadline:
                raise SystemExit(
                    f"no step after {PATIENCE_SECONDS:g} s, exit code {code}\n{self.log()}"
                )
            time.sleep(0.1)
            config = self.run_directory / "config.json"
            records = self.run_directory / "metrics.jsonl"
            if not config.exists() or config.stat().st_mtime <= since or not records.exists():
                continue
            # A resumed run first removes records after its checkpoint, so the file may shrink.
            size = records.stat().st_size
            smallest_size = size if smallest_size is None else min(smallest_size, size)
            if size > smallest_size:
                return

    def wait_for_step_after(self, step: int) -> int:
        """Waits until a later step is recorded, and returns it."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            latest = max((record["step"] for record in self.records("step")), default=0)
            if latest > step:
                return latest
            if time.monotonic() > deadline:
                raise SystemExit(f"no step after {step}\n{self.log()}")
            time.sleep(0.1)

    def cause_loss(self, generator: random.Random) -> str:
        """Removes a rank or a host, or adds a host again; returns a description."""
        unlisted = [host for host in ALL_HOSTS if host not in self.listed_hosts]
        kinds = ["kill", "stop", "damage", "cut", "join" if unlisted else "leave"]
        kind = generator.choice(kinds)
        if kind == "join":
            candidates = unlisted
        elif kind == "leave":
            # The job was started on lab1, so lab1 must stay.
            candidates = [host for host in self.listed_hosts if host != "lab1"]
        else:
            candidates = self.listed_hosts
        host = generator.choice(candidates)
        if kind == "cut" and host == "lab1":
            host = next(other for other in self.listed_hosts if other != "lab1")
        checkpoints = sorted((self.run_directory / "checkpoints").glob("step-*.npz"))
        if kind == "damage" and len(checkpoints) > 1:
            checkpoints[-1].write_bytes(checkpoints[-1].read_bytes()[:-100])
        if kind == "join":
            self.listed_hosts.append(host)
        elif kind == "leave":
            self.listed_hosts.remove(host)
        self.write_hosts()
        if kind in COMMANDS:
            subprocess.run(["ssh", host, COMMANDS[kind]], check=True)
        return f"{kind} {host}"


def play(training: Training, losses: int, deadline: float, generator: random.Random) -> list[str]:
    """Causes losses and ends the job; returns what is wrong."""
    training.wait_for_step_of_new_attempt(0.0)
    number = 0
    last_loss_step = 0
    while number < losses and time.monotonic() < deadline:
        time.sleep(generator.uniform(0, 4))
        last_loss_step = training.wait_for_step_after(last_loss_step + STEPS_BETWEEN_LOSSES)
        began = time.time()
        restarts = training.restarts()
        number += 1
        description = training.cause_loss(generator)
        while training.restarts() == restarts and time.time() < began + PATIENCE_SECONDS:
            time.sleep(0.1)
        restarted = time.time()
        training.wait_for_step_of_new_attempt(restarted)
        print(
            f"loss {number}: {description}, known after {restarted - began:.0f} s, next step"
            f" {time.time() - restarted:.0f} s later",
            flush=True,
        )
    training.process.send_signal(signal.SIGTERM)
    code = training.process.wait(PATIENCE_SECONDS)
    records = training.records("epoch")
    errors = []
    if code != 75:
        errors.append(f"exit code {code}")
    epochs = [record["epoch"] for record in records]
    if epochs != list(range(1, len(epochs) + 1)):
        errors.append(f"epochs {epochs}")
    for record in records:
        if record["train_count"] != EXAMPLES or record["train_dropped"] != 0:
            errors.append(str(record))
    print(f"{number} losses, {training.restarts()} starts, {len(epochs)} epochs")
    return errors


def main() -> int:
    """Runs the program; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=10**6)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), flags)
        deadline = time.monotonic() + 60 * options.minutes
        errors = play(training, options.losses, deadline, random.Random(options.seed))
        if errors:
            print("\n".join([*errors, training.log()]))
        else:
            print("passed")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
