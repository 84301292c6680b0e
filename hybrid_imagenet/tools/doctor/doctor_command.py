"""`hybrid-imagenet doctor [-H HOST:SLOTS,...]`: checks hosts before a run and prints what is
wrong.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_OK, UserError, printable
from hybrid_imagenet.tools import command_line, mpirun
from hybrid_imagenet.tools.doctor import host_facts, trials
from hybrid_imagenet.tools.doctor.diagnosis import FAIL, PASS, WARN, Finding, Request, judge

_COLORS = {PASS: "32", WARN: "33", FAIL: "31"}


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; raises UserError for a wrong one."""
    parser = command_line.Parser(
        "doctor",
        "Checks hosts before a run: each line passes, warns or fails, with the remedy.",
        epilog="Exit code: 0 if nothing fails, 1 if something does, 2 for a wrong command line.",
    )
    parser.add_argument(
        "-H",
        "--hosts",
        default="localhost",
        metavar="HOST:SLOTS,...",
        help="hosts with their ranks",
    )
    parser.add_argument(
        "--slots",
        type=command_line.positive_int,
        default=1,
        help="ranks on hosts without :SLOTS (%(default)s)",
    )
    parser.add_argument(
        "--network_interfaces",
        dest="interface",
        metavar="NAME",
        help="network interface that the run will use",
    )
    parser.add_argument(
        "--ssh_port", type=command_line.positive_int, help="port of sshd on the hosts"
    )
    parser.add_argument("--data_dir", help="dataset to compare between hosts")
    parser.add_argument("--run_dir", default="runs", help="where results will go (%(default)s)")
    parser.add_argument(
        "--no_ranks", action="store_true", help="import nothing and start no ranks: only ask hosts"
    )
    return parser.parse_args(arguments)


def examine(options: argparse.Namespace) -> tuple[dict[str, Any], list[Finding]]:
    """Asks all hosts and judges what they say: (facts by host, findings)."""
    slots = host_facts.parse(options.hosts, options.slots)
    if options.interface and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]*", options.interface):
        raise UserError(
            f"--network_interfaces={options.interface}: not a valid interface name; give one such"
            " as eth0"
        )
    if files.is_url(options.data_dir or ""):
        raise UserError(
            f"--data_dir={options.data_dir}: directories are compared between hosts, not URLs;"
            " omit it"
        )
    data_dir = str(files.expand_home(options.data_dir).absolute()) if options.data_dir else None
    run_dir = files.output_path("--run_dir", options.run_dir).absolute()
    request = {"data_dir": data_dir, "run_dir": str(run_dir), "hosts": list(slots)}
    answers = host_facts.ask_all(list(slots), request, options.ssh_port)
    findings = []
    for name, answer in answers.items():
        if isinstance(answer, host_facts.UnreachableError):
            findings.append(Finding(FAIL, f"host {name}", str(answer), answer.remedy))
        else:
            text = (
                f"{answer['cores']} cores, {answer['memory_gb']:.0f} GB, {len(answer['gpus'])} GPUs"
            )
            findings.append(Finding(PASS, f"host {name}", text))
    good = {
        name: answer
        for name, answer in answers.items()
        if not isinstance(answer, host_facts.UnreachableError)
    }
    if good:
        gpus = any(facts["gpus"] for facts in good.values())
        findings.extend(judge(good, Request(slots, options.interface, data_dir, gpus)))
        launcher = check_mpirun()
        findings.append(launcher)
        if not options.no_ranks and launcher.level != FAIL:
            attempt = functools.partial(
                trials.run, interface=options.interface, ssh_port=options.ssh_port
            )
            findings.extend(trials.examine(good, gpus, attempt))
    return good, findings


def check_mpirun() -> Finding:
    """Judges the mpirun that starts ranks, and the one that a bare horovodrun would take
    instead.
    """
    try:
        chosen = mpirun.find()
    except UserError as error:
        return Finding(FAIL, "mpirun", str(error))
    other = mpirun.first_on_path()
    if other is not None and not other.is_supported:
        message = (
            f"{chosen.name} starts the ranks, but {other.path} is first on PATH and belongs to"
            f" {other.name}"
        )
        return Finding(
            WARN,
            "mpirun",
            message,
            "horovodrun would take that one: run . launch/env.sh in this shell",
        )
    return Finding(PASS, "mpirun", f"{chosen.name} at {chosen.path}")


def render(findings: Sequence[Finding], color: bool) -> str:
    """The report: one line for each finding, then the count."""
    lines = []
    for finding in findings:
        level = f"\033[{_COLORS[finding.level]}m{finding.level}\033[0m" if color else finding.level
        remedy = f" -> {finding.remedy}" if finding.level != PASS and finding.remedy else ""
        lines.append(f"{level}  {printable(f'{finding.check}: {finding.message}{remedy}')}")
    counts = {level: sum(f.level == level for f in findings) for level in (PASS, WARN, FAIL)}
    lines.append(", ".join(f"{count} {level}" for level, count in counts.items()))
    return "\n".join(lines)


@command_line.command
def main(arguments: Sequence[str]) -> int:
    """Prints the report."""
    options = parse_arguments(arguments)
    findings = examine(options)[1]
    print(render(findings, color=sys.stdout.isatty() and "NO_COLOR" not in os.environ))
    return EXIT_FAILURE if any(f.level == FAIL for f in findings) else EXIT_OK
