"""Measures training throughput and exposed communication on 1, 2, ... N ranks.

    hybrid-imagenet bench scaling --ranks=1,2 -- --flagfile=digits

This starts a job for each number of ranks, on the hosts of -H in their order. Flags of the training
program are after `--`. Each rank has one batch of random images in memory, so reading and decoding
do not count. Each round times some full steps, then the same number of steps that do not reduce
gradients. All ranks run both, so cores, memory and power are shared in the same way. The difference
is the exposed communication. Times are medians over rounds, on the slowest rank. Efficiency is the
throughput per rank divided by the one of the smallest job (Lu et al., Tables 3.2 and 3.3).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import statistics
import subprocess
import sys
import time
import typing
from collections.abc import Callable, Sequence

from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import SharedError, UserError, pluralize

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator
    from hybrid_imagenet.config import RunConfig

_EPILOG = """\
Examples:
Measure one and two ranks on this host:
  hybrid-imagenet bench scaling --ranks=1,2
Measure up to 16 GPUs of two hosts:
  hybrid-imagenet bench scaling -H node1:8,node2:8 --ranks=1,8,16 -- --per_gpu_batch=256
Words after -- are flags of training."""

_RESULT_PREFIX = "scaling-result "
# The mean loss of these steps is reported, because two variants of a step must have the same loss.
_FIRST_STEPS = 3
# A failed job prints at most so much of its output.
_MAX_REASON_LINES = 3
_MAX_REASON_CHARACTERS = 600
Row = dict[str, typing.Any]


def main(argv: Sequence[str]) -> int:
    """Starts the jobs and prints the table; with --worker, runs as one rank of a job."""
    words, flags = split_arguments(argv)
    options = make_parser().parse_args(words)
    if options.worker:
        return run_worker(options, flags)
    run_jobs(options, flags)
    return 0


def run_jobs(options: argparse.Namespace, flags: Sequence[str]) -> list[Row]:
    """Starts a job for each number of ranks, prints the table and writes --json.

    Args:
      options: The parsed options of the benchmark.
      flags: Flags of the training program.

    Returns:
      A row for each number of ranks.

    Raises:
      UserError: If a job fails; earlier rows are printed and written first.
    """
    rows: list[Row] = []
    counts = parse_rank_counts(options.ranks)
    flags = [*same_step_flags(counts[-1]), *flags]
    try:
        for ranks in counts:
            job = job_command(worker_arguments(options, flags), ranks, options.hosts, options)
            rows.append(run_job(job, ranks, options.timeout))
    finally:
        if rows:
            add_efficiency(rows)
            print(format_table(rows))
            command_line.write_json(options.json, rows)
    return rows


def same_step_flags(ranks: int) -> list[str]:
    """Returns the flags by which one rank runs the step of several.

    Alone, a GPU compiles its step with XLA, and efficiency would compare two different steps.

    Args:
      ranks: Number of ranks of the largest job.
    """
    return ["--nojit_compile"] if ranks > 1 else []


def split_arguments(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words before `--`, and the flags of the training program after it."""
    words = list(argv)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser for the options of the benchmark."""
    parser = command_line.Parser(
        "bench scaling",
        (__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--ranks",
        default="1,2",
        metavar="N,...",
        help="numbers of ranks, smallest first (default: %(default)s)",
    )
    parser.add_argument(
        "-H",
        "--hosts",
        default="",
        metavar="HOST:SLOTS,...",
        help="hosts of the ranks (default: this host)",
    )
    add_network_options(parser)
    parser.add_argument(
        "--threads",
        type=command_line.positive_int,
        help="threads per rank (default: the cores of a host divided by its ranks)",
    )
    add_round_options(parser, steps=5, rounds=5)
    parser.add_argument(
        "--classes",
        type=command_line.positive_int,
        default=1000,
        help="classes of the network (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=command_line.positive_float,
        default=1800,
        help="seconds after which a job is ended (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser


def add_round_options(parser: argparse.ArgumentParser, *, steps: int, rounds: int) -> None:
    """Adds --steps and --rounds, with these defaults."""
    parser.add_argument(
        "--steps",
        type=command_line.positive_int,
        default=steps,
        help="steps per round (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=rounds,
        help="rounds that are measured (default: %(default)s)",
    )


def add_network_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `hybrid-imagenet run` about the network."""
    parser.add_argument(
        "--ssh_port",
        type=command_line.positive_int,
        metavar="PORT",
        help="port of sshd on the hosts (default: from the configuration of ssh)",
    )
    parser.add_argument(
        "--network_interfaces",
        dest="interface",
        default="",
        metavar="NAME",
        help="network interface that the run will use, such as eth0",
    )


def network_arguments(options: argparse.Namespace) -> list[str]:
    """Returns the options of `add_network_options` that are set, as words of a command line."""
    words = []
    if options.ssh_port:
        words.append(f"--ssh_port={options.ssh_port}")
    if options.interface:
        words.append(f"--network_interfaces={options.interface}")
    return words


def parse_rank_counts(text: str) -> list[int]:
    """Parses --ranks.

    Raises:
      UserError: If it is not a list of increasing whole numbers.
    """
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or counts != sorted(set(counts)):
        raise UserError(f"--ranks={text} is not valid. Use increasing whole numbers, as in 1,2,4.")
    return counts


def worker_arguments(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """Returns the words after `python -m hybrid_imagenet.benchmarks` for a rank of a job."""
    words = [
        "scaling",
        "--worker",
        f"--steps={options.steps}",
        f"--rounds={options.rounds}",
        f"--classes={options.classes}",
    ]
    if options.threads:
        words.append(f"--threads={options.threads}")
    return [*words, "--", *flags]


def job_command(
    words: Sequence[str], ranks: int, hosts: str, options: argparse.Namespace, script: str = ""
) -> list[str]:
    """Returns the command of a job.

    Args:
      words: Arguments of the benchmark or of the script.
      ranks: Number of ranks.
      hosts: -H; "" is this host.
      options: The options with the network.
      script: Path of a script to run; "" runs a benchmark of this package.
    """
    is_one_local_rank = ranks == 1 and hosts.partition(":")[0] in ("", "localhost")
    if is_one_local_rank:
        program = [script] if script else ["-m", "hybrid_imagenet.benchmarks"]
        return [sys.executable, *program, *words]
    launcher = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", str(ranks)]
    if hosts:
        launcher += ["-H", hosts]
    launcher += network_arguments(options)
    program = [script] if script else ["--module=hybrid_imagenet.benchmarks", "--"]
    return [*launcher, *program, *words]


def run_job(command: Sequence[str], ranks: int, timeout: float) -> Row:
    """Runs a job, which is terminated if this process ends.

    Args:
      command: See `job_command`.
      ranks: Number of ranks, for messages.
      timeout: Seconds that the job may take.

    Returns:
      The result that rank 0 prints.

    Raises:
      UserError: If the job fails or takes too long.
    """
    job = f"the job of {pluralize(ranks, 'rank')}"
    # SIGTERM raises SystemExit, so that the job is terminated below.
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{job} took more than --timeout={timeout:g} s. Set a longer --timeout, or find out why"
            " it is slow."
        ) from None
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        if process.poll() is None:
            # A launcher ends its ranks when it is terminated.
            process.terminate()
            process.communicate()
    row = {} if process.returncode else parse_result(output)
    if not row:
        raise UserError(f"{job} failed (exit code {process.returncode}): {failure_reason(output)}")
    return row


def parse_result(output: str) -> Row:
    """Returns the result in the output of a job, or an empty row if there is none."""
    result = output.partition(_RESULT_PREFIX)[2]
    if not result:
        return {}
    # A launcher may print more after it on the same line.
    row, _ = json.JSONDecoder().raw_decode(result)
    return dict(row)


def failure_reason(output: str) -> str:
    """Returns the errors in the output of a failed job, or its last lines, as one line."""
    lines = [
        line.strip() for line in output.splitlines() if line.strip() and "NCCL INFO" not in line
    ]
    errors = [line for line in lines if _is_error(line)]
    reason = " | ".join((errors or lines)[-_MAX_REASON_LINES:])
    return reason[:_MAX_REASON_CHARACTERS] or "it printed nothing"


def _is_error(line: str) -> bool:
    return "error:" in line.lower() or "Error" in line or "NCCL WARN" in line


def run_worker(
    options: argparse.Namespace,
    flags: Sequence[str],
    before_timing: Callable[[], None] | None = None,
) -> int:
    """Runs one rank of a job; rank 0 prints the result.

    Args:
      options: The parsed options of the benchmark.
      flags: Flags of the training program.
      before_timing: See `measure`.

    Returns:
      The exit code.

    Raises:
      SharedError: For a flag that this benchmark does not support.
    """
    from hybrid_imagenet import comm, run_plan
    from hybrid_imagenet import config as configuration

    config = configuration.resolve(flags, comm.read_placement().size)
    required_values = {"virtual_gpus": 1, "gradient_accumulation_steps": 1, "random_batch": 0}
    for name, required in required_values.items():
        value = config.get(name)
        if value != required:
            raise SharedError(
                f"{name} is {value}, but a step of this benchmark is one batch of each GPU. Omit"
                " the flags that set it."
            )
    communicator = comm.start(
        run_plan.make(config).communication,
        threads=options.threads,
        persistent_batch_norm=config.network.persistent_batch_norm,
    )
    row = measure(
        config, communicator, options.steps, options.rounds, options.classes, before_timing
    )
    if communicator.rank == 0:
        print(_RESULT_PREFIX + json.dumps(row), flush=True)
    communicator.shutdown()
    return 0


def measure(
    config: RunConfig,
    communicator: Communicator,
    steps: int,
    rounds: int,
    classes: int,
    before_timing: Callable[[], None] | None = None,
) -> Row:
    """Times training steps with and without the reduction of gradients; every rank calls it.

    Args:
      config: Configuration of the run.
      communicator: Communicator of all ranks.
      steps: Steps per round.
      rounds: Number of rounds that are measured.
      classes: Number of classes of the model.
      before_timing: Rank 0 calls it once, after the warmup.

    Returns:
      The row of this number of ranks; all ranks return the same times.
    """
    import tensorflow as tf

    from hybrid_imagenet.comm import SingleProcess
    from hybrid_imagenet.training import hardware

    precision = hardware.choose_precision(config.network.precision, config.network.model)
    gpus = tf.config.get_visible_devices("GPU")
    steps_to_time = [training_step(config, communicator, communicator, precision, classes)]
    if communicator.size > 1:
        steps_to_time.append(
            training_step(
                config,
                communicator,
                SingleProcess(),
                precision,
                classes,
            )
        )
    samples: list[list[float]] = [[] for _ in steps_to_time]
    steps_ahead: list[float] = []
    start = time.perf_counter()
    for _ in range(_FIRST_STEPS):
        steps_to_time[0].call()
    first_loss = steps_to_time[0].loss()
    first_seconds = time.perf_counter() - start
    # Round 0 traces the functions and does not count.
    for round_number in range(rounds + 1):
        for step, seconds in zip(steps_to_time, samples, strict=True):
            step.call()
            step.wait()
            if before_timing and round_number == 1 and communicator.rank == 0:
                before_timing()
                before_timing = None
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                step.call()
            call_seconds = time.perf_counter() - start
            step.wait()
            if round_number > 0:
                elapsed = time.perf_counter() - start
                seconds.append(elapsed / steps)
                steps_ahead.append(steps * (1 - call_seconds / elapsed))
    medians = [statistics.median(seconds) for seconds in samples]
    medians_by_rank = communicator.allgather_object(medians)
    step_seconds = max(medians[0] for medians in medians_by_rank)
    compute_seconds = max(medians[-1] for medians in medians_by_rank)
    return {
        "ranks": communicator.size,
        "hosts": len(set(communicator.hosts)),
        "gpu": (
            tf.config.experimental.get_device_details(gpus[0]).get("device_name") if gpus else None
        ),
        "model": config.network.model,
        "precision": precision,
        "image_size": config.network.image_size,
        "batch_per_rank": config.optimization.per_gpu_batch,
        "allreduce": config.communication.allreduce,
        "compression": config.communication.compression,
        "step_seconds": step_seconds,
        "compute_seconds": compute_seconds,
        "exposed_seconds": max(0.0, step_seconds - compute_seconds),
        "images_per_second": communicator.size * config.optimization.per_gpu_batch / step_seconds,
        # How many steps the host is ahead of the device when the last call of a round returns.
        "steps_ahead": statistics.median(steps_ahead),
        "first_loss": first_loss,
        "first_seconds": first_seconds,
        "gpu_bytes": tf.config.experimental.get_memory_info("GPU:0")["peak"] if gpus else None,
    }


@dataclasses.dataclass(frozen=True)
class TimedStep:
    """A training step for a benchmark.

    Attributes:
      call: Starts the step; with a GPU it may return before the step is done.
      wait: Returns when all steps are done.
      loss: Waits, and returns the mean loss of all images of all steps so far.
    """

    call: Callable[[], object]
    wait: Callable[[], object]
    loss: Callable[[], float]


def training_step(
    config: RunConfig,
    communicator: Communicator,
    reducer: Communicator,
    precision: str,
    classes: int,
) -> TimedStep:
    """Returns a training step on a batch in memory.

    As in training, the host may be ahead of a GPU, because nothing is read from it between steps.

    Args:
      config: Configuration of the run.
      communicator: Communicator of the model.
      reducer: Communicator that reduces gradients.
      precision: Precision of the model, such as `mixed_float16`.
      classes: Number of classes of the model.
    """
    import numpy as np
    import tensorflow as tf

    from hybrid_imagenet import run_plan
    from hybrid_imagenet.config import defaults
    from hybrid_imagenet.data import augmentations, datasets
    from hybrid_imagenet.training import build

    # Use the step of a training on ImageNet.
    images = datasets.source_type("imagenet2012").train_images
    assert images is not None
    plan = run_plan.make(defaults.decide_xla(config, images, precision), precision)
    model = build.model(plan, classes, communicator)
    optimizer = build.optimizer(plan, model, reducer)
    train = build.train_step(plan, model, optimizer)
    random = np.random.default_rng(communicator.rank)
    side = augmentations.host_augmentation(config.data.augmentation, config.network.image_size).side
    shape = [config.optimization.per_gpu_batch, side, side, 3]
    batch = {
        "image": tf.constant(random.integers(0, 256, shape, dtype=np.uint8)),
        "label": tf.constant(random.integers(0, classes, shape[:1])),
        "seed": tf.constant(random.integers(0, 2**31, [shape[0], 2])),
    }
    first_weights = model.trainable_variables[0].value

    def wait() -> object:
        # The update of the first layer is the last operation of a step.
        return tf.reshape(first_weights, [-1])[0].numpy()

    return TimedStep(
        lambda: train.update(batch),
        wait,
        lambda: train.sums.read().means("train")["train_loss"],
    )


def add_efficiency(rows: Sequence[Row]) -> None:
    """Adds `efficiency` to each row: throughput per rank, divided by the one of the first row."""
    first_rate = rows[0]["images_per_second"] / rows[0]["ranks"]
    for row in rows:
        row["efficiency"] = row["images_per_second"] / row["ranks"] / first_rate


def format_table(rows: Sequence[Row]) -> str:
    """Formats the rows as Lu et al., Tables 3.2 and 3.3, and Mikami et al., Table 6."""
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
