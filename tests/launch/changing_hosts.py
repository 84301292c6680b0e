"""A training on three hosts that loses ranks and hosts at random, for a number of losses or of
minutes. Needs root.

    launch/lab.sh --hosts=3 --slots=1 -- python -m tests.launch.changing_hosts --minutes 30

A loss is a killed or stopped rank, a damaged checkpoint with it, a host whose network is cut for a
while, or a host that leaves the list of hosts and comes back. Then the job is stopped as a
scheduler would stop it. It must end with code 75, and have recorded each epoch once with each
example once. Prints a line for each loss; exits with 1 if anything is wrong.
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

ALL = ("lab1", "lab2", "lab3")
EXAMPLES = 6000
FLAGS = f"""--dataset=synthetic --num_examples={EXAMPLES} --model=tests.training.own_networks:small
--image_size=16 --precision=float32 --per_gpu_batch=8 --epochs=1000000 --log_every_steps=10 --stall_timeout=20
--checkpoint_every_steps=20""".split()  # noqa: E501
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
PATIENCE = 300.0  # seconds for the next step


class Training:
    """The job, and the hosts on its list."""

    def __init__(self, folder: Path, flags: list[str]):
        """Starts it."""
        self.folder, self.run_dir = folder, folder / "run"
        self.listed = list(ALL)
        self.write_hosts()
        command = [
            sys.executable,
            "-m",
            "hybrid_imagenet",
            "run",
            "-np",
            "3",
            "--network-interfaces",
            "eth0",
        ]
        command += [
            "--max_restarts=1000",
            "--join_interval=3",
            f"--host_discovery_script=cat {folder}/hosts",
            "--",
        ]
        with (folder / "log").open("w") as log:
            words = [*command, *FLAGS, *flags, f"--run_dir={self.run_dir}"]
            self.process = subprocess.Popen(words, stdout=log, stderr=log)

    def write_hosts(self) -> None:
        """Lists the hosts for the discovery script, in one step."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host}:1\n" for host in self.listed))
        new.replace(self.folder / "hosts")

    def records(self, kind: str) -> list[dict]:
        """The whole records of a kind."""
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [record for record in found if record["kind"] == kind]

    def starts(self) -> int:
        """How often the job has started again."""
        return sum(("restart " in line or "instead of" in line) for line in self.log().splitlines())

    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "log").read_text(errors="replace")

    def wait_for_a_step(self, since: float) -> None:
        """Waits until a session that has begun after this time of the clock has recorded a step."""
        end, least = time.monotonic() + PATIENCE, None
        while True:
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(
                    f"no step after {PATIENCE:g} s, exit code {self.process.poll()}\n{self.log()}"
                )
            time.sleep(0.1)
            config, records = self.run_dir / "config.json", self.run_dir / "metrics.jsonl"
            if (
                config.exists() and config.stat().st_mtime > since and records.exists()
            ):  # what is resumed is cut first
                size = records.stat().st_size
                least = size if least is None else min(least, size)
                if size > least:
                    return

    def pass_a_step(self, step: int) -> int:
        """Waits until a later step is recorded, and returns it: what fails twice at one step is not
        started again.
        """
        end = time.monotonic() + PATIENCE
        while (
            latest := max((record["step"] for record in self.records("step")), default=0)
        ) <= step:
            if time.monotonic() > end:
                raise SystemExit(f"no step after {step}\n{self.log()}")
            time.sleep(0.1)
        return latest

    def lose(self, chance: random.Random) -> str:
        """Takes a rank or a host away, or gives one back; says what."""
        away = [host for host in ALL if host not in self.listed]
        kind = chance.choice(["kill", "stop", "damage", "cut", "join" if away else "leave"])
        host = chance.choice(
            away if kind == "join" else [h for h in self.listed if kind != "leave" or h != "lab1"]
        )
        if kind == "cut" and host == "lab1":
            host = next(h for h in self.listed if h != "lab1")
        checkpoints = sorted((self.run_dir / "checkpoints").glob("step-*.npz"))
        if kind == "damage" and len(checkpoints) > 1:
            checkpoints[-1].write_bytes(checkpoints[-1].read_bytes()[:-100])
        if kind == "join":
            self.listed.append(host)
        elif kind == "leave":
            self.listed.remove(host)
        self.write_hosts()
        if kind in COMMANDS:
            subprocess.run(["ssh", host, COMMANDS[kind]], check=True)
        return f"{kind} {host}"


def play(training: Training, losses: int, until: float, chance: random.Random) -> list[str]:
    """Plays the losses and ends the job; returns what is wrong."""
    training.wait_for_a_step(0.0)
    number = lost_at = 0
    while number < losses and time.monotonic() < until:
        time.sleep(chance.uniform(0, 4))
        lost_at = training.pass_a_step(lost_at + 50)  # it trains on until the loss comes
        began, starts, number = time.time(), training.starts(), number + 1
        what = training.lose(chance)
        while training.starts() == starts and time.time() < began + PATIENCE:
            time.sleep(0.1)
        known = time.time()
        training.wait_for_a_step(known)
        seconds = f"known after {known - began:.0f} s, next step {time.time() - known:.0f} s later"
        print(f"loss {number}: {what}, {seconds}", flush=True)
    training.process.send_signal(signal.SIGTERM)
    code, epochs = training.process.wait(PATIENCE), training.records("epoch")
    wrong = [] if code == 75 else [f"exit code {code}"]
    if [record["epoch"] for record in epochs] != list(range(1, len(epochs) + 1)):
        wrong.append(f"epochs {[record['epoch'] for record in epochs]}")
    wrong += [str(r) for r in epochs if (r["train_count"], r["train_dropped"]) != (EXAMPLES, 0)]
    print(f"{number} losses, {training.starts()} starts, {len(epochs)} epochs")
    return wrong


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=10**6)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder), flags)
        until = time.monotonic() + 60 * options.minutes
        wrong = play(training, options.losses, until, random.Random(options.seed))
        print("\n".join([*wrong, training.log()] if wrong else ["passed"]))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
