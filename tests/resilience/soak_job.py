"""The job of the soak: three ranks, one on each host of a lab, started by `hybrid-imagenet run`."""

from __future__ import annotations

import collections
import contextlib
import json
import pathlib
import resource
import subprocess
import sys
import threading
import time

from tests.data.support import jpeg, write_shards
from tests.ranks import environment
from tests.support import processes, program
from tests.support.lab import Lab

RANKS, BATCH = 3, 4
TRAIN, VALIDATION = 480, 26  # examples; the label of each is its number
STEPS = TRAIN // (RANKS * BATCH)  # per epoch
STALL = 20
MODULE = "tests.resilience.noted_rank"
FLAGS = (
    *("--dataset=tfrecord", f"--num_classes={TRAIN}", "--model=resnet8", "--model_width=4", "--image_size=8"),
    *("--augmentation=digits", "--precision=float32", f"--per_gpu_batch={BATCH}", "--optimizer=sgd", "--lr=0.01"),
    *("--checkpoint_every_epochs=2", f"--stall_timeout={STALL}", "--progress=plain", "--log_every_steps=20"),
    *("--bad_records=skip", "--max_bad_records=100000"),
)


def make_data(folder: pathlib.Path) -> pathlib.Path:
    """TFRecord shards of small images."""
    write_shards(folder, "train", [(jpeg(number, 10, 10), number) for number in range(TRAIN)], shards=4)
    write_shards(folder, "validation", [(jpeg(1000 + number, 10, 10), number) for number in range(VALIDATION)])
    return folder


def last_step(run_dir: pathlib.Path) -> int:
    """The step of the newest record; 0 without one."""
    try:
        lines = (run_dir / "metrics.jsonl").read_bytes()[-4096:].splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            return json.loads(line)["step"]
    return 0


class Session:
    """One start of the job, from its first steps to its end; samples the ranks' memory and open files."""

    def __init__(self, lab: Lab, folder: pathlib.Path, number: int, *flags: str):
        """Starts it with flags beside FLAGS."""
        self.lab, self.run_dir = lab, folder / "run"
        self.notes = folder / "notes" / f"{number:04d}"
        self.notes.mkdir(parents=True)
        self.samples: dict[int, list[tuple[float, int]]] = collections.defaultdict(list)
        self.ranks: dict[int, int] = {}
        self.output = ""
        hosts = ",".join(f"{host.name}:1" for host in lab.hosts)
        command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", str(RANKS), "-H", hosts]
        command += ["--network-interfaces", "eth0", "--module", MODULE, "--"]
        self.process = lab.hosts[0].start(
            [*command, *FLAGS, f"--data_dir={folder}/data", f"--run_dir={self.run_dir}", *flags],
            env=environment() | {"HYBRID_IMAGENET_NOTES": str(self.notes)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self.output = (self.output + line)[-100_000:]

    def get_going(self, timeout: float = 400) -> None:
        """Waits until the first epoch of this session is done; SystemExit if it is not."""
        before, deadline = last_step(self.run_dir), time.monotonic() + timeout
        while last_step(self.run_dir) < before + 2 * STEPS:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the run did not get going:\n{self.output[-5000:]}")
            time.sleep(0.5)
        self.ranks = {r: p for host in self.lab.hosts for r, p in host.ranks(MODULE).items()}
        if sorted(self.ranks) != list(range(RANKS)):
            raise SystemExit(f"ranks {self.ranks}:\n{self.output[-5000:]}")

    @property
    def supervisor(self) -> int:
        """The process of `hybrid-imagenet run`."""
        return processes.children(self.process.pid)[0]

    def watch(self, until: float) -> None:
        """Takes samples up to a time of time.monotonic, or to the end of the job."""
        while time.monotonic() < until and self.process.poll() is None:
            for rank, process in self.ranks.items():
                with contextlib.suppress(OSError, IndexError):
                    pages = int(pathlib.Path(f"/proc/{process}/statm").read_text().split()[1])
                    files = len(list(pathlib.Path(f"/proc/{process}/fd").iterdir()))
                    self.samples[rank].append((pages * resource.getpagesize() / 1e6, files))
            time.sleep(1)

    def end(self, timeout: float) -> int | None:
        """The exit code of the launcher's own process; None if it does not end in time."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(10)
        return code

    def growth(self) -> tuple[float, int]:
        """MB and open files by which the last third of the samples lies above the first, for the worst rank."""
        grown = [(0.0, 0)]
        for samples in self.samples.values():
            third = len(samples) // 3
            if third >= 5:
                ends = samples[:third], samples[-third:]
                memory, files = ([min(s[i] for s in end) for end in ends] for i in (0, 1))
                grown.append((memory[1] - memory[0], files[1] - files[0]))
        return max(m for m, _ in grown), max(f for _, f in grown)


def check(run_dir: pathlib.Path, notes: pathlib.Path, epochs: int) -> list[str]:
    """What is wrong with the records, counts and files of a finished run of so many epochs."""
    wrong = []
    records = [r for r in program.records(run_dir) if r["kind"] == "epoch"]
    if [(r["epoch"], r["step"]) for r in records] != [(e, e * STEPS) for e in range(1, epochs + 1)]:
        wrong.append(f"epochs or steps are not as they should be: {[(r['epoch'], r['step']) for r in records]}")
    seen = _seen(notes)
    for record in records:
        epoch, used, dropped = record["epoch"], record["train_count"], record["train_dropped"]
        if used + dropped != TRAIN or record["val_count"] + record.get("val_dropped", 0) != VALIDATION:
            wrong.append(f"epoch {epoch}: examples are not all counted: {record}")
        labels = [label for step in range((epoch - 1) * STEPS, epoch * STEPS) for label in seen.get(step, ())]
        if len(labels) != TRAIN or len(set(labels)) != used:
            wrong.append(f"epoch {epoch}: trained on {len(set(labels))} examples, {len(labels)} in all; {used} counted")
    if left := [str(path) for path in run_dir.rglob(".*")]:
        wrong.append(f"temporary files are left: {left}")
    return wrong


def _seen(notes: pathlib.Path) -> dict[int, list[int]]:
    """The labels of each step, as noted by the last session in which all ranks have begun it."""
    seen: dict[int, list[int]] = {}
    for session in sorted(notes.iterdir()):
        steps: dict[int, list[list[int]]] = collections.defaultdict(list)
        for path in session.iterdir():
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError):  # its rank was killed while it wrote this line
                    step, _, labels = json.loads(line)
                    steps[step].append(labels)
        seen |= {step: [n for labels in parts for n in labels] for step, parts in steps.items() if len(parts) == RANKS}
    return seen
