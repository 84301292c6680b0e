"""`hybrid-imagenet run [-np N] [-H HOST:SLOTS,...] -- FLAGS`: trains on several ranks and hosts.

`hybrid-imagenet run [-np N] SCRIPT.py ARGUMENTS` runs a script of yours on every rank instead.
Without -np and slots, one rank is started for each visible GPU (`commands.rank_count`). mpirun
starts the ranks. The exit codes are listed in docs/runs.md. A supervisor (`resilience.supervisor`)
makes sure that the command returns even if a host is lost, a rank is stopped or this process gets a
signal. With --max_restarts the job is restarted after a loss (`resilience.restarts`).
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import functools
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
from hybrid_imagenet import files, recipes
from hybrid_imagenet.cluster import other_launchers
from hybrid_imagenet.cluster.environment import RANKS_VARIABLE, openmpi_prefix
from hybrid_imagenet.comm.process import (
    ENGINE_VARIABLE,
    is_engine_requested,
    reject_unrequested_engine,
    resolve_engine,
)
from hybrid_imagenet.comm.settings import ENGINES
from hybrid_imagenet.commands import command_line, host_limits, host_list, mpirun, rank_count
from hybrid_imagenet.commands.command_line import Parser, print_escaped
from hybrid_imagenet.commands.doctor import host_facts
from hybrid_imagenet.config import RunConfig
from hybrid_imagenet.config.help import first_commands, topic
from hybrid_imagenet.errors import (
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_USAGE,
    UserError,
    did_you_mean,
    pluralize,
)
from hybrid_imagenet.options import normalize_flag
from hybrid_imagenet.resilience import discovery, supervisor
from hybrid_imagenet.resilience.exit_code import JOB_VARIABLE
from hybrid_imagenet.resilience.restarts import RestartLoop, RestartPolicy
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.runlog import run_dir as run_directories
from hybrid_imagenet.training import preflight

_TRAINING_MODULE = "hybrid_imagenet.main"
_SCRIPT_RUNNER = "hybrid_imagenet.resilience.script_runner"
_MAX_RANKS = 1 << 16
_MAX_PORT = 65535
_MAX_RESTARTS = 1000
# Plain point-to-point transport. No binding, so that a rank's threads may use all the cores that
# the program divides among the ranks of a host.
_MPIRUN_OPTIONS = (
    "--mca",
    "pml",
    "ob1",
    "-bind-to",
    "none",
    "-map-by",
    "slot",
)
# Variables that ranks on other hosts get, in addition to those that Open MPI sets. mpirun sends
# their values over its own connections, so they do not appear in a command line. docs/trust.md
# lists them.
_FORWARDED_VARIABLES = re.compile(
    r"PATH|PYTHONPATH|LD_LIBRARY_PATH|OPAL_PREFIX|VIRTUAL_ENV|GLIBC_TUNABLES|((?i:https?|ftp|all|no)_proxy)"
    r"|(NCCL|HOROVOD|TF|XLA|KERAS|HYBRID_IMAGENET|HF|AWS|GOOGLE|AZURE|FSSPEC|TFDS)_.*"
    r"|(WANDB|MLFLOW|TRACKIO)_.*"
)
_SCRIPT_NAME = re.compile(r"[^-].*\.py")
# These options take a command, which may end in .py without being the script to run.
_OPTIONS_WITH_COMMAND = ("--host_discovery_script", "--preempted")
# Open MPI's own shell commands do not quote paths: only these characters survive.
_PATH_FOR_OPEN_MPI = re.compile(r"[A-Za-z0-9_@%+=:,./~-]+")
_INTERFACE_OR_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]{0,100}")

_USAGE = """\
%(prog)s [-np N] [-H HOST:SLOTS,...] [options] -- TRAIN_FLAGS
       %(prog)s [-np N] [-H HOST:SLOTS,...] [options] SCRIPT [ARGS]"""
_EXAMPLES = """\
Examples:
Train on all GPUs of this host:
  hybrid-imagenet run -- --recipe=mlperf_lars --dataset=tfrecord --data_dir=/data
Train the handwritten digits on two CPU ranks:
  hybrid-imagenet run -np 2 -- --flagfile=digits
Train on two hosts with 8 GPUs each:
  hybrid-imagenet run -H node1:8,node2:8 -- --recipe=mlperf_lars --dataset=tfrecord --data_dir=/data
Run your own script on four ranks:
  hybrid-imagenet run -np 4 train.py --epochs=8
Run an example of the program, even without a checkout:
  hybrid-imagenet run -np 2 examples/keras_fit.py
Print the mpirun command and exit:
  hybrid-imagenet run -np 4 --dry_run train.py"""


class _Action(enum.Enum):
    """The next step after the command line and the configuration have been checked."""

    START_RANKS = enum.auto()
    # The program only prints something, such as its help: it runs once, without a launcher.
    RUN_HERE = enum.auto()
    # --check_only: the checks were the job.
    NOTHING = enum.auto()


@dataclasses.dataclass(frozen=True)
class _LaunchPlan:
    """How a program is to be launched.

    Attributes:
      stall_timeout: --stall_timeout of the program in seconds; the supervisor derives its own
        timeouts from it.
      config: Configuration of the training run; None for a script or another module.
      action: What to do.
    """

    stall_timeout: float
    config: RunConfig | None
    action: _Action = _Action.START_RANKS


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code of the job."""
    try:
        other_launchers.reject_other_launchers(os.environ)
        options, flags = parse_arguments(arguments)
        if not flags and not options.script and options.module == _TRAINING_MODULE:
            print(first_commands(_command_up_to_flags(arguments)), file=sys.stderr)
            return EXIT_USAGE
        if options.engine and not options.script and options.module == _TRAINING_MODULE:
            # So that it is stored in config.json, and `resume` uses it again.
            flags = [f"--engine={options.engine}", *flags]
        plan = _plan_launch(options, flags)
        _choose_engine(options, plan)
        _set_environment(options)
        rank_command = _rank_command(options, flags)
        slots = host_facts.parse_hosts(options.hosts)
        command = mpirun_command(options, rank_command, slots, options.np)
    except UserError as error:
        return _print_error(error)
    if options.dry_run:
        print_escaped(shlex.join(command))
        return EXIT_OK
    if plan.action is _Action.NOTHING:
        return EXIT_OK
    if plan.action is _Action.RUN_HERE:
        return subprocess.run(rank_command, check=False).returncode
    try:
        if _has_ranks_here(options):
            host_limits.check(options.interface)
        if plan.config is None or plan.config.run.progress != "none":
            _print_start(options, plan.config)
        # Found before the job starts, because the job creates its directory: after that, the name
        # would no longer be free.
        checkpoint_folder = _checkpoint_folder(plan.config) if options.preempted else None
        checkpoints_before = _checkpoints(checkpoint_folder)
        exit_code, last_job = _run_job(options, flags, plan)
    except UserError as error:
        return _print_error(error)
    # Schedulers cancel a job by SIGTERM, and a canceled job must not be queued again. So the
    # command of --preempted runs after SIGUSR1 only.
    is_preempted = exit_code == EXIT_PREEMPTED and REQUESTS.first_signal == signal.SIGUSR1
    if is_preempted and options.preempted:
        has_saved = last_job is not None and last_job.has_saved
        if checkpoint_folder is not None:
            has_saved = not _checkpoints(checkpoint_folder) <= checkpoints_before
        if not has_saved and (plan.config is not None or options.script):
            # A job that makes no progress would be queued again forever.
            print(
                "The command of --preempted was not run, because the job saved no checkpoint. Give"
                " the job more time.",
                file=sys.stderr,
            )
        elif supervisor.succeeds(options.preempted):
            return EXIT_OK
    if last_job is not None:
        script_command = shlex.join(["hybrid-imagenet", "run", *arguments])
        supervisor.print_next_command(last_job, exit_code, script_command)
    return exit_code


def _print_error(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _command_up_to_flags(arguments: Sequence[str]) -> str:
    options = shlex.join(word for word in arguments if word != "--")
    return f"hybrid-imagenet run {options} --" if options else "hybrid-imagenet run --"


def parse_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses and checks the options of `run`.

    Returns:
      The options, with the script in `script` (or ""); and the flags of the training program or
      the arguments of the script.

    Raises:
      UserError: For a wrong command line.
    """
    option_words, script, program_arguments = split_command(arguments)
    if not script:
        _reject_training_flags(option_words, program_arguments)
    options, superfluous = _parser().parse_known_args(option_words)
    if superfluous:
        raise UserError(
            f"{superfluous[0]} is neither an option of run nor a script, whose name ends in .py."
            " Write flags of training after --. See hybrid-imagenet run --help."
        )
    options.script = script
    _check_options(options)
    return options, program_arguments


def split_command(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Splits the command line into the options of `run`, the script, and the program's arguments.

    The program's arguments begin after `--`, or after the first word that is the name of a script.

    Returns:
      The options of `run`; the script, or "" for the training program; its arguments.
    """
    words = list(words)
    for index, word in enumerate(words):
        if word == "--":
            return words[:index], "", words[index + 1 :]
        is_option_value = index > 0 and normalize_flag(words[index - 1]) in _OPTIONS_WITH_COMMAND
        if _SCRIPT_NAME.fullmatch(word) and not is_option_value:
            return words[:index], word, words[index + 1 :]
    return words, "", []


def _reject_training_flags(option_words: Sequence[str], program_arguments: Sequence[str]) -> None:
    """Raises UserError with the corrected command if flags of training come before `--`."""
    # `run` itself has an option --engine.
    training_flags = {"flagfile", *configuration.OPTIONS} - {"engine"}
    for name in configuration.OPTIONS:
        training_flags |= {f"no{name}", f"no_{name}"}
    for index, word in enumerate(option_words):
        name = normalize_flag(word).partition("=")[0]
        if name.startswith("--") and name[2:] in training_flags:
            corrected = [*option_words[:index], "--", *option_words[index:], *program_arguments]
            command = shlex.join(["hybrid-imagenet", "run", *corrected])
            raise UserError(
                f"{name} is a flag of training, but comes before --. Write flags of training"
                f" after --: {command}"
            )


def _parser() -> Parser:
    parser = Parser(
        "run",
        "Starts the training program, or a script of yours, as several ranks on this host or on"
        " several hosts. Without -np and slots, one rank is started for each GPU. If a rank fails,"
        " all ranks are stopped. To train in one process, use hybrid-imagenet train.",
        usage=_USAGE,
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "-np",
        "-n",
        "--num_processes",
        "--num_proc",
        dest="np",
        type=command_line.whole_number,
        metavar="N",
        help=(
            "total number of ranks on all hosts (default: the slots of -H, or one rank for each"
            " visible GPU)"
        ),
    )
    parser.add_argument(
        "--nproc_per_node",
        type=_parse_ranks_per_host,
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
            " host, or -np divided over the hosts (default: the hosts of a PBS, LSF or Slurm"
            " job, or else this host)"
        ),
    )
    parser.add_argument(
        "--hostfile",
        metavar="FILE",
        help="file with a HOST, HOST:SLOTS or HOST slots=N in each line, instead of -H",
    )
    parser.add_argument(
        "--network_interfaces",
        dest="interface",
        default="",
        metavar="NAME",
        help="network interface that the ranks communicate through, such as eth0",
    )
    parser.add_argument(
        "--engine",
        choices=tuple(ENGINES),
        help=(
            "library that connects the ranks (default: Horovod if it is installed, otherwise"
            " TensorFlow, whose ports have no password, so on several hosts you must ask for it)"
        ),
    )
    parser.add_argument(
        "--ssh_port",
        type=command_line.whole_number,
        metavar="PORT",
        help="port of sshd on the other hosts (default: from the configuration of ssh)",
    )
    parser.add_argument(
        "--module",
        default=_TRAINING_MODULE,
        help="Python module that each rank runs (default: %(default)s)",
    )
    parser.add_argument(
        "--accept_new_host_keys",
        action="store_true",
        help="let ssh trust hosts that it does not know yet",
    )
    parser.add_argument(
        "--preempted",
        default="",
        metavar="COMMAND",
        help="command to run after SIGUSR1 has stopped the job and a checkpoint was saved",
    )
    parser.add_argument("--dry_run", action="store_true", help="print the mpirun command and exit")
    restarts = parser.add_argument_group("restart after a loss")
    restarts.add_argument(
        "--max_restarts",
        type=command_line.whole_number,
        default=0,
        metavar="N",
        help="how often to restart after a lost rank or host (default: %(default)s)",
    )
    restarts.add_argument(
        "--min_np",
        type=command_line.whole_number,
        metavar="N",
        help="wait for more hosts if there are fewer ranks than this (default: 1)",
    )
    restarts.add_argument(
        "--host_discovery_script",
        default="",
        metavar="SCRIPT",
        help="program that prints one HOST:SLOTS per line, instead of -H",
    )
    restarts.add_argument(
        "--host_timeout",
        type=command_line.number,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for hosts (default: %(default)g)",
    )
    restarts.add_argument(
        "--join_interval",
        type=command_line.number,
        default=600.0,
        metavar="SECONDS",
        help=(
            "minimum time of training before a restart on hosts that have joined (default:"
            " %(default)g)"
        ),
    )
    return parser


def _parse_ranks_per_host(text: str) -> int | None:
    """Parses --nproc_per_node; returns None for one rank per visible GPU, which is the default.

    torchrun calls this gpu or auto.
    """
    if text in ("gpu", "auto"):
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not valid. Use a whole number, or gpu.")
    return int(text)


def _check_options(options: argparse.Namespace) -> None:
    """Checks the options, and sets what follows from them.

    These are `np`, `min_np`, `hosts`, the `reason` for the rank count, and the `host_source`, which
    is "" for -H and for this host.
    """
    _check_range("-np ", options.np, 1, _MAX_RANKS)
    _check_range("--nproc_per_node=", options.nproc_per_node, 1, _MAX_RANKS)
    _check_range("--ssh_port=", options.ssh_port, 1, _MAX_PORT)
    for name, text in (("--network_interfaces", options.interface), ("--module", options.module)):
        if text and not _INTERFACE_OR_MODULE.fullmatch(text):
            raise UserError(
                f"{name}={text} is not a valid name. Use letters, digits, dots, dashes and"
                " underscores."
            )
    if options.script and not Path(options.script).is_file():
        options.script = _shipped_example(options.script)
    if options.host_discovery_script:
        _check_host_discovery(options)
    _check_range("--max_restarts=", options.max_restarts, 0, _MAX_RESTARTS)
    hosts = None
    if not options.host_discovery_script:
        hosts = host_list.read(options.hosts, options.hostfile, os.environ)
    options.host_source = "" if hosts is None or options.hosts else hosts.source
    options.np, slots, options.reason = rank_count.choose(
        options.np, options.nproc_per_node, hosts, options.ssh_port
    )
    if not options.host_discovery_script and options.np > sum(slots.values()):
        raise UserError(_too_few_slots_message(options.np, slots, options.host_source))
    if options.min_np is None:
        options.min_np = 1
    if not 1 <= options.min_np <= options.np:
        raise UserError(
            f"--min_np={options.min_np} is not possible with -np {options.np}. Use a number from 1"
            f" to {options.np}."
        )
    options.hosts = format_slots(slots)


def _shipped_example(script: str) -> str:
    """Returns the path of an example of the program, if `script` is `examples/NAME.py`.

    So the commands of the documentation also run where pip has installed the program.

    Raises:
      UserError: If there is no such example.
    """
    name = script.removeprefix("examples/")
    examples = sorted(file.name for file in files.shipped_directory("examples").glob("*.py"))
    if script == name:
        raise UserError(
            f"The script {script} does not exist. To train without a script of yours,"
            " write the flags of training after --."
        )
    if name not in examples:
        raise UserError(
            f"The script {script} does not exist{did_you_mean(name, examples)}. The examples of the"
            f" program are {', '.join(f'examples/{example}' for example in examples)}."
        )
    path = str(files.shipped_directory("examples") / name)
    print_escaped(f"{script} is not in this directory, so {path} is used", stream=sys.stderr)
    return path


def _check_range(flag: str, value: int | None, minimum: int, maximum: int) -> None:
    if value is not None and not minimum <= value <= maximum:
        raise UserError(
            f"{flag}{value} is out of range. Use a whole number from {minimum} to {maximum}."
        )


def _check_host_discovery(options: argparse.Namespace) -> None:
    for name, value in (("-H", options.hosts), ("--hostfile", options.hostfile)):
        if value:
            raise UserError(
                f"{name} and --host_discovery_script both set the hosts of the ranks. Use one of"
                " them."
            )
    # Only to check that the words can be split as in a shell, before anything starts.
    discovery.list_by_script(options.host_discovery_script)
    if options.np is None:
        raise UserError(
            "--host_discovery_script needs -np. Set -np to the largest number of ranks."
        )
    if options.nproc_per_node is not None:
        raise UserError(
            "--host_discovery_script and --nproc_per_node both set the ranks of each host, because"
            " the script prints HOST:SLOTS. Use one of them."
        )


def format_slots(slots: Mapping[str, int]) -> str:
    """Returns the slots of each host in the form that -H takes: HOST:SLOTS,..."""
    return ",".join(f"{name}:{count}" for name, count in slots.items())


def _too_few_slots_message(ranks: int, slots: Mapping[str, int], source: str) -> str:
    available = sum(slots.values())
    ranks_per_host = -(-ranks // len(slots))
    enough_slots = {name: max(ranks_per_host, count) for name, count in slots.items()}
    hosts = f"{source} ({format_slots(slots)})" if source else f"-H {format_slots(slots)}"
    return (
        f"-np {ranks} needs {ranks} slots, but {hosts} has {available}. Use"
        f" -np {available}, or -H {format_slots(enough_slots)} for {ranks} ranks."
    )


def _plan_launch(options: argparse.Namespace, flags: Sequence[str]) -> _LaunchPlan:
    """Checks what the ranks will run, and decides how to launch it.

    If rank 0 runs on this host, files are checked here, once for all ranks. Otherwise rank 0 checks
    them.

    Raises:
      UserError: For a run that would end before it trains.
    """
    if options.module != _TRAINING_MODULE or options.script:
        return _LaunchPlan(supervisor.stall_timeout_of(flags), None)
    if topic(flags) is not None or recipes.is_list_requested(flags):
        return _LaunchPlan(supervisor.stall_timeout_of(flags), None, _Action.RUN_HERE)
    config = configuration.resolve(flags, options.np)
    # The supervisor derives its timeouts for ssh and for the start from it, so it needs a value
    # even if --stall_timeout=0 switches the watchdog off.
    stall_timeout = config.run.stall_timeout or supervisor.stall_timeout_of([])
    if config.run.print_config:
        return _LaunchPlan(stall_timeout, config, _Action.RUN_HERE)
    rank_0_is_here = _has_ranks_here(options)
    if config.run.check_only or (rank_0_is_here and not options.dry_run):
        preflight.run(config, disk=rank_0_is_here)
        os.environ[preflight.CHECKED_VARIABLE] = "1"
    action = _Action.NOTHING if config.run.check_only else _Action.START_RANKS
    return _LaunchPlan(stall_timeout, config, action)


def _choose_engine(options: argparse.Namespace, plan: _LaunchPlan) -> None:
    """Sets the engine of all ranks in the environment.

    All hosts must use the same engine. A host on which it is not installed then reports that,
    instead of choosing another one.

    Raises:
      UserError: If two engines are set, or ranks on several hosts would use TensorFlow's engine,
        whose ports have no password, without a request for it.
    """
    engine_of_flags = "auto" if plan.config is None else plan.config.communication.engine
    if options.engine and engine_of_flags not in ("auto", options.engine):
        raise UserError(
            f"--engine={options.engine} of run and --engine={engine_of_flags} of training are"
            " different. Set one of them."
        )
    if options.engine:
        os.environ[ENGINE_VARIABLE] = options.engine
    if is_engine_requested(engine_of_flags):
        return
    engine = resolve_engine("auto", started_by_mpi=True)
    # The hosts of a discovery script are not known yet.
    is_one_host = not options.host_discovery_script and all(
        host_facts.is_local(name) for name in host_facts.parse_hosts(options.hosts)
    )
    if plan.action is _Action.START_RANKS and not is_one_host:
        reject_unrequested_engine(engine)
    os.environ[ENGINE_VARIABLE] = engine


def _has_ranks_here(options: argparse.Namespace) -> bool:
    """Returns whether ranks, rank 0 among them, are known to run on this host.

    Open MPI numbers the ranks of this host first. The hosts of a discovery script are not known
    yet.
    """
    if options.host_discovery_script:
        return False
    return any(host_facts.is_local(name) for name in host_facts.parse_hosts(options.hosts))


def _set_environment(options: argparse.Namespace) -> None:
    """Sets the variables of launch/env.sh, if that was not sourced, and those of all hosts."""
    python_directory = str(Path(sys.executable).parent)
    if python_directory not in os.environ.get("PATH", "").split(os.pathsep):
        path = os.environ.get("PATH", os.defpath)
        os.environ["PATH"] = os.pathsep.join([python_directory, path])
    if (prefix := openmpi_prefix()) is not None:
        # The mpirun of this environment starts the ranks. Another Open MPI, such as one that a
        # module has loaded, may have set the variable for itself.
        os.environ["OPAL_PREFIX"] = prefix
    if os.geteuid() == 0:
        # Open MPI does not run as root unless both variables are set.
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if not any(shutil.which(program) for program in ("ssh", "rsh", "srun")):
        # Without one of these, Open MPI starts local ranks in this mode only.
        os.environ.setdefault("OMPI_MCA_plm", "isolated")
    if nodes := os.environ.get("SLURM_JOB_NUM_NODES"):
        # Open MPI must count the slots of -H and not the tasks of the allocation, because an
        # interactive allocation has one task on each node.
        most_slots = max(host_facts.parse_hosts(options.hosts).values())
        os.environ["SLURM_TASKS_PER_NODE"] = f"{most_slots}(x{nodes})"
    if options.interface:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", options.interface)


def _rank_command(options: argparse.Namespace, arguments: Sequence[str]) -> list[str]:
    """Returns the command that each rank runs."""
    if options.script:
        return [sys.executable, "-P", "-m", _SCRIPT_RUNNER, options.script, *arguments]
    return [sys.executable, "-m", options.module, *arguments]


def mpirun_command(
    options: argparse.Namespace, rank_command: Sequence[str], slots: Mapping[str, int], ranks: int
) -> list[str]:
    """Returns the mpirun command that starts ranks on hosts.

    Args:
      options: The options of `run`.
      rank_command: What each rank runs.
      slots: Maximum number of ranks on each host.
      ranks: Total number of ranks.

    Raises:
      UserError: If Open MPI cannot use the path of this environment, or mpirun belongs to another
        MPI.
    """
    if not _PATH_FOR_OPEN_MPI.fullmatch(sys.prefix):
        raise UserError(
            f"Open MPI cannot start programs in {sys.prefix}, because of the special characters in"
            " this path. Move the environment to a directory without them."
        )
    command = [mpirun.find().path, *_MPIRUN_OPTIONS, "--mca", "btl", _transports(slots, ranks)]
    command += ["-np", str(ranks), "-H", format_slots(slots)]
    if openmpi_prefix() is not None:
        # Where mpirun finds Open MPI on the other hosts.
        command += ["--prefix", sys.prefix]
    if options.interface:
        for parameter in ("btl_tcp_if_include", "oob_tcp_if_include"):
            command += ["--mca", parameter, options.interface]
    forwarded = {name for name in os.environ if _FORWARDED_VARIABLES.fullmatch(name)}
    forwarded.add(JOB_VARIABLE)
    # Set with its value below.
    forwarded.discard(RANKS_VARIABLE)
    for name in sorted(forwarded):
        command += ["-x", name]
    command += ["-x", f"{RANKS_VARIABLE}={ranks}"]
    return [*command, *rank_command]


def _transports(slots: Mapping[str, int], ranks: int) -> str:
    """Returns the transports that Open MPI must not use between ranks, as its parameter `btl`.

    Verbs are never used, because NCCL has its own. Ranks on this host alone share memory, so they
    do without TCP too: it would listen on all interfaces, even if no rank connects.
    """
    is_one_host = all(host_facts.is_local(name) for name in slots)
    if is_one_host and host_limits.has_shared_memory(ranks):
        return "^openib,tcp"
    return "^openib"


def _print_start(options: argparse.Namespace, config: RunConfig | None) -> None:
    """Prints how many ranks start, why, and where; rank 0 prints the title of the run.

    A script whose number of ranks and hosts you have set prints its own lines only.
    """
    if config is None and not options.reason and not options.host_source:
        return
    reason = f", {options.reason}" if options.reason else ""
    hosts = options.host_discovery_script or options.hosts
    if options.host_source:
        hosts += f" from {options.host_source}"
    print_escaped(
        f"starting {pluralize(options.np, 'rank')}{reason} ({hosts}) ...", stream=sys.stderr
    )
    sys.stderr.flush()


def _run_job(
    options: argparse.Namespace, arguments: Sequence[str], plan: _LaunchPlan
) -> tuple[int, supervisor.Supervisor | None]:
    """Runs the job, with restarts if they are requested.

    Returns:
      The exit code of the job, and its last supervisor; None if no rank was started.
    """
    may_restart = bool(options.max_restarts or options.host_discovery_script)
    # Chosen here and not by the program, so that a restarted job continues in the same directory.
    run_dir = _run_dir(plan.config) if plan.config is not None and may_restart else None
    jobs: list[supervisor.Supervisor] = []

    def create_supervisor(
        slots: Mapping[str, int], ranks: int, resume: bool
    ) -> supervisor.Supervisor:
        rank_command = _rank_command(options, arguments)
        if run_dir is not None:
            rank_command.append(f"--run_dir={run_dir}")
            if resume:
                rank_command.append("--resume")
        command = mpirun_command(options, rank_command, slots, ranks)
        jobs.append(_create_supervisor(options, plan, command, slots, ranks))
        return jobs[-1]

    if not may_restart:
        slots = host_facts.parse_hosts(options.hosts)
        return create_supervisor(slots, options.np, False).run(), jobs[-1]
    if options.host_discovery_script:
        list_hosts = discovery.list_by_script(options.host_discovery_script)
    else:
        list_hosts = functools.partial(host_facts.parse_hosts, options.hosts)
    host_discovery = discovery.Discovery(
        list_hosts,
        answers=lambda host: (
            host_facts.is_local(host) or discovery.answers_ssh(host, options.ssh_port)
        ),
        check_first=bool(options.host_discovery_script),
    )
    policy = RestartPolicy(
        max_restarts=options.max_restarts,
        min_ranks=options.min_np,
        max_ranks=options.np,
        wait_seconds=options.host_timeout,
        join_seconds=options.join_interval,
    )
    try:
        exit_code = RestartLoop(policy, host_discovery.hosts, create_supervisor, run_dir).run()
        return exit_code, jobs[-1] if jobs else None
    finally:
        host_discovery.stop()


def _create_supervisor(
    options: argparse.Namespace,
    plan: _LaunchPlan,
    command: Sequence[str],
    slots: Mapping[str, int],
    ranks: int,
) -> supervisor.Supervisor:
    # Only ranks of the training program with a stall timeout report that they have started.
    ranks_report_start = plan.config is not None and plan.config.run.stall_timeout and ranks > 1
    rank_hosts: list[str] = []
    # Open MPI numbers the ranks of this host first.
    for host in sorted(slots, key=host_facts.is_local, reverse=True):
        rank_hosts += [host] * slots[host]
    return supervisor.Supervisor(
        command,
        stall_timeout=plan.stall_timeout,
        ssh_port=options.ssh_port,
        accept_new_host_keys=options.accept_new_host_keys,
        is_script=bool(options.script),
        rank_hosts=rank_hosts,
        ranks_report_start=bool(ranks_report_start),
        is_local=all(host_facts.is_local(host) for host in slots),
    )


def _run_dir(config: RunConfig) -> Path:
    return run_directories.choose_directory(
        config.run.run_dir, config.run.recipe, config.data.dataset, resume=config.run.resume
    )


def _checkpoint_folder(config: RunConfig | None) -> Path | None:
    return None if config is None else _run_dir(config) / "checkpoints"


def _checkpoints(folder: Path | None) -> set[Path]:
    return set() if folder is None else set(folder.glob("step-*.npz"))
