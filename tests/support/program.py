"""Runs the program on a tiny dataset, with one or several ranks."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from hybrid_imagenet.data.sources.tfrecord import scan_shard
from tests.data.support import jpeg, write_shards
from tests.ranks import HOROVODRUN, MPIRUN, ROOT, Pool, environment, skip_without_horovod
from tests.support import in_process, processes

TRAIN = 64
VALIDATION = 13
CLASSES = 4
FLAGS = (
    "--dataset=tfrecord",
    f"--num_classes={CLASSES}",
    *("--model=resnet8", "--model_width=4", "--stem=3x3", "--image_size=16"),
    "--augmentation=digits",
    "--per_gpu_batch=8",
    "--precision=float32",
    "--epochs=3",
    "--warmup_epochs=1",
    "--log_every_steps=2",
    "--deterministic",
)

# The engine that connects the ranks. The option --engine of the tests sets it.
ENGINE = "horovod"
METHODS = (
    *(
        "--model_width=8",
        "--ema_decay=0.9",
        "--image_size_schedule=0:12,1:16",
    ),
    *("--loss=sigmoid", "--eval_flip"),
)


def make_data(folder: pathlib.Path) -> pathlib.Path:
    """Writes TFRecord shards whose classes differ in brightness, so that a few steps suffice."""
    for split, count, first in (("train", TRAIN, 0), ("validation", VALIDATION, 1000)):
        pairs = [(jpeg(first + number, 40, 40), number % CLASSES) for number in range(count)]
        write_shards(folder, split, pairs)
    return folder


def damage(folder: pathlib.Path) -> list[str]:
    """Damages two training records and two validation records; returns file and offset of each."""
    locations = []
    for name, number in (
        ("train-00000", 5),
        ("train-00001", 30),
        ("validation-00000", 3),
        ("validation-00001", 4),
    ):
        path = folder / f"{name}-of-00002"
        offsets, lengths, _ = scan_shard(path)
        content = bytearray(path.read_bytes())
        content[offsets[number] + lengths[number] // 2] ^= 1
        path.write_bytes(content)
        locations.append(f"{path}, offset {offsets[number]}: ")
    return locations


MAIN = ("-m", "hybrid_imagenet.main")


LAUNCHERS = {
    "mpirun": [str(MPIRUN), "--quiet", "--oversubscribe", "--bind-to", "none", "-np"],
    "horovodrun": [str(HOROVODRUN), "-np"],
}


def command(
    ranks: int, *flags: str, start: Sequence[str] = MAIN, launcher: str = "mpirun"
) -> list[str]:
    """Returns the command line that trains."""
    if ranks > 1 and (ENGINE == "horovod" or launcher == "horovodrun"):
        skip_without_horovod()
    launch = [*LAUNCHERS[launcher], str(ranks)] if ranks > 1 else []
    return [*launch, sys.executable, *start, *flags]


def train(
    ranks: int,
    data: pathlib.Path,
    run_dir: pathlib.Path,
    *flags: str,
    timeout: float = 600,
    start: Sequence[str] = MAIN,
    launcher: str = "mpirun",
):
    """Trains to the end in new processes; returns the finished process."""
    return subprocess.run(
        command(ranks, *_flags(data, run_dir, flags), start=start, launcher=launcher),
        env=environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def train_on(pool: Pool, data: pathlib.Path, run_dir: pathlib.Path, *flags: str):
    """Trains to the end on the ranks of a pool; returns the same as a process of mpirun would."""
    return run_on(pool, "hybrid_imagenet.main", *_flags(data, run_dir, flags))


def run_on(pool: Pool, module: str, *arguments: str):
    """Calls a module's `main` on the ranks of a pool, which must all return the same exit code."""
    if ENGINE != "horovod":
        # The ranks may have started with Horovod, and a process cannot change its engine.
        pool.close()
    ends = pool.call(in_process.call, module, arguments)
    codes, outputs, errors = zip(*ends, strict=True)
    assert len(set(codes)) == 1, ends
    return subprocess.CompletedProcess(arguments, codes[0], "".join(outputs), "".join(errors))


def train_here(data: pathlib.Path, run_dir: pathlib.Path, *flags: str):
    """Trains to the end on one rank, in this process."""
    code, output, errors = in_process.call("hybrid_imagenet.main", _flags(data, run_dir, flags))
    return subprocess.CompletedProcess(flags, code, output, errors)


def _flags(data: pathlib.Path, run_dir: pathlib.Path, flags: Sequence[str]) -> list[str]:
    return [*FLAGS, f"--engine={ENGINE}", f"--data_dir={data}", f"--run_dir={run_dir}", *flags]


class Running:
    """Holds a training that runs in its own process group."""

    def __init__(self, ranks: int, data: pathlib.Path, run_dir: pathlib.Path, *flags: str):
        self.run_dir = run_dir
        self.process = subprocess.Popen(
            command(ranks, *_flags(data, run_dir, flags)),
            env=environment(),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for_step(self, step: int) -> None:
        """Waits until metrics.jsonl contains a record of this step or a later one."""

        def reached() -> bool:
            done = max((r["step"] for r in records(self.run_dir)), default=0) >= step
            assert done or self.process.poll() is None, (
                f"ended early: {self.process.communicate()[0]}"
            )
            return done

        processes.wait_for(reached, 240)

    def kill(self) -> None:
        """Kills the launcher and all ranks with SIGKILL."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()

    def finish(self, timeout: float = 240) -> tuple[int, str]:
        """Waits for the end; returns the exit code and the output."""
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.returncode, output


def records(run_dir: pathlib.Path) -> list[dict]:
    """Returns the records of a run, without a last line that is not complete."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    result = []
    for line in path.read_text().splitlines():
        try:
            result.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return result


def arrays(run_dir: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns the arrays of the latest checkpoint, read without the package."""
    latest = sorted((run_dir / "checkpoints").glob("step-*.npz"))[-1]
    with np.load(latest) as archive:
        return {name: archive[name] for name in archive.files if name.startswith("array/")}


_MEASURED = {
    *(
        "seconds",
        "images_per_second",
        "train_seconds",
        "validation_seconds",
        "validation_start_seconds",
        "train_start_seconds",
        "step_seconds",
        "data_wait_fraction",
    ),
    *(
        "communication_seconds",
        "slowest_rank",
        "slowest_rank_seconds",
        "bytes_read",
        "reads",
        "checkpoint_seconds",
    ),
}


def without_times(run_dir: pathlib.Path) -> list[dict]:
    """Returns the records of epochs without times and without the amounts of data read."""
    return [
        {k: v for k, v in r.items() if k not in _MEASURED}
        for r in records(run_dir)
        if r["kind"] == "epoch"
    ]
