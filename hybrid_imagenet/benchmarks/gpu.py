"""`bench gpu`: measures one GPU, a host and a cluster beside published figures, and writes a
report.

    hybrid-imagenet bench gpu                               # this host
    hybrid-imagenet bench gpu -H node1:8,node2:8 -- --precision=mixed_float16 --dataset=tfrecord
    --data_dir=/data hybrid-imagenet bench gpu --arms                        # from a checkout:
    which settings are best on one GPU

Looks at the hosts as the doctor does, then times training steps on one GPU, on all GPUs of the
first host and of all hosts (`bench scaling` measures them; `bench input` tells how fast a host
reads images). Words after `--` are flags of the training program. docs/first-gpu-run.md tells what
each rung should print.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet import files
from hybrid_imagenet.analysis import published
from hybrid_imagenet.benchmarks import scaling
from hybrid_imagenet.comm import nccl_log
from hybrid_imagenet.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, UserError, without_secrets
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.doctor import doctor_command as doctor
from hybrid_imagenet.tools.doctor.diagnosis import PASS
from hybrid_imagenet.tools.doctor.host_facts import parse_hosts

_BATCHES = {"p40": 128}  # images per GPU, as in the publications; 256 on the others
_ENOUGH = 0.9  # of the published speed; published figures differ by as much
_NOTICED = 0.05  # of a step
_NO_GPU = (
    "no host has a GPU: only the doctor's part was done; --allow_cpu continues with CPU figures"
)
_INTERRUPTED = "interrupted"
Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Measures, prints the report and writes it to --out."""
    if "--arms" in argv:
        return _arms([word for word in argv if word != "--arms"])
    words, flags = scaling.split_arguments(argv)
    options = _parse(words)
    path = files.output_path("--out", options.out) / "report.json"
    report = climb(options, flags)
    print("\n".join(_lines(report)))
    if report["rungs"] or not path.exists():  # else an earlier report is worth more
        command_line.write_json(str(path), report, "--out")
        print(f"report: {path}")
    if report["error"]:
        print(f"error: {report['error']}", file=sys.stderr)
        return EXIT_INTERRUPTED if report["error"] == _INTERRUPTED else EXIT_USAGE
    return EXIT_OK


def _arms(words: Sequence[str]) -> int:
    """Runs `benchmarks arms` of the checkout: its arms are benchmarks and tests that stand
    there.
    """
    root = Path(__file__).parents[2]
    if not (root / "benchmarks" / "arms.py").is_file():
        raise UserError(
            "--arms: needs a checkout of this program, with benchmarks/ and tests/, and this is"
            " none"
        )
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    os.execve(
        sys.executable,
        [sys.executable, "-m", "benchmarks", "arms", *words],
        os.environ | {"PYTHONPATH": path},
    )


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(
        "bench gpu",
        (__doc__ or "").split("\n")[0],
        epilog="Words after -- are flags of the training program.",
    )
    parser.add_argument(
        "-H", "--hosts", default="localhost", metavar="HOST:SLOTS,...", help="(this host, all GPUs)"
    )
    scaling.add_network_options(parser)
    parser.add_argument(
        "--out", default="gpu-report", help="directory for the report (%(default)s)"
    )
    parser.add_argument(
        "--steps", type=command_line.positive_int, default=20, help="steps per round (%(default)s)"
    )
    parser.add_argument(
        "--rounds",
        type=command_line.positive_int,
        default=3,
        help="rounds that count (%(default)s)",
    )
    parser.add_argument(
        "--classes",
        type=command_line.positive_int,
        default=1000,
        help="of the network (%(default)s)",
    )
    parser.add_argument(
        "--timeout", type=float, default=900, help="seconds that a job may take (%(default)s)"
    )
    parser.add_argument(
        "--arms",
        action="store_true",
        help="settle what a GPU must tell; --arms --help has its options",
    )
    parser.add_argument(
        "--allow_cpu", action="store_true", help="continue without GPUs, with two ranks on the CPU"
    )
    parser.set_defaults(threads=None)
    return parser.parse_args(list(words))


def climb(options: argparse.Namespace, flags: Sequence[str]) -> Row:
    """Measures rung after rung until one fails; the result is a JSON object whose `error` says what
    ended it.
    """
    report: Row = {
        "benchmark": "gpu", "date": datetime.date.today().isoformat(), "hosts": options.hosts,
        "flags": list(map(without_secrets, flags)), "facts": {}, "findings": [], "rungs": {},
        "expected": None, "expected_from": "", "reached": [], "notes": [], "error": "",
    }  # fmt: skip
    try:
        configuration.resolve(_with_defaults(flags, None))
        _climb(report, options, flags)
    except UserError as error:
        report["error"] = str(error)
    except (KeyboardInterrupt, SystemExit):  # by Ctrl-C or SIGTERM
        report["error"] = _INTERRUPTED
    return report


def _climb(report: Row, options: argparse.Namespace, flags: Sequence[str]) -> None:
    print("1. the doctor", flush=True)
    facts, findings = doctor.check_hosts(
        doctor.parse_arguments(["-H", options.hosts, *scaling.network_arguments(options)])
    )
    report["facts"], report["findings"] = (
        dict(facts),
        [dataclasses.asdict(finding) for finding in findings],
    )
    first, slots = _slots(options.hosts, facts)
    gpu = next(iter(facts[first]["gpus"]), None)
    if gpu is None and not options.allow_cpu:
        raise UserError(_NO_GPU)
    key = published.recognize_gpu(gpu["name"], gpu["memory.total"] or "") if gpu else None
    flags = _with_defaults(flags, key)
    report["flags"] = list(map(without_secrets, flags))
    print(f"2. one GPU{'' if gpu else ' (no GPU: CPU figures)'}", flush=True)
    report["rungs"]["one GPU"] = measure(1, f"{first}:1", flags, options)
    _expect(report, key)
    if slots[first] > 1:
        print(f"3. one host: {slots[first]} ranks", flush=True)
        report["rungs"]["one host"] = measure(
            slots[first], f"{first}:{slots[first]}", flags, options
        )
    if len(slots) > 1:
        print(f"4. the cluster: {sum(slots.values())} ranks on {len(slots)} hosts", flush=True)
        everywhere = ",".join(f"{name}:{count}" for name, count in slots.items())
        report["rungs"]["cluster"] = measure(sum(slots.values()), everywhere, flags, options)
    report["notes"] = list(_notes(report))


def _slots(text: str, facts: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The first host, and ranks by host: its slots where given, else its GPUs, or two on a CPU."""
    known = {name: count for name, count in parse_hosts(text, 0).items() if name in facts}
    found = {name: count or len(facts[name]["gpus"]) or 2 for name, count in known.items()}
    if not found:
        raise UserError(f"-H {text}: no host answered; hybrid-imagenet doctor -H {text} says why")
    return next(iter(found)), found


def _with_defaults(flags: Sequence[str], gpu: str | None) -> list[str]:
    """The flags, with ResNet-50 on made images and the publications' batch in front."""
    precision = ["--precision=float32"] if gpu == "p40" else []
    return [
        "--dataset=synthetic_tensors",
        f"--per_gpu_batch={_BATCHES.get(gpu or '', 256)}",
        *precision,
        *flags,
    ]


def measure(ranks: int, hosts: str, flags: Sequence[str], options: argparse.Namespace) -> Row:
    """What `bench scaling` measures on some ranks, with NCCL's `transport` between several.

    Raises:
      UserError: if the job fails or takes longer than --timeout.
    """
    words = scaling.job_command(scaling.worker_arguments(options, flags), ranks, hosts, options)
    row, said = scaling.run_job(words, ranks, options.timeout, os.environ | {"NCCL_DEBUG": "INFO"})
    return row | ({"transport": str(nccl_log.parse_transport(said))} if ranks > 1 else {})


def _expect(report: Row, key: str | None) -> None:
    """What is published for this GPU and precision, for ResNet-50 at 224 pixels.

    To expect is the fastest of one GPU alone, or where none is published, of one of several.
    """
    row = report["rungs"]["one GPU"]
    if key is None:
        return
    try:
        kind = published.GPUS[key].arithmetic(row["precision"])
    except ValueError as error:
        raise UserError(f"--precision={row['precision']}: {error}") from None
    if row["image_size"] != 224 or row["model"] != "resnet50":
        return
    report["reached"] = [
        dataclasses.asdict(speed) for speed in published.speeds(key, kind, own=True)
    ]
    speeds = published.speeds(key, kind)
    if speeds:
        fastest = max(
            [s for s in speeds if s.gpus == 1] or speeds, key=lambda speed: speed.images_per_second
        )
        report["expected"], report["expected_from"] = fastest.images_per_second, fastest.source


def _notes(report: Row) -> Iterator[str]:
    """What falls short: one GPU of the published speed, several of as many alone."""
    rungs = report["rungs"]
    alone = rungs["one GPU"]
    rate, expected = alone["images_per_second"], report["expected"]
    if expected and rate < _ENOUGH * expected:
        yield (
            f"one GPU has {100 * rate / expected:.0f} % of the published speed: clocks (nvidia-smi"
            " -q -d PERFORMANCE), --persistent_batch_norm, cores of the host; --profile_steps of"
            " training shows a step in TensorBoard"
        )
    for name, row in list(rungs.items())[1:]:
        shared = row["compute_seconds"] - alone["step_seconds"]
        if shared > _NOTICED * alone["step_seconds"]:
            yield (
                f"{name}: {1e3 * shared:.1f} ms lost before any communication: power, cooling,"
                " cores of the host"
            )
        if row["exposed_seconds"] > _NOTICED * alone["step_seconds"]:
            ways = [
                f["remedy"]
                for f in report["findings"]
                if f["check"].startswith("NCCL") and f["level"] != PASS
            ]
            remedy = next(iter(ways), "hybrid-imagenet plan tells what this network allows")
            exposed = (
                f"{name}: {1e3 * row['exposed_seconds']:.1f} ms of communication that nothing hides"
            )
            yield f"{exposed}; {row['transport']} -> {remedy}"


def _lines(report: Row) -> Iterator[str]:
    """The report as text: the doctor's complaints, a row for each rung, the published speed, and
    what falls short.
    """
    for found in report["findings"]:
        if found["level"] != PASS:
            yield f"{found['level']}  {found['check']}: {found['message']} -> {found['remedy']}"
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
        share = row["images_per_second"] / (alone["images_per_second"] * row["ranks"])
        yield (
            f"{name:9}{row['ranks']:6}{1e3 * row['step_seconds']:9.1f}"
            f"{1e3 * row['exposed_seconds']:12.1f}"
            f"{row['images_per_second']:11,.1f}{100 * share:16.1f} %"
        )
    if report["expected"]:
        yield f"published: {report['expected']:,.0f} images/s ({report['expected_from']})"
    for before in report["reached"]:
        yield f"this program before: {before['images_per_second']:,.0f} at batch {before['batch']}"
    yield from report["notes"]
    if report["expected"] and not report["notes"] and not report["error"]:
        yield "the speed is as expected"
