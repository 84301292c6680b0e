"""Prepares this process as a rank, and connects it to the other ranks.

The program calls `start`, which does both at once. A process that trains its own model instead

1. calls `init`, which prepares the process,
2. creates an optimizer, which sets how gradients are sent (`set_default_settings`), and
3. is connected by the first call of `communicator`.

The steps are separate because Horovod must know at its start how gradients will be sent, and only
the optimizer knows that. TensorFlow's engine must connect before TensorFlow is used, so with it
`init` connects at once.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import pkgutil
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hybrid_imagenet import private_api
from hybrid_imagenet.cluster import job_lines, keras_settings, out_of_memory, rank_failure
from hybrid_imagenet.cluster.environment import (
    RANK_VARIABLE,
    Placement,
    configure_environment,
    configure_tensorflow,
    read_placement,
)
from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.settings import ENGINES, CommunicationSettings, GridOptions
from hybrid_imagenet.comm.single_process import SingleProcess
from hybrid_imagenet.comm.torus import parse_grid
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
    RESTART_SCRIPT,
    RankTimeoutError,
    SharedError,
    UserError,
)
from hybrid_imagenet.startup import STARTUP_PROGRESS

ENGINE_VARIABLE = "HYBRID_IMAGENET_ENGINE"
"""Environment variable by which `hybrid-imagenet run` sets the engine of --engine=auto.

The ranks of all hosts must use the same engine, so each cannot decide for itself.
"""
# Packages whose versions must be the same on all hosts.
_SAME_VERSION_PACKAGES = ("tensorflow", "tensorflow_cpu", "keras", "numpy", "horovod")
# Other ranks wait this long before they end with an error that the first rank prints. When one
# rank ends, the launcher ends all others, and rank 0 must have printed the error by then.
_PRINT_SECONDS = 1.0
# Modules that run a script of the user as a rank.
_RUNNING_MODULES = ("runpy", "hybrid_imagenet.resilience.script_runner")
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def start(
    settings: CommunicationSettings | None = None,
    *,
    threads: int | None = None,
    additional_settings: Sequence[CommunicationSettings] = (),
    persistent_batch_norm: bool = True,
) -> Communicator:
    """Prepares this process as a rank and connects it to the other ranks.

    Call it before TensorFlow is used, because it sets the number of threads. Without a launcher, or
    with one rank, no engine is needed or imported.

    Args:
      settings: How gradients are sent; default settings if None.
      threads: Number of threads of TensorFlow's operations on this rank. By default the cores of
        the host are divided among its ranks.
      additional_settings: Settings of further reductions that the program will create. Their
        groups of ranks must exist when Horovod starts.
      persistent_batch_norm: See `gpus.configure_gpu_environment`. It is ignored with
        `CommunicationSettings.deterministic`.

    Returns:
      The communicator, connected to all ranks.

    Raises:
      UserError: If the launcher's variables are incomplete, Horovod is missing, a rank has no GPU,
        TensorFlow is built for GPUs but sees none, or the algorithm or grid does not fit the ranks
        and hosts.
    """
    settings = settings or CommunicationSettings()
    check_grids(read_placement(), (settings, *additional_settings))
    check_trust(read_placement(), settings.engine)
    persistent = persistent_batch_norm and not settings.deterministic
    placement = configure_process(threads, persistent_batch_norm=persistent)
    return connect(placement, settings, additional_settings)


def check_grids(placement: Placement, settings: Sequence[CommunicationSettings]) -> None:
    """Raises UserError if a grid of the settings does not hold all ranks."""
    for each_settings in settings:
        options = each_settings.options
        grid = options.torus_grid if isinstance(options, GridOptions) else None
        if not grid:
            continue
        try:
            parse_grid(grid, placement.size)
        except ValueError as error:
            raise UserError(f"--torus_grid={grid}: {error}") from None


def check_trust(placement: Placement, engine: str = "auto") -> None:
    """Raises SharedError if ranks on several hosts would use TensorFlow's engine without consent.

    Its ports have no password. Call it before TensorFlow is loaded.

    Args:
      placement: Placement of this process.
      engine: A value of --engine. Any other value than "auto" is consent.
    """
    is_one_host = placement.local_size == placement.size
    if not is_one_host and not is_engine_requested(engine):
        reject_unrequested_engine(resolve_engine(engine))


def is_engine_requested(engine: str) -> bool:
    """Returns whether a flag or the environment names the engine.

    Args:
      engine: A value of --engine.
    """
    return engine != "auto" or os.environ.get(ENGINE_VARIABLE) in ENGINES


def reject_unrequested_engine(engine: str) -> None:
    """Raises SharedError if an engine that was not requested is TensorFlow's.

    Args:
      engine: The engine of ranks on several hosts.
    """
    if engine == "tensorflow":
        raise SharedError(
            "Without Horovod, ranks on several hosts would be connected by TensorFlow's engine,"
            " whose TCP ports have no password: anyone who reaches one can run code in the job"
            " (docs/trust.md). In a network that you trust, use hybrid-imagenet run"
            " --engine=tensorflow, or set HYBRID_IMAGENET_ENGINE=tensorflow if srun or Kubernetes"
            " starts the ranks."
        )


def configure_process(
    threads: int | None = None, *, persistent_batch_norm: bool = True
) -> Placement:
    """Sets everything that must be set before TensorFlow starts.

    Args:
      threads: See `start`.
      persistent_batch_norm: See `start`.

    Returns:
      The placement of this process.
    """
    placement = read_placement()
    keras_settings.check_keras_settings(os.environ)
    threads = configure_environment(placement, threads, persistent_batch_norm=persistent_batch_norm)
    configure_tensorflow(placement, threads)
    return placement


def resolve_engine(engine: str, *, started_by_mpi: bool | None = None) -> str:
    """Returns the name of the engine that connects the ranks.

    Args:
      engine: A value of --engine. "auto" selects the engine that the launcher has set for all
        hosts, otherwise Horovod if it is installed and MPI has started the ranks, otherwise
        TensorFlow.
      started_by_mpi: Whether MPI has started the ranks; None finds it out from the environment.
    """
    if engine != "auto":
        return engine
    engine_of_job = os.environ.get(ENGINE_VARIABLE)
    if engine_of_job in ENGINES:
        return engine_of_job
    if started_by_mpi is None:
        has_mpi_variable = RANK_VARIABLE in os.environ or "PMIX_RANK" in os.environ
        started_by_mpi = has_mpi_variable or read_placement().size == 1
    if started_by_mpi and importlib.util.find_spec("horovod"):
        return "horovod"
    return "tensorflow"


def connect(
    placement: Placement,
    settings: CommunicationSettings,
    additional_settings: Sequence[CommunicationSettings] = (),
) -> Communicator:
    """Connects this process to the other ranks, after `configure_process`.

    Args:
      placement: The placement of this process.
      settings: See `start`.
      additional_settings: See `start`.

    Raises:
      UserError: See `start`.
      SharedError: On all ranks, if hosts have different versions of software.
    """
    if placement.size == 1:
        return SingleProcess()
    STARTUP_PROGRESS.begin(f"connecting {placement.size} ranks")
    engine = resolve_engine(settings.engine)
    if settings.engine == "auto" and engine == "tensorflow" and placement.rank == 0:
        print(
            "TensorFlow's engine connects the ranks (--engine=tensorflow)",
            file=sys.stderr,
            flush=True,
        )
    try:
        communicator_class = pkgutil.resolve_name(ENGINES[engine])
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{placement.size} ranks were started, but Horovod cannot be used ({reason}). Install"
            " it, or use TensorFlow instead with --engine=tensorflow (for your own program set"
            " HYBRID_IMAGENET_ENGINE=tensorflow)."
        ) from None
    communicator: Communicator = communicator_class(
        settings, additional_settings=additional_settings
    )
    # One rank per host is enough.
    versions = software_versions() if placement.local_rank == 0 else None
    _check_software_versions(communicator, versions)
    return communicator


def software_versions() -> dict[str, str]:
    """Returns versions that must be the same on all hosts.

    These are the versions of the packages that compute, and a digest of the files of this package.
    The doctor's probe computes its own digest, because it also runs on hosts without the package.
    """
    directory = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        relative_path = str(path.relative_to(directory))
        # Editors keep hidden files next to the file that is edited.
        if "/." not in f"/{relative_path}":
            digest.update(relative_path.encode() + path.read_bytes())
    versions = {"hybrid_imagenet": digest.hexdigest()[:12]}
    for package in _SAME_VERSION_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def _check_software_versions(
    communicator: Communicator, versions: Mapping[str, str] | None
) -> None:
    """Compares the software of all hosts with that of rank 0. Every rank must call it.

    Args:
      communicator: Connects the ranks.
      versions: `software_versions` on the first rank of each host, None on the other ranks.

    Raises:
      SharedError: On all ranks, naming the first host with other versions.
    """
    rank_0_versions, *other_versions = communicator.allgather_object(versions)
    for host, host_versions in zip(communicator.hosts[1:], other_versions, strict=True):
        if host_versions is None or host_versions == rank_0_versions:
            continue
        different = [
            name
            for name in rank_0_versions | host_versions
            if rank_0_versions.get(name) != host_versions.get(name)
        ]
        raise SharedError(
            f"Host {host} has another version of {', '.join(different)} than"
            f" {communicator.hosts[0]}. Run launch/setup.sh of the same commit on all hosts."
        )


@dataclasses.dataclass
class _ProcessState:
    """The state that `init` and later calls set up in this process.

    Attributes:
      placement: Placement of this process; None before `init`.
      settings: How gradients are sent; None before an optimizer or a collective has set it.
      communicator: Connects the ranks; None before the first collective.
      previous_excepthook: `sys.excepthook` before `install_excepthook`; None before that call.
      failure_code: Exit code of the failure that ends this process; None without one.
    """

    placement: Placement | None = None
    settings: CommunicationSettings | None = None
    communicator: Communicator | None = None
    previous_excepthook: ExceptHook | None = None
    failure_code: int | None = None

    def reset(self) -> None:
        """Returns to the state before `init`."""
        self.placement = None
        self.settings = None
        self.communicator = None
        self.previous_excepthook = None
        self.failure_code = None


_state = _ProcessState()


def init(threads: int | None = None) -> None:
    """Prepares this process as a rank; call it before TensorFlow or Keras is used.

    It gives the rank its own GPU and its share of the host's cores. Without a launcher the process
    is rank 0 of 1. A second call does nothing.

    It also replaces `sys.excepthook`. A `UserError` that nothing catches ends the program with its
    exit code, such as 3 after training has diverged. With several ranks, a line before the
    traceback names the rank and its host, and the process ends without exit handlers, which could
    wait for the other ranks. An error that all ranks share, or the loss of another rank, is one
    line.

    Example:
      import hybrid_imagenet as hi

      hi.init()

      import keras

    Args:
      threads: Number of threads of TensorFlow's operations on this rank (default: None, the cores
        of the host divided by its ranks).

    Raises:
      UserError: If the launcher's variables are incomplete, or a rank has no GPU; if other ranks do
        not answer in time, with TensorFlow's engine.
    """
    if _state.placement is not None:
        return
    # Errors of the next lines name the rank, too.
    install_excepthook()
    check_trust(read_placement())
    placement = configure_process(threads)
    _state.placement = placement
    if placement.size > 1 and resolve_engine("auto") == "tensorflow":
        # This engine must connect before TensorFlow is used.
        from hybrid_imagenet.comm import tensorflow_engine

        tensorflow_engine.connect_servers(placement)
    atexit.register(_warn_if_never_connected)
    atexit.register(_notify_supervisor_of_exit)


def is_initialized() -> bool:
    """Returns whether `init` was called, or this is a single process, which does not need it."""
    return _state.placement is not None or read_placement().size == 1


def rank() -> int:
    """Returns the rank of this process, from 0 to `hi.size() - 1`.

    Example:
      if hi.rank() == 0:
          model.save("model.keras")

    Raises:
      UserError: Before `hi.init()`, if a launcher has started several ranks.
    """
    return _initialized_placement().rank


def size() -> int:
    """Returns the number of ranks; 1 without a launcher.

    Raises:
      UserError: Before `hi.init()`, if a launcher has started several ranks.
    """
    return _initialized_placement().size


def local_rank() -> int:
    """Returns the number of this process among the ranks of its host, from 0.

    Raises:
      UserError: Before `hi.init()`, if a launcher has started several ranks.
    """
    return _initialized_placement().local_rank


def set_default_settings(settings: CommunicationSettings) -> None:
    """Sets how gradients are sent, before the ranks are connected.

    Raises:
      UserError: If other settings are already in use, or the grid does not hold all ranks.
    """
    in_use = _state.settings
    if in_use is not None and in_use != settings and size() > 1:
        raise UserError(
            f"allreduce={settings.allreduce},"
            f" fusion_threshold_mb={settings.fusion_threshold_mb:g} conflict with the settings that"
            f" are already in use, allreduce={in_use.allreduce},"
            f" fusion_threshold_mb={in_use.fusion_threshold_mb:g}. Use the same settings for all"
            " optimizers, and create the first optimizer before any collective."
        )
    check_grids(_initialized_placement(), (settings,))
    _state.settings = settings


def communicator() -> Communicator:
    """Returns the communicator of this process, whose methods combine values of ranks.

    `allreduce_sum(tensor, name)` and `allreduce_max(tensor, name)` work inside and outside of a
    graph. `broadcast_object(value)` returns the value of rank 0, and `allgather_object(value)` a
    list of the values of all ranks. They send JSON, so a value consists of dictionaries, lists,
    texts, numbers, booleans and None; tuples become lists, and other keys become texts.
    `barrier()` waits for all ranks. Every rank must make the same calls in the same order. The
    first call of this function connects the ranks, so every rank must make it too.

    Example:
      mean = hi.communicator().allreduce_sum(loss, "loss") / hi.size()

    Raises:
      UserError: Before `hi.init()`, if a launcher has started several ranks; if the ranks cannot be
        connected, for example because Horovod is missing; on all ranks, if hosts have different
        versions of software.
    """
    if _state.communicator is None:
        _state.settings = _state.settings or CommunicationSettings()
        _state.communicator = connect(_initialized_placement(), _state.settings)
        # Exit handlers run in the reverse order of registration. Horovod has just registered its
        # own, with which the other ranks lose this one. The supervisor must be notified before
        # that, so register the notification again, after Horovod's.
        atexit.unregister(_notify_supervisor_of_exit)
        if _state.communicator.size > 1:
            atexit.register(_notify_supervisor_of_exit)
    return _state.communicator


def shutdown() -> None:
    """Disconnects this process, so that tests and notebooks may call `hi.init()` again."""
    if _state.communicator is not None:
        _state.communicator.shutdown()
    if _state.previous_excepthook is not None:
        sys.excepthook = _state.previous_excepthook
    _state.reset()


def _initialized_placement() -> Placement:
    """Returns the placement of this process.

    Raises:
      UserError: Before `init`, if a launcher has started several ranks.
    """
    if _state.placement is not None:
        return _state.placement
    placement = read_placement()
    if placement.size > 1:
        raise UserError(
            f"{placement.size} ranks were started, but hybrid_imagenet.init() was not called. Call"
            " it before anything else."
        )
    return placement


def _warn_if_never_connected() -> None:
    """Warns at exit if several ranks were started but have never been connected."""
    if _state.placement is None or _state.placement.size == 1 or _state.placement.rank != 0:
        return
    if _state.communicator is not None:
        return
    # A program that has run no operation has only printed its --help or an error.
    if not private_api.tensorflow_was_used() or _ends_with_uncaught_error():
        return
    print(
        f"warning: the {_state.placement.size} ranks were never connected, so each has worked"
        " alone. Training needs hybrid_imagenet.DistributedOptimizer and"
        " callbacks.default_callbacks().",
        file=sys.stderr,
    )


def _notify_supervisor_of_exit() -> None:
    """Notifies the supervisor at exit that the program of this rank exits without an error.

    If other ranks still wait for this rank, the supervisor can then name it.
    """
    if _state.placement is None or _state.failure_code is not None:
        return
    if not _ends_with_uncaught_error():
        job_lines.notify_program_end(_state.placement.rank, _state.placement.size)


def _ends_with_uncaught_error() -> bool:
    """Returns whether an exception ends the interpreter, which then sets `sys.last_type`."""
    return hasattr(sys, "last_type")


def install_excepthook() -> None:
    """Makes an uncaught error name its rank and end the process with the error's exit code."""
    if _state.previous_excepthook is None:
        _state.previous_excepthook = sys.excepthook
        sys.excepthook = _handle_uncaught_error


def report_system_exit(end: SystemExit) -> None:
    """Notifies the supervisor if the program of this rank exits with an error code.

    Args:
      end: What `sys.exit` has raised.
    """
    code = EXIT_FAILURE
    message = ""
    if end.code is None:
        code = EXIT_OK
    elif isinstance(end.code, int):
        # The kernel keeps the lowest eight bits.
        code = end.code & 0xFF
    else:
        # Python prints it.
        message = str(end.code)
    # A rank that was preempted has saved, so it has not failed.
    if code not in (EXIT_OK, EXIT_PREEMPTED):
        _state.failure_code = code
        rank_failure.report_exit(_current_placement().rank, code, message)


def exit_after_failure() -> None:
    """Ends this process if its program has failed; it is the last exit handler of a script.

    After the exit handlers, destructors of TensorFlow could still wait for other ranks.
    """
    if _state.failure_code is not None and _current_placement().size > 1:
        rank_failure.exit_at_once(_state.failure_code)


def _handle_uncaught_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Prints an error and ends the process with the error's exit code.

    The supervisor also gets the code, because the launcher may hide it. It does not get that of a
    rank that has lost another one, because the other rank is the cause.
    """
    assert _state.previous_excepthook is not None
    if not isinstance(error, Exception):
        # Python itself chooses the exit code after Ctrl-C.
        _state.previous_excepthook(kind, error, trace)
        return
    placement = _current_placement()
    code = EXIT_FAILURE
    if isinstance(error, UserError):
        code = error.exit_code
    elif out_of_memory.is_out_of_memory(error):
        code = EXIT_USAGE
    has_lost_rank = lost_rank.is_lost_rank_error(error)
    if placement.size == 1 or not _print_error_of_ranks(error, placement):
        if placement.size > 1 or job_lines.JOB_VARIABLE in os.environ:
            rank_failure.report_error(placement.rank, error, code)
        trace = _without_own_frames(trace)
        # Python prints the traceback of the error, not the one that it is passed.
        _state.previous_excepthook(kind, error.with_traceback(trace), trace)
    if has_lost_rank:
        code = EXIT_STALLED
    else:
        job_lines.notify_exit(code)
    _state.failure_code = code
    if placement.size > 1:
        # Exit handlers of TensorFlow, Horovod and MPI would wait for the other ranks.
        rank_failure.exit_at_once(code)
    if code != EXIT_FAILURE:
        # Python ends with this code, after its exit handlers, if an excepthook raises it.
        raise SystemExit(code)


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback that begins with the script, without the frames that run the script."""
    while trace is not None:
        spec = trace.tb_frame.f_globals.get("__spec__")
        if getattr(spec, "name", "") not in _RUNNING_MODULES:
            break
        trace = trace.tb_next
    return trace


def _current_placement() -> Placement:
    """Returns the placement of this process, even before `init` and if its launcher is broken."""
    if _state.placement is not None:
        return _state.placement
    try:
        return read_placement()
    except UserError:
        return Placement()


def _print_error_of_ranks(error: Exception, placement: Placement) -> bool:
    """Prints an error that concerns several ranks as one line, on one of them.

    Returns:
      Whether it is such an error. Other errors are those of this rank alone.
    """
    if isinstance(error, SharedError):
        # Rank 0 prints it.
        if placement.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(_PRINT_SECONDS)
    elif out_of_memory.is_out_of_memory(error):
        # The ranks of a host mostly run out together. The first prints its error, and with it the
        # launcher ends the others before they print theirs.
        if placement.local_rank != 0:
            time.sleep(_PRINT_SECONDS)
        remedy = f"Use a smaller batch on each rank, then {RESTART_SCRIPT}."
        user_error = out_of_memory.user_error(error, remedy)
        host = socket.gethostname()
        print(f"error: rank {placement.rank} on {host}: {user_error}", file=sys.stderr, flush=True)
    elif isinstance(error, RankTimeoutError):
        host = socket.gethostname()
        print(f"error: rank {placement.rank} on {host}: {error}", file=sys.stderr, flush=True)
    elif lost_rank.is_lost_rank_error(error):
        # UserError makes it one printable line, whatever the reason contains.
        print(UserError(lost_rank.lost_rank_message(error)), file=sys.stderr, flush=True)
    else:
        return False
    return True
