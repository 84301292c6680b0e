"""`hybrid-imagenet doctor [-H HOST:SLOTS,...]`: checks hosts before a run and prints problems."""

from __future__ import annotations

import argparse
import functools
import os
import re
import sys
from collections.abc import Sequence

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line, mpirun
from hybrid_imagenet.commands.doctor import host_facts, trials
from hybrid_imagenet.commands.doctor.diagnosis import (
    FAIL,
    PASS,
    WARN,
    Facts,
    Finding,
    JobRequirements,
    diagnose,
)
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_OK, UserError, printable

# ANSI colors: green, yellow, red.
_COLORS = {PASS: "32", WARN: "33", FAIL: "31"}
_INTERFACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
_EPILOG = """\
Examples:
Check this host:
  hybrid-imagenet doctor
Check two hosts, the network between them and the files of a dataset:
  hybrid-imagenet doctor -H node1:8,node2:8 --data_dir=/data/shards

Exit code: 0 if nothing fails, 1 if something fails, 2 for a wrong command line."""


@command_line.command
def main(arguments: Sequence[str]) -> int:
    """Prints the report; fails if a check fails."""
    options = parse_arguments(arguments)
    _, findings = check_hosts(options)
    use_color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    print(format_report(findings, use_color))
    has_failed = any(finding.level == FAIL for finding in findings)
    return EXIT_FAILURE if has_failed else EXIT_OK


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line; raises UserError for a wrong one."""
    parser = command_line.Parser(
        "doctor",
        "Checks this host, or the hosts of a cluster, before a long run: software, GPUs, network,"
        " disk and dataset. Each line begins with OK, WARN or FAIL and suggests a remedy. The last"
        " line says whether the hosts are ready, or what to fix first.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "-H",
        "--hosts",
        default="localhost",
        metavar="HOST:SLOTS,...",
        help="hosts to check, with the number of ranks on each (default: this host)",
    )
    parser.add_argument(
        "--slots",
        type=command_line.positive_int,
        default=1,
        metavar="RANKS",
        help="number of ranks on hosts without :SLOTS (default: %(default)s)",
    )
    parser.add_argument(
        "--network_interfaces",
        dest="interface",
        metavar="NAME",
        help="network interface that the run will use",
    )
    parser.add_argument(
        "--ssh_port",
        type=command_line.positive_int,
        metavar="PORT",
        help="port of sshd on the hosts (default: from the configuration of ssh)",
    )
    parser.add_argument(
        "--data_dir", metavar="DIR", help="directory of a dataset to compare between hosts"
    )
    parser.add_argument(
        "--run_dir",
        default="runs",
        metavar="DIR",
        help="directory for results, whose disk is checked for space (default: %(default)s)",
    )
    parser.add_argument(
        "--no_ranks",
        action="store_true",
        help="query the hosts only, without starting ranks for a test sum",
    )
    return parser.parse_args(arguments)


def check_hosts(options: argparse.Namespace) -> tuple[dict[str, Facts], list[Finding]]:
    """Queries all hosts, checks their facts, and tries mpirun and a sum over two ranks.

    Returns:
      The facts of the hosts that answered, by name; and all findings, in the order of the report.

    Raises:
      UserError: For an option that cannot be used.
    """
    slots = host_facts.parse_hosts(options.hosts, options.slots)
    if options.interface and not _INTERFACE.fullmatch(options.interface):
        raise UserError(
            f"--network_interfaces={options.interface} is not a valid name. Use the name of a"
            " network interface, such as eth0."
        )
    if files.is_url(options.data_dir or ""):
        raise UserError(
            f"--data_dir={options.data_dir} is a URL, but only directories are compared between"
            " hosts. Omit --data_dir."
        )
    data_dir = str(files.expand_home(options.data_dir).absolute()) if options.data_dir else None
    run_dir = files.output_path("--run_dir", options.run_dir).absolute()
    request = {"data_dir": data_dir, "run_dir": str(run_dir), "hosts": list(slots)}
    answers = host_facts.query_hosts(list(slots), request, options.ssh_port)
    findings = []
    facts_by_host: dict[str, Facts] = {}
    for name, answer in answers.items():
        if isinstance(answer, host_facts.UnreachableError):
            findings.append(Finding(FAIL, f"host {name}", str(answer), answer.remedy))
            continue
        facts_by_host[name] = answer
        summary = (
            f"{answer['cores']} cores, {answer['memory_gb']:.0f} GB, {len(answer['gpus'])} GPUs"
        )
        findings.append(Finding(PASS, f"host {name}", summary))
    if not facts_by_host:
        return facts_by_host, findings
    has_gpus = any(facts["gpus"] for facts in facts_by_host.values())
    requirements = JobRequirements(slots, options.interface, data_dir, has_gpus)
    findings += diagnose(facts_by_host, requirements)
    mpirun_finding = check_mpirun()
    findings.append(mpirun_finding)
    if not options.no_ranks and mpirun_finding.level != FAIL:
        run_trial = functools.partial(
            trials.run_trial, interface=options.interface, ssh_port=options.ssh_port
        )
        findings += trials.run_trials(facts_by_host, has_gpus, run_trial)
    return facts_by_host, findings


def check_mpirun() -> Finding:
    """Checks the mpirun that starts ranks, and the one that a bare horovodrun would use."""
    try:
        chosen = mpirun.find()
    except UserError as error:
        return Finding(FAIL, "mpirun", str(error))
    on_path = mpirun.first_on_path()
    if on_path is not None and not on_path.is_supported:
        return Finding(
            WARN,
            "mpirun",
            f"{chosen.name} starts the ranks, but {on_path.path} is first on PATH and belongs to"
            f" {on_path.name}",
            "horovodrun would use that one: run . launch/env.sh in this shell",
        )
    return Finding(PASS, "mpirun", f"{chosen.name} at {chosen.path}")


def format_report(findings: Sequence[Finding], use_color: bool) -> str:
    """Returns one line for each finding, their numbers, and what to do now."""
    lines = []
    for finding in findings:
        level = f"{finding.level:<4}"
        if use_color:
            level = f"\033[{_COLORS[finding.level]}m{level}\033[0m"
        lines.append(f"{level}  {printable(_finding_text(finding))}")
    counts = []
    for level in (PASS, WARN, FAIL):
        count = sum(finding.level == level for finding in findings)
        counts.append(f"{count} {level}")
    lines += [", ".join(counts), printable(_conclusion(findings))]
    return "\n".join(lines)


def _finding_text(finding: Finding) -> str:
    text = f"{finding.check}: {finding.message}"
    if finding.level != PASS and finding.remedy:
        text += f" -> {finding.remedy}"
    return text


def _conclusion(findings: Sequence[Finding]) -> str:
    """Returns whether the hosts are ready for a run, or the first thing to fix."""
    failed = [finding for finding in findings if finding.level == FAIL]
    if failed:
        return f"Not ready. Fix first: {_finding_text(failed[0])}"
    warned = [finding for finding in findings if finding.level == WARN]
    if warned:
        return f"Ready to run. Look at this first: {_finding_text(warned[0])}"
    return "Ready to run"
