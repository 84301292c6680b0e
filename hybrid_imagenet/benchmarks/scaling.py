"""`bench scaling`: training throughput on 1, 2, ... N ranks, computation and exposed communication
separately.

    hybrid-imagenet bench scaling --ranks=1,2 -- --flagfile=flags/digits.flags

starts a job for each number of ranks, on the hosts of -H in their order; flags of the training
program follow `--`. Each rank holds one batch of random images in memory, so reading and decoding
do not count. Every round times some full steps, then the same number of steps without a reduction
of gradients. All ranks run both, so cores, memory and power are shared alike. The difference is the
exposed communication. Times are medians over rounds, on the slowest rank. Efficiency is throughput
per rank divided by the smallest job's (Lu et al., Tables 3.2 and 3.3).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Mapping, Sequence

from hybrid_imagenet.errors import SharedError, UserError, pluralize
from hybrid_imagenet.tools import command_line

if typing.TYPE_CHECKING:
    import tensorflow as tf

    from hybrid_imagenet.comm.communicator import Communicator
    from hybrid_imagenet.config import RunConfig

TURN_VARIABLE, READY_FILE, GO_FILE = "HYBRID_IMAGENET_BENCH_TURN", "ready", "go"
_MARK = "scaling-result "
_FIRST_STEPS = 3  # whose loss two ways to compute a step must share
Row = dict[str, typing.Any]


def main(argv: Sequence[str]) -> int:
    """Starts the jobs and prints the table; with --worker, is one rank of a job."""
    words, flags = split_arguments(argv)
    options = make_parser().parse_args(words)
    if options.worker:
        return _run_worker(options, flags)
    run_jobs(options, flags)
    return 0


def run_jobs(options: argparse.Namespace, flags: Sequence[str]) -> list[Row]:
    """Starts a job for each number of ranks, prints the table and writes --json; returns a row for
    each.

    Raises:
      UserError: if a job fails, after the rows before it.
    """
    rows: list[Row] = []
    try:
        for ranks in parse_rank_counts(options.ranks):
            job = job_command(worker_arguments(options, flags), ranks, options.hosts, options)
            rows.append(run_job(job, ranks, options.timeout)[0])
    finally:
        if rows:
            add_efficiency(rows)
            print(format_table(rows))
            command_line.write_json(options.json, rows)
    return rows


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before `--`, and the flags of the training program after it."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    return words[:place], words[place + 1 :]


def make_parser() -> argparse.ArgumentParser:
    """The options of the benchmark."""
    options = command_line.Parser(
        "bench scaling",
        (__doc__ or "").split("\n")[0],
        epilog="Words after -- are flags of the training program.",
    )
    options.add_argument(
        "--ranks", default="1,2", help="numbers of ranks, smallest first (%(default)s)"
    )
    options.add_argument(
        "-H", "--hosts", default="", metavar="HOST:SLOTS,...", help="hosts of the ranks (this host)"
    )
    add_network_options(options)
    options.add_argument(
        "--threads",
        type=command_line.positive_int,
        help="threads per rank (the cores of a host divided by its ranks)",
    )
    options.add_argument(
        "--steps", type=command_line.positive_int, default=5, help="steps per round (%(default)s)"
    )
    options.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=5,
        help="rounds that count (%(default)s)",
    )
    options.add_argument(
        "--classes",
        type=command_line.positive_int,
        default=1000,
        help="of the network (%(default)s)",
    )
    options.add_argument(
        "--timeout", type=float, default=1800, help="seconds that a job may take (%(default)s)"
    )
    options.add_argument("--json", help="file for the rows")
    options.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return options


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hybrid-imagenet run` that say how hosts are reached."""
    parser.add_argument("--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument(
        "--network_interfaces",
        dest="interface",
        default="",
        help="network interface that the run will use",
    )


def network_arguments(options: argparse.Namespace) -> list[str]:
    """The options of `add_network` that are given."""
    port = [f"--ssh_port={options.ssh_port}"] if options.ssh_port else []
    return port + ([f"--network_interfaces={options.interface}"] if options.interface else [])


def parse_rank_counts(text: str) -> list[int]:
    """Reads --ranks; raises UserError."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1 or found != sorted(set(found)):
        raise UserError(f"--ranks={text}: give increasing whole numbers, as in 1,2,4")
    return found


def worker_arguments(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """The words after `python -m hybrid_imagenet.benchmarks` that make a process one rank of a
    job.
    """
    words = [f"--{name}={getattr(options, name)}" for name in ("steps", "rounds", "classes")]
    words += [f"--threads={options.threads}"] if options.threads else []
    return ["scaling", "--worker", *words, "--", *flags]


def job_command(
    words: Sequence[str], ranks: int, hosts: str, options: argparse.Namespace, script: str = ""
) -> list[str]:
    """The command of a job: a benchmark of this package with its words, or a script, on ranks of -H
    HOSTS.
    """
    if ranks == 1 and hosts.partition(":")[0] in ("", "localhost"):
        return [
            sys.executable,
            *([script] if script else ["-m", "hybrid_imagenet.benchmarks"]),
            *words,
        ]
    where = ["-np", str(ranks), *(["-H", hosts] if hosts else []), *network_arguments(options)]
    program = [script] if script else ["--module=hybrid_imagenet.benchmarks", "--"]
    return [sys.executable, "-m", "hybrid_imagenet", "run", *where, *program, *words]


def run_job(
    command: Sequence[str], ranks: int, timeout: float, environment: Mapping[str, str] | None = None
) -> tuple[Row, str]:
    """Runs a job, which ends with this process; returns the result that rank 0 prints, and the
    output of all ranks.

    Raises:
      UserError: if it fails or takes too long.
    """
    job = f"the job of {pluralize(ranks, 'rank')}"
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UserError(f"{job} took more than --timeout={timeout:g} s") from None
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()  # a launcher ends its ranks
            process.communicate()
    if process.returncode or not (row := parse_result(said)):
        raise UserError(f"{job} failed (exit code {process.returncode}): {failure_reason(said)}")
    return row, said


def parse_result(said: str) -> Row:
    """Returns what rank 0 of a job prints as its result; an empty row if there is none."""
    marked = said.partition(_MARK)[2]
    return (
        json.JSONDecoder().raw_decode(marked)[0] if marked else {}
    )  # a launcher may put more on the line after it


def failure_reason(said: str) -> str:
    """Returns the errors of a failed job, or else its last lines, in one line."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and "NCCL INFO" not in line]
    errors = [
        line for line in lines if "error:" in line.lower() or "Error" in line or "NCCL WARN" in line
    ]
    return " | ".join((errors or lines)[-3:])[:600] or "it printed nothing"


def _run_worker(options: argparse.Namespace, flags: Sequence[str]) -> int:
    from hybrid_imagenet import comm
    from hybrid_imagenet import config as configuration
    from hybrid_imagenet.config import derived

    config = configuration.resolve(flags, comm.placement().size)
    for name, plain in (
        ("virtual_gpus", 1),
        ("gradient_accumulation_steps", 1),
        ("random_batch", 0),
    ):
        if getattr(config, name) != plain:
            raise SharedError(
                f"{name} is not {plain}, and a step here is one batch of each GPU: omit what"
                " sets it"
            )
    settings, persistent = derived.communication(config), config.persistent_batch_norm
    communicator = comm.start(settings, threads=options.threads, persistent_batch_norm=persistent)
    row = measure(config, communicator, options.steps, options.rounds, options.classes)
    if communicator.rank == 0:
        print(_MARK + json.dumps(row), flush=True)
    communicator.shutdown()
    return 0


def wait_for_turn() -> None:
    """Writes the file `ready` into the directory that the variable TURN names, if any, and returns
    once `go` is there.

    So benchmarks prepare side by side and are timed one after the other (`benchmarks arms`).
    """
    if folder := os.environ.get(TURN_VARIABLE):
        (pathlib.Path(folder) / READY_FILE).touch()
        while not (pathlib.Path(folder) / GO_FILE).exists():
            time.sleep(0.05)


def measure(
    config: RunConfig, communicator: Communicator, steps: int, rounds: int, classes: int
) -> Row:
    """Times training steps with and without the reduction of gradients; every rank calls it."""
    import tensorflow as tf

    from hybrid_imagenet.training import hardware

    precision = hardware.choose_precision(config.precision, config.model)
    gpus = tf.config.get_visible_devices("GPU")
    steps_to_time = [training_step(config, communicator, communicator, precision, classes)]
    if communicator.size > 1:
        steps_to_time.append(
            training_step(
                config,
                communicator,
                _communicator_without_reduction(communicator),
                precision,
                classes,
            )
        )
    samples: list[list[float]] = [[] for _ in steps_to_time]
    ahead: list[float] = []
    began = time.perf_counter()
    for _ in range(_FIRST_STEPS):
        steps_to_time[0].call()
    first_loss = steps_to_time[0].loss()
    first_seconds = time.perf_counter() - began
    for number in range(rounds + 1):  # the first traces and does not count
        for step, seconds in zip(steps_to_time, samples, strict=True):
            step.call()
            step.wait()
            if number == 1 and communicator.rank == 0:
                wait_for_turn()
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step.call()
            called = time.perf_counter() - start
            step.wait()
            if number:
                elapsed = time.perf_counter() - start
                seconds.append(elapsed / steps)
                ahead.append(steps * (1 - called / elapsed))
    everyone = communicator.allgather_object([statistics.median(seconds) for seconds in samples])
    step_seconds = max(rank[0] for rank in everyone)
    compute_seconds = max(rank[-1] for rank in everyone)
    return {
        "ranks": communicator.size,
        "hosts": len(set(communicator.hosts)),
        "gpu": (
            tf.config.experimental.get_device_details(gpus[0]).get("device_name") if gpus else None
        ),
        "model": config.model,
        "precision": precision,
        "image_size": config.image_size,
        "batch_per_rank": config.per_gpu_batch,
        "allreduce": config.allreduce,
        "compression": config.compression,
        "step_seconds": step_seconds,
        "compute_seconds": compute_seconds,
        "exposed_seconds": max(0.0, step_seconds - compute_seconds),
        "images_per_second": communicator.size * config.per_gpu_batch / step_seconds,
        "steps_ahead": statistics.median(
            ahead
        ),  # of the device, when the last call of a round returns
        "first_loss": first_loss,
        "first_seconds": first_seconds,
        "gpu_bytes": tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpus else None,
    }


def _communicator_without_reduction(ranks: Communicator) -> Communicator:
    """Returns a communicator that does not reduce gradients; the control word of a step is still
    summed.
    """
    from hybrid_imagenet.comm import SingleProcess

    class Staying(SingleProcess):
        def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
            return ranks.allreduce_on_host(tensor, name)

    return Staying()


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A training step.

    Attributes:
      call: makes the step; on a GPU it may return before.
      wait: returns when all steps are done.
      loss: waits; the mean loss of all images of all steps so far.
    """

    call: Callable[[], object]
    wait: Callable[[], object]
    loss: Callable[[], float]


def training_step(
    config: RunConfig, everyone: Communicator, reducer: Communicator, precision: str, classes: int
) -> TimedStep:
    """Returns a training step on a batch in memory whose gradients go through `reducer`.

    As in training, the host may be ahead of a GPU; nothing is fetched from it between steps.
    """
    import numpy as np
    import tensorflow as tf

    from hybrid_imagenet.data import augmentations
    from hybrid_imagenet.training import build

    model = build.model(config, precision, classes, everyone)
    optimizer = build.optimizer(config, precision, model, reducer)
    train = build.train_step(config, precision, model, optimizer, reducer)
    random = np.random.default_rng(everyone.rank)
    side = augmentations.host_augmentation(config.augmentation, config.image_size).side
    shape = [config.per_gpu_batch, side, side, 3]
    batch = {
        "image": tf.constant(random.integers(0, 256, shape, dtype=np.uint8)),
        "label": tf.constant(random.integers(0, classes, shape[:1])),
        "seed": tf.constant(random.integers(0, 2**31, [shape[0], 2])),
    }
    control = tf.zeros([1], tf.int32)
    last = model.trainable_variables[0].value

    def wait() -> object:
        return tf.reshape(last, [-1])[
            0
        ].numpy()  # of the update of the first layer, which comes last

    return TimedStep(
        lambda: train.single(batch, control),
        wait,
        lambda: train.sums.read().means("train")["train_loss"],
    )


def add_efficiency(rows: Sequence[Row]) -> None:
    """Adds `efficiency` to each row: throughput per rank over the first row's."""
    base = rows[0]["images_per_second"] / rows[0]["ranks"]
    for row in rows:
        row["efficiency"] = row["images_per_second"] / row["ranks"] / base


def format_table(rows: Sequence[Row]) -> str:
    """The rows as text, in the form of Lu et al., Tables 3.2 and 3.3, and Mikami et al., Table
    6.
    """
    first = rows[0]
    lines = [
        (
            f"{first['model']}, {first['image_size']} pixels, batch {first['batch_per_rank']} per"
            f" rank, {first['precision']}, {first['allreduce']} all-reduce, compression"
            f" {first['compression']}"
        ),
        (
            f"{'ranks':>6} {'images/s':>10} {'per rank':>10} {'efficiency':>11} {'step ms':>9}"
            f" {'compute ms':>11} {'exposed ms':>11}"
        ),
    ]
    lines += [
        f"{r['ranks']:>6} {r['images_per_second']:>10.1f}"
        f" {r['images_per_second'] / r['ranks']:>10.2f} {100 * r['efficiency']:>10.1f}%"
        f" {1000 * r['step_seconds']:>9.1f} {1000 * r['compute_seconds']:>11.1f}"
        f" {1000 * r['exposed_seconds']:>11.1f}"
        for r in rows
    ]
    return "\n".join(lines)
