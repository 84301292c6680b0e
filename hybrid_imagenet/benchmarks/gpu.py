"""`benchmarks gpu`: the first run on GPUs as a ladder, with a report to attach to a bug report.

    hybrid-imagenet bench gpu                               # this host
    hybrid-imagenet bench gpu -H node1:8,node2:8 -- --precision=mixed_float16 --dataset=tfrecord --data_dir=/data

Looks at the hosts as the doctor does, then times and profiles training steps on one GPU, times them on all GPUs of the
first host and of all hosts, and measures how fast a host reads images. It says by which cause the speed falls short of
the fastest that is published for the GPU, and shows the limit of its memory beside it. Words after `--` are flags of
the training program.
docs/first-gpu-run.md tells what each rung should print.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet.analysis import gpu_models, published, shortfall
from hybrid_imagenet.benchmarks import _gpu_jobs, _gpu_report
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, UserError, without_secrets
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.doctor import command as doctor
from hybrid_imagenet.tools.doctor.findings import FAIL, WARN, Finding

_BATCHES = {"p40": 128}  # images per GPU, as in the publications; 256 on the others
_NO_GPU = "no host has a GPU: only the doctor's part was done; --allow_cpu goes on with CPU figures"
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Tools:
    """How the ladder measures; each may be replaced in a test.

    Attributes:
      examine: the facts of hosts by name, and the doctor's findings, for its command line.
      measure: the result of a job of so many ranks on hosts (HOST:SLOTS,...), with some steps profiled.
      input_rate: images per second that this host reads, for the flags of the training program.
    """

    examine: Callable[[Sequence[str]], tuple[Mapping[str, Any], list[Finding]]]
    measure: Callable[[int, str, int, Sequence[str]], Row]
    input_rate: Callable[[Sequence[str]], float]


def main(argv: Sequence[str]) -> int:
    """Climbs the ladder, prints the report and writes it to --out."""
    words = list(argv)
    place = words.index("--") if "--" in words else len(words)
    options = _parse(words[:place])
    tools = Tools(
        examine=lambda arguments: doctor.examine(doctor.parse_arguments(arguments)),
        measure=lambda ranks, hosts, profiled, flags: _gpu_jobs.measure(ranks, hosts, profiled, flags, options),
        input_rate=_gpu_jobs.input_rate,
    )
    report = climb(options, words[place + 1 :], tools, _say)
    _write(report, Path(options.out))
    print(_gpu_report.summary(report))
    print(f"report: {options.out}/report.md")
    if report["error"]:
        print(f"error: {report['error']}", file=sys.stderr)
        return EXIT_USAGE
    return EXIT_OK


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser(
        "bench gpu", (__doc__ or "").split("\n")[0], epilog="Words after -- are flags of the training program."
    )
    parser.add_argument("-H", "--hosts", default="localhost", metavar="HOST:SLOTS,...", help="(this host, all GPUs)")
    parser.add_argument("--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument(
        "--network_interfaces", dest="interface", default="", help="network interface that the run will use"
    )
    parser.add_argument("--out", default="gpu-report", help="directory for the report (%(default)s)")
    parser.add_argument("--steps", type=command_line.positive, default=20, help="steps per round (%(default)s)")
    parser.add_argument("--rounds", type=command_line.positive, default=3, help="rounds that count (%(default)s)")
    parser.add_argument("--profiled", type=command_line.positive, default=5, help="steps to profile (%(default)s)")
    parser.add_argument("--classes", type=command_line.positive, default=1000, help="of the network (%(default)s)")
    parser.add_argument("--timeout", type=float, default=900, help="seconds that a job may take (%(default)s)")
    parser.add_argument("--allow_cpu", action="store_true", help="go on without GPUs, with two ranks on the CPU")
    parser.add_argument("--no_input", action="store_true", help="leave out the rate of reading")
    return parser.parse_args(list(words))


def _say(line: str) -> None:
    print(line, flush=True)


def climb(options: argparse.Namespace, flags: Sequence[str], tools: Tools, say: Callable[[str], None]) -> Row:
    """Measures rung after rung until one fails; the result is a JSON object whose `error` says what ended it."""
    report: Row = {
        "benchmark": "gpu", "date": datetime.date.today().isoformat(), "hosts": options.hosts,
        "flags": list(map(without_secrets, flags)),
        "facts": {}, "findings": [], "rungs": {}, "input_rate": None, "expected": None, "expected_from": "",
        "published": [], "reached": [], "limit": None, "causes": [], "fused": None, "error": "",
    }  # fmt: skip
    try:
        configuration.resolve(_with_defaults(flags, None))
        _climb(report, options, flags, tools, say)
    except UserError as error:
        report["error"] = str(error)
    return report


def _climb(report: Row, options: argparse.Namespace, flags: Sequence[str], tools: Tools, say: Callable) -> None:
    say("1. the doctor")
    arguments = ["-H", options.hosts, *([f"--ssh_port={options.ssh_port}"] if options.ssh_port else [])]
    arguments += [f"--network_interfaces={options.interface}"] if options.interface else []
    facts, findings = tools.examine(arguments)
    report["facts"], report["findings"] = dict(facts), [dataclasses.asdict(finding) for finding in findings]
    for finding in findings:
        if finding.level == FAIL:
            say(f"   fail  {finding.check}: {finding.message} -> {finding.remedy}")
    first, slots = _slots(options.hosts, facts)
    gpu = next(iter(facts[first]["gpus"]), None) if first else None
    if gpu is None and not options.allow_cpu:
        raise UserError(_NO_GPU)
    key = gpu_models.recognize(gpu["name"], float(gpu["memory.total"] or 0)) if gpu else None
    flags = _with_defaults(flags, key)
    report["flags"], report["gpu"] = list(map(without_secrets, flags)), key
    say(f"2. one GPU{'' if gpu else ' (no GPU: CPU figures)'}")
    report["rungs"]["one GPU"] = tools.measure(1, f"{first}:1", options.profiled, flags)
    _expect(report, key)
    if gpu and report["rungs"]["one GPU"]["precision"] == "mixed_float16":
        say("   the same with --fuse_relu_gradients")
        report["fused"] = _tried(tools, f"{first}:1", [*flags, "--fuse_relu_gradients"])
    if slots[first] > 1:
        say(f"3. one host: {slots[first]} ranks")
        report["rungs"]["one host"] = tools.measure(slots[first], f"{first}:{slots[first]}", 0, flags)
    if len(slots) > 1:
        text = ",".join(f"{name}:{count}" for name, count in slots.items())
        say(f"4. the cluster: {sum(slots.values())} ranks on {len(slots)} hosts")
        report["rungs"]["cluster"] = tools.measure(sum(slots.values()), text, 0, flags)
    if not options.no_input:
        say("5. input")
        report["input_rate"] = tools.input_rate(flags)
    report["causes"] = [dataclasses.asdict(cause) for cause in _causes(report)]


def _tried(tools: Tools, place: str, flags: Sequence[str]) -> float | str:
    """Images per second with flags that a GPU may refuse, or why it does."""
    try:
        return float(tools.measure(1, place, 0, flags)["images_per_second"])
    except UserError as error:
        return str(error)


def _slots(text: str, facts: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """The first host, and ranks by host: its slots where given, else its GPUs, or two on a CPU."""
    found = {}
    for word in text.split(","):
        name, _, count = word.strip().partition(":")
        if name in facts:
            found[name] = int(count) if count else len(facts[name]["gpus"]) or 2
    if not found:
        raise UserError(f"-H {text}: no host answered; hybrid-imagenet doctor -H {text} says why")
    return next(iter(found)), found


def _with_defaults(flags: Sequence[str], gpu: str | None) -> list[str]:
    """The flags, with ResNet-50 on made images and the publications' batch in front."""
    batch = _BATCHES.get(gpu or "", 256)
    precision = ["--precision=float32"] if gpu == "p40" else []
    return ["--dataset=synthetic_tensors", f"--per_gpu_batch={batch}", *precision, *flags]


def _expect(report: Row, key: str | None) -> None:
    """What is published for this GPU and precision, for ResNet-50 at 224 pixels.

    To expect is the fastest of one GPU alone, or where none is published, of one of several.
    """
    row = report["rungs"]["one GPU"]
    if key is None:
        return
    gpu = gpu_models.GPUS[key]
    try:
        kind = gpu_models.arithmetic(gpu, row["precision"])
    except ValueError as error:
        raise UserError(f"--precision={row['precision']}: {error}") from None
    if row["image_size"] != 224 or row["model"] != "resnet50":
        return
    speeds = published.speeds(key, kind)
    report["published"] = [dataclasses.asdict(speed) for speed in speeds]
    report["reached"] = [dataclasses.asdict(speed) for speed in published.own_speeds(key, kind)]
    report["limit"] = gpu.memory_limit if kind == "fp16" else None
    if speeds:
        fastest = max([s for s in speeds if s.gpus == 1] or speeds, key=lambda speed: speed.images_per_second)
        report["expected"], report["expected_from"] = fastest.images_per_second, fastest.source


def _causes(report: Row) -> list[shortfall.Cause]:
    rungs = report["rungs"]
    if not rungs["one GPU"].get("profile"):
        return []  # a CPU's step is not of this ladder's making
    return shortfall.causes(
        report["expected"],
        _one(rungs["one GPU"], report["gpu"]),
        _together(rungs.get("one host"), report["findings"], "inside"),
        _together(rungs.get("cluster"), report["findings"], "from"),
        report["input_rate"],
    )


def _one(row: Row, key: str | None) -> shortfall.OneGpu:
    profile = row["profile"]
    kinds: dict[str, float] = {}
    for kernel in profile["kernels"]:
        kinds[kernel["kind"]] = kinds.get(kernel["kind"], 0.0) + kernel["milliseconds"]
    return shortfall.OneGpu(
        images=row["batch_per_rank"],
        step=1e3 * row["step_seconds"],
        profiled=profile["step"],
        busy=profile["busy"],
        kinds=kinds,
        launches=profile["launches"],
        layout=profile["layout"],
        tensor_cores=profile["tensor_cores"],
        wants_tensor_cores=key not in (None, "p40") and row["precision"] != "float32",
        slowed=row.get("slowed", ""),
        fetches=profile["fetches"],
        returned=row.get("returned"),
    )


def _together(row: Row | None, findings: Sequence[Mapping[str, str]], where: str) -> shortfall.Together | None:
    """A rung of several ranks, with what the doctor found about NCCL there."""
    if row is None:
        return None
    bad = [f for f in findings if f["check"].startswith(f"NCCL {where} ") and f["level"] in (WARN, FAIL)]
    return shortfall.Together(
        ranks=row["ranks"],
        hosts=row["hosts"],
        step=1e3 * row["step_seconds"],
        compute=1e3 * row["compute_seconds"],
        transport=row.get("transport", "NCCL said nothing"),
        warning=bad[0]["remedy"] if bad else "",
    )


def _write(report: Row, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (folder / "report.md").write_text(_gpu_report.markdown(report), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out={folder}: cannot be written ({error.strerror})") from None
