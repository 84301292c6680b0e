r"""Compares one GPU, a host and a cluster with published speeds; writes a report.

On this host:

    hybrid-imagenet bench gpu

On a cluster:

    hybrid-imagenet bench gpu -H node1:8,node2:8 -- --precision=mixed_float16 \
        --dataset=tfrecord --data_dir=/data

It checks the hosts as the doctor does. Then it times training steps on one GPU, on all GPUs of the
first host, and on all hosts, with `bench scaling`. Words after `--` are flags of the training
program. `bench input` measures how fast a host reads images. docs/gpus-on-one-machine.md explains
what to do if a step is too slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet import files
from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.commands.doctor import doctor_command as doctor
from hybrid_imagenet.commands.doctor.diagnosis import PASS
from hybrid_imagenet.commands.doctor.host_facts import parse_hosts
from hybrid_imagenet.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UserError, without_secrets

_EPILOG = """\
Examples:
Measure this host:
  hybrid-imagenet bench gpu
Measure two hosts with a batch of 256 per GPU:
  hybrid-imagenet bench gpu -H node1:8,node2:8 -- --per_gpu_batch=256
Words after -- are flags of training."""

# Images per GPU as in the publications: 128 on a P40, and 256 on the other GPUs.
_P40_BATCH = 128
_DEFAULT_BATCH = 256
# Accept 90 % of the published speed, because published speeds vary by about 10 %.
_MIN_SPEED_FRACTION = 0.9
# Report losses of more than this fraction of a step.
_MAX_LOSS_FRACTION = 0.05
_DEFAULT_SLOTS_WITHOUT_GPU = 2
_NO_GPU = (
    "no host has a GPU, so only the checks of the doctor were done. Add --allow_cpu to measure on"
    " the CPU."
)
_INTERRUPTED = "interrupted"
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the report and writes it to --out."""
    if "--arms" in argv:
        raise UserError(
            "--arms is no longer an option of bench gpu. Run python -m benchmarks arms in a"
            " checkout of this program."
        )
    words, flags = scaling.split_arguments(argv)
    options = _parse(words)
    path = files.output_path("--out", options.out) / "report.json"
    report = climb(options, flags)
    print("\n".join(report_lines(report)))
    # Do not replace an earlier report by one without measurements.
    if report["rungs"] or not path.exists():
        command_line.write_json(str(path), report, "--out")
        print(f"report: {path}")
    if report["error"]:
        print(f"error: {report['error']}", file=sys.stderr)
        return EXIT_INTERRUPTED if report["error"] == _INTERRUPTED else EXIT_USAGE
    return EXIT_OK


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(
        "bench gpu",
        (__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
    )
    parser.add_argument(
        "-H",
        "--hosts",
        default="localhost",
        metavar="HOST:SLOTS,...",
        help="hosts with the number of ranks on each (default: all GPUs of this host)",
    )
    scaling.add_network_options(parser)
    parser.add_argument(
        "--out",
        default="gpu-report",
        metavar="DIR",
        help="directory for the report (default: %(default)s)",
    )
    scaling.add_round_options(parser, steps=20, rounds=3)
    parser.add_argument(
        "--classes",
        type=command_line.positive_int,
        default=1000,
        help="classes of the network (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=command_line.positive_float,
        default=900,
        help="seconds after which a job is ended (default: %(default)s)",
    )
    parser.add_argument(
        "--allow_cpu", action="store_true", help="continue without GPUs, with two ranks on the CPU"
    )
    parser.set_defaults(threads=None)
    return parser.parse_args(list(words))


def climb(options: argparse.Namespace, flags: Sequence[str]) -> Row:
    """Measures one GPU, one host and the cluster, until one of them fails.

    Args:
      options: The parsed options of the benchmark.
      flags: Flags of the training program.

    Returns:
      The report, a JSON object. Its `error` is why the measurements ended early, or "".
    """
    report: Row = {
        "benchmark": "gpu",
        "date": datetime.date.today().isoformat(),
        "hosts": options.hosts,
        "flags": list(map(without_secrets, flags)),
        "facts": {},
        "findings": [],
        "rungs": {},
        "expected": None,
        "expected_from": "",
        "reached": [],
        "notes": [],
        "error": "",
    }
    try:
        # Report invalid flags before anything is measured.
        configuration.resolve(_with_defaults(flags, None))
        _measure_rungs(report, options, flags)
    except UserError as error:
        report["error"] = str(error)
    except (KeyboardInterrupt, SystemExit):
        # Ctrl-C raises the first, SIGTERM the second.
        report["error"] = _INTERRUPTED
    return report


def _measure_rungs(report: Row, options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Runs the measurements and stores their results in the report.

    Raises:
      UserError: If one of them fails.
    """
    print("1. the doctor", flush=True)
    facts, findings = doctor.check_hosts(
        doctor.parse_arguments(["-H", options.hosts, *scaling.network_arguments(options)])
    )
    report["facts"] = dict(facts)
    report["findings"] = [dataclasses.asdict(finding) for finding in findings]
    slots = _slots_by_host(options.hosts, facts)
    first = next(iter(slots))
    gpu = next(iter(facts[first]["gpus"]), None)
    if gpu is None and not options.allow_cpu:
        raise UserError(_NO_GPU)
    gpu_key = published.recognize_gpu(gpu["name"], gpu["memory.total"] or "") if gpu else None
    flags = [*scaling.same_step_flags(sum(slots.values())), *_with_defaults(flags, gpu_key)]
    report["flags"] = list(map(without_secrets, flags))
    print(f"2. one GPU{'' if gpu else ' (no GPU: CPU figures)'}", flush=True)
    report["rungs"]["one GPU"] = measure(1, f"{first}:1", flags, options)
    _add_published_speeds(report, gpu_key)
    if slots[first] > 1:
        print(f"3. one host: {slots[first]} ranks", flush=True)
        report["rungs"]["one host"] = measure(
            slots[first], f"{first}:{slots[first]}", flags, options
        )
    if len(slots) > 1:
        print(f"4. the cluster: {sum(slots.values())} ranks on {len(slots)} hosts", flush=True)
        hosts = ",".join(f"{name}:{count}" for name, count in slots.items())
        report["rungs"]["cluster"] = measure(sum(slots.values()), hosts, flags, options)
    report["notes"] = list(_notes(report))


def _slots_by_host(text: str, facts: Mapping[str, Any]) -> dict[str, int]:
    """Returns the number of ranks on each host that answered.

    It is the number in -H, else the number of GPUs, or two on a host without a GPU.

    Args:
      text: -H.
      facts: Facts by host.

    Raises:
      UserError: If no host answered.
    """
    slots = {}
    for name, count in parse_hosts(text, 0).items():
        if name in facts:
            slots[name] = count or len(facts[name]["gpus"]) or _DEFAULT_SLOTS_WITHOUT_GPU
    if not slots:
        raise UserError(
            f"-H {text}: no host answered. Find out why with hybrid-imagenet doctor -H {text}."
        )
    return slots


def _with_defaults(flags: Sequence[str], gpu_key: str | None) -> list[str]:
    """Returns the flags after defaults: synthetic images, and the batch of the publications."""
    batch = _P40_BATCH if gpu_key == "p40" else _DEFAULT_BATCH
    defaults = ["--dataset=synthetic_tensors", f"--per_gpu_batch={batch}"]
    if gpu_key == "p40":
        defaults.append("--precision=float32")
    return [*defaults, *flags]


def measure(ranks: int, hosts: str, flags: Sequence[str], options: argparse.Namespace) -> Row:
    """Runs `bench scaling` on a number of ranks.

    Args:
      ranks: Number of ranks.
      hosts: -H of the job.
      flags: Flags of the training program.
      options: The parsed options of the benchmark.

    Returns:
      The row of the job.

    Raises:
      UserError: If the job fails or takes longer than --timeout.
    """
    words = scaling.job_command(scaling.worker_arguments(options, flags), ranks, hosts, options)
    return scaling.run_job(words, ranks, options.timeout)


def _add_published_speeds(report: Row, gpu_key: str | None) -> None:
    """Adds to the report which speed was published for ResNet-50 on this GPU.

    The expected speed is the fastest one of a single GPU. If only runs on several GPUs were
    published, it is the fastest one of these.

    Raises:
      UserError: If the GPU does not support the precision.
    """
    row = report["rungs"]["one GPU"]
    if gpu_key is None:
        return
    try:
        arithmetic = published.GPUS[gpu_key].arithmetic(row["precision"])
    except ValueError as error:
        raise UserError(f"--precision={row['precision']}: {error}") from None
    if row["image_size"] != 224 or row["model"] != "resnet50":
        return
    report["reached"] = [
        dataclasses.asdict(speed)
        for speed in published.speeds(gpu_key, arithmetic, by_this_program=True)
    ]
    speeds = published.speeds(gpu_key, arithmetic)
    if speeds:
        single_gpu_speeds = [speed for speed in speeds if speed.gpus == 1]
        fastest = max(single_gpu_speeds or speeds, key=lambda speed: speed.images_per_second)
        report["expected"] = fastest.images_per_second
        report["expected_from"] = fastest.source


def _notes(report: Row) -> Iterator[str]:
    """Yields what is slow: one GPU against its published speed, several against one alone."""
    rungs = report["rungs"]
    alone = rungs["one GPU"]
    rate = alone["images_per_second"]
    expected = report["expected"]
    if expected and rate < _MIN_SPEED_FRACTION * expected:
        yield (
            f"one GPU has {100 * rate / expected:.0f} % of the published speed. Check clocks"
            " (nvidia-smi -q -d PERFORMANCE), --persistent_batch_norm and the cores of the host."
            " --profile_steps of training shows a step in TensorBoard."
        )
    max_loss_seconds = _MAX_LOSS_FRACTION * alone["step_seconds"]
    for name, row in list(rungs.items())[1:]:
        shared_seconds = row["compute_seconds"] - alone["step_seconds"]
        if shared_seconds > max_loss_seconds:
            yield (
                f"{name}: {1e3 * shared_seconds:.1f} ms lost before any communication. Check power,"
                " cooling and the cores of the host."
            )
        if row["exposed_seconds"] > max_loss_seconds:
            yield (
                f"{name}: {1e3 * row['exposed_seconds']:.1f} ms of communication that computation"
                f" does not hide -> {_communication_remedy(report)}"
            )


def _communication_remedy(report: Row) -> str:
    for finding in report["findings"]:
        if finding["check"].startswith("NCCL") and finding["level"] != PASS:
            return str(finding["remedy"])
    return (
        "NCCL_DEBUG=INFO shows how NCCL sends data (docs/gpus-on-one-machine.md);"
        " hybrid-imagenet plan predicts what this network allows"
    )


def report_lines(report: Row) -> Iterator[str]:
    """Yields the report as lines of text.

    They are the problems that the doctor found, a table, the published speed, and what is slow.
    """
    for finding in report["findings"]:
        if finding["level"] != PASS:
            yield (
                f"{finding['level']}  {finding['check']}: {finding['message']} ->"
                f" {finding['remedy']}"
            )
    rungs = report["rungs"]
    if not rungs:
        return
    alone = rungs["one GPU"]
    yield (
        f"{alone['model']}, {alone['image_size']} px, {alone['precision']}, batch"
        f" {alone['batch_per_rank']} per rank, {alone['gpu'] or 'CPU'}"
    )
    yield (
        f"{'':9}{'ranks':>6}{'step ms':>9}{'exposed ms':>12}{'images/s':>11}"
        f"{'of N x one alone':>18}"
    )
    for name, row in rungs.items():
        efficiency = row["images_per_second"] / (alone["images_per_second"] * row["ranks"])
        yield (
            f"{name:9}{row['ranks']:6}{1e3 * row['step_seconds']:9.1f}"
            f"{1e3 * row['exposed_seconds']:12.1f}"
            f"{row['images_per_second']:11,.1f}{100 * efficiency:16.1f} %"
        )
    if report["expected"]:
        yield f"published: {report['expected']:,.0f} images/s ({report['expected_from']})"
    for speed in report["reached"]:
        yield f"this program before: {speed['images_per_second']:,.0f} at batch {speed['batch']}"
    yield from report["notes"]
    if report["expected"] and not report["notes"] and not report["error"]:
        yield "the speed is as expected"
