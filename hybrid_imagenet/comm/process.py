"""Prepares a process for its place among the ranks, and connects it to the others: at once, or when
they are needed.

The program calls `start`, which does both. One that trains a model of its own calls `init` first.
Horovod wants to know at its start how gradients will travel, and the optimizer is what says so. So
`init` only readies the process, the optimizer leaves its settings (`intend`), and the first
collective connects (`communicator`). TensorFlow's own engine must connect before TensorFlow is
used, so with it `init` does.
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
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import job_lines, keras_settings, lost_rank, out_of_memory
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.environment import (
    RANK_VARIABLE,
    Placement,
    configure_tensorflow,
    placement,
    prepare,
)
from hybrid_imagenet.comm.settings import ENGINES, CommunicationSettings
from hybrid_imagenet.comm.single_process import SingleProcess
from hybrid_imagenet.comm.torus import parse_grid
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_STALLED, SharedError, UserError
from hybrid_imagenet.startup import STARTUP_PROGRESS

ENGINE_VARIABLE = "HYBRID_IMAGENET_ENGINE"
"""Where `hybrid-imagenet run` tells the ranks of all hosts which engine --engine=auto means."""
_ALIKE = (
    "tensorflow",
    "tensorflow_cpu",
    "keras",
    "numpy",
    "horovod",
)  # packages whose versions must not differ
# seconds for rank 0 to print an error of all ranks: the launcher ends it when another rank ends
_FIRST_SPEAKS = 1.0
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def start(
    settings: CommunicationSettings | None = None,
    *,
    threads: int | None = None,
    others: Sequence[CommunicationSettings] = (),
    persistent_batch_norm: bool = True,
) -> Communicator:
    """Prepares this process for its place among the ranks and connects it to the others.

    Must come before TensorFlow starts, as it sets the number of threads: by default the cores of
    the host divided by the ranks on it. Without a launcher, or with one rank, no engine is needed
    or imported.

    Args:
      settings: how gradients travel; the default settings if None.
      threads: threads of this rank for TensorFlow's operations, if not chosen from the number of
      cores.
      others: settings of further reductions that the program will make by itself, so that their
        sets of ranks are known from the start.
      persistent_batch_norm: see `gpus.prepare`; never with `CommunicationSettings.deterministic`.

    Raises:
      UserError: if the launcher's variables are incomplete, Horovod is missing, a rank has no GPU
        of its own, there is no GPU although TensorFlow is built for them, or the algorithm or grid
        does not fit the ranks and hosts.
    """
    settings = settings or CommunicationSettings()
    check_grids(placement(), (settings, *others))
    persistent = persistent_batch_norm and not settings.deterministic
    return connect(ready(threads, persistent_batch_norm=persistent), settings, others)


def check_grids(place: Placement, settings: Sequence[CommunicationSettings]) -> None:
    """Raises UserError for a grid that does not hold all ranks."""
    for text in filter(None, (each.options.get("torus_grid") for each in settings)):
        try:
            parse_grid(text, place.size)
        except ValueError as error:
            raise UserError(f"--torus_grid={text}: {error}") from None


def ready(threads: int | None = None, *, persistent_batch_norm: bool = True) -> Placement:
    """Sets what must be set before TensorFlow starts; returns this process's place. Arguments as
    for `start`.
    """
    place = placement()
    keras_settings.check(os.environ)
    configure_tensorflow(
        place, prepare(place, threads, persistent_batch_norm=persistent_batch_norm)
    )
    return place


def engine_of(asked: str, *, by_mpi: bool | None = None) -> str:
    """The engine that connects the ranks: the one that is asked for, or that the launcher has
    chosen for all hosts.

    Else Horovod where it is installed and an MPI has started the ranks, and TensorFlow's own
    without it.
    """
    if asked != "auto":
        return asked
    chosen = next((name for name in ENGINES if name == os.environ.get(ENGINE_VARIABLE)), None)
    if chosen is not None:
        return chosen
    if by_mpi is None:
        by_mpi = bool({RANK_VARIABLE, "PMIX_RANK"} & os.environ.keys()) or placement().size == 1
    if not by_mpi:
        return "tensorflow"
    return "horovod" if importlib.util.find_spec("horovod") else "tensorflow"


def connect(
    place: Placement, settings: CommunicationSettings, others: Sequence[CommunicationSettings] = ()
) -> Communicator:
    """Connects a process that is `ready` to the other ranks; arguments and errors as for
    `start`.
    """
    if place.size == 1:
        return SingleProcess()
    STARTUP_PROGRESS.begin(f"connecting {place.size} ranks")
    if settings.engine == "auto" and place.rank == 0 and engine_of("auto") == "tensorflow":
        print(
            "ranks connect by --engine=tensorflow, as Horovod is not used here",
            file=sys.stderr,
            flush=True,
        )
    try:
        communicator = pkgutil.resolve_name(ENGINES[engine_of(settings.engine)])
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{place.size} ranks were started, but Horovod cannot be used ({reason}): install it,"
            " or do without it by --engine=tensorflow (for a FILE,"
            " HYBRID_IMAGENET_ENGINE=tensorflow)"
        ) from None
    connected: Communicator = communicator(settings, others=others)
    _check_programs(connected, program() if place.local_rank == 0 else None)
    return connected


def program() -> dict[str, str]:
    """What all hosts must have alike: a digest of this package's files, and versions of what it
    computes with.

    The doctor's probe has a digest of its own: it runs on hosts without the package.
    """
    folder, digest, found = Path(__file__).parents[1], hashlib.sha256(), {}
    for path in sorted(folder.rglob("*.py")):
        name = str(path.relative_to(folder))
        if "/." not in f"/{name}":  # what editors keep beside a file
            digest.update(name.encode() + path.read_bytes())
    for name in _ALIKE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"hybrid_imagenet": digest.hexdigest()[:12]} | found


def _check_programs(ranks: Communicator, own: Mapping[str, str] | None) -> None:
    """Compares the hosts' programs; every rank calls it, those that are not the first of their host
    with None.

    Raises:
      SharedError: on all ranks, naming the first host that has another program than rank 0's.
    """
    first, *others = ranks.allgather_object(own)
    for host, found in zip(ranks.hosts[1:], others, strict=True):
        if found is not None and found != first:
            names = [name for name in first | found if first.get(name) != found.get(name)]
            raise SharedError(
                f"host {host} has another version of {', '.join(names)} than {ranks.hosts[0]}: run"
                " launch/setup.sh of the same commit on all hosts"
            )


@dataclasses.dataclass
class _Process:
    """This process: its place once it is ready, how its gradients travel, and the ranks once it is
    connected.
    """

    place: Placement | None = None
    settings: CommunicationSettings | None = None
    communicator: Communicator | None = None
    hook: Hook | None = None  # for uncaught errors, before `init`


_process = _Process()


def init(threads: int | None = None) -> None:
    """Prepares this process for its rank; call it before anything uses TensorFlow.

    It gives the rank a GPU of its own and its share of the host's cores, as `comm.start` does.
    Among several ranks an uncaught error of all of them, or the loss of another one, becomes one
    line (`sys.excepthook`). A second call does nothing. Without a launcher the process is rank 0 of
    1.

    Args:
      threads: threads of this rank for TensorFlow's operations; by default the host's cores divided
        by its ranks.

    Raises:
      UserError: if the launcher's variables are incomplete or a rank has no GPU of its own.
    """
    if _process.place is not None:
        return
    _process.place = place = ready(threads)
    if place.size > 1:
        hook = _in_one_line(sys.excepthook)
        if engine_of("auto") == "tensorflow":  # it must connect before TensorFlow is used
            from hybrid_imagenet.comm import tensorflow_engine

            tensorflow_engine.join(place)
            hook = _and_leave(hook)
        _process.hook, sys.excepthook = sys.excepthook, hook
        atexit.register(_warn_of_lone_ranks)
        atexit.register(_announce_end)


def _warn_of_lone_ranks() -> None:
    # Without an operation the program has only printed its --help or an error.
    failed = not private_api.tensorflow_was_used() or hasattr(sys, "last_type")
    if (
        _process.place is not None
        and not _process.place.rank
        and _process.communicator is None
        and not failed
    ):
        print(
            f"warning: nothing has connected the {_process.place.size} ranks, so each has worked"
            " alone: a training needs hybrid_imagenet.DistributedOptimizer and"
            " callbacks.default_callbacks()",
            file=sys.stderr,
        )


def _announce_end() -> None:
    """Tells the supervisor that this rank's program ends, so that it can name the rank if others
    still wait for it.
    """
    place = _process.place
    # The traceback of an uncaught error says enough, and its exit code ends the job.
    if place is not None and not hasattr(sys, "last_type"):
        job_lines.announce_left(place.rank, place.size)


def _in_one_line(otherwise: Hook) -> Hook:
    """Returns a hook that prints one line for errors that are not this rank's alone, and no line
    twice.
    """

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SharedError) and rank() > 0:
            time.sleep(_FIRST_SPEAKS)
        elif isinstance(error, SharedError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif out_of_memory.is_out_of_memory(error):
            if (
                local_rank()
            ):  # the first rank of the host speaks; the launcher ends this one with it
                time.sleep(_FIRST_SPEAKS)
            shortage = out_of_memory.shared_error(error, "Use a smaller batch on each rank.")
            print(f"error: rank {rank()}: {shortage}", file=sys.stderr, flush=True)
        elif lost_rank.is_loss(error):
            print(UserError(lost_rank.described(error, "")), file=sys.stderr, flush=True)
        else:
            otherwise(kind, error, trace)

    return hook


def _and_leave(hook: Hook) -> Hook:
    """Returns a hook that ends the process: at an exit TensorFlow and MPI would wait for a rank
    that has stopped.
    """

    def leave(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        if not issubclass(kind, KeyboardInterrupt):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STALLED if lost_rank.is_loss(error) else EXIT_FAILURE)

    return leave


def is_ready() -> bool:
    """Whether `init` was called, or this is a single process, which needs none."""
    return _process.place is not None or placement().size == 1


def rank() -> int:
    """Returns the rank of this process, from 0.

    Raises:
      UserError: before `init`, where a launcher has started several ranks.
    """
    return _place().rank


def size() -> int:
    """Returns the number of ranks; raises as `rank`."""
    return _place().size


def local_rank() -> int:
    """Returns this process's rank on its host, from 0; raises as `rank`."""
    return _place().local_rank


def intend(settings: CommunicationSettings) -> None:
    """Sets how gradients are exchanged, before the ranks are connected.

    Raises:
      UserError: if other settings are already in use, or the grid does not hold the ranks.
    """
    known = _process.settings
    if known is not None and known != settings and size() > 1:
        raise UserError(
            f"allreduce={settings.allreduce}, compression={settings.compression}: conflicting"
            f" communication settings, allreduce={known.allreduce}, compression={known.compression}"
            " are already in use; use the same settings for all optimizers, and create the first"
            " before any collective"
        )
    check_grids(_place(), (settings,))
    _process.settings = settings


def communicator() -> Communicator:
    """Returns the communicator, which connects the ranks at the first call; every rank must call
    it.

    Raises:
      UserError: before `init`, where a launcher has started several ranks; else as `comm.start`.
    """
    if _process.communicator is None:
        _process.settings = _process.settings or CommunicationSettings()
        _process.communicator = connect(_place(), _process.settings)
        # Exit handlers run in reverse order, and Horovod's, by which the other ranks lose this one,
        # must come later.
        atexit.unregister(_announce_end)
        if _process.communicator.size > 1:
            atexit.register(_announce_end)
    return _process.communicator


def shutdown() -> None:
    """Leaves the process group; `init` may be called again, in tests and notebooks."""
    if _process.communicator is not None:
        _process.communicator.shutdown()
    if _process.hook is not None:
        sys.excepthook = _process.hook
    _process.place = _process.settings = _process.communicator = _process.hook = None


def _place() -> Placement:
    place = _process.place or placement()
    if _process.place is None and place.size > 1:
        raise UserError(
            f"{place.size} ranks were started: call hybrid_imagenet.init() before anything else"
        )
    return place
