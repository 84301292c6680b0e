"""Holds the communicator of a process that trains a model of its own: `init` first, connected when it is first needed.

Horovod wants to know at its start how gradients will travel, and the optimizer is what says so. So `init` only readies
the process, the optimizer leaves its settings (`intend`), and the first collective connects (`communicator`).
TensorFlow's own engine must connect before TensorFlow is used, so with it `init` does.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from types import TracebackType

from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.environment import Placement, placement
from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.comm.startup import check_grids, connect, connect_early, ready
from hybrid_imagenet.errors import SharedError, UserError

_FIRST_SPEAKS = 1.0  # seconds for rank 0 to print an error of all ranks: the launcher ends it when another rank ends
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


@dataclasses.dataclass
class _Process:
    """This process: its place once it is ready, how its gradients travel, and the ranks once it is connected."""

    place: Placement | None = None
    settings: Settings | None = None
    communicator: Communicator | None = None
    hook: Hook | None = None  # for uncaught errors, before `init`


_process = _Process()


def init(threads: int | None = None) -> None:
    """Readies this process for its place among the ranks; call it first, before anything uses TensorFlow.

    It gives the rank a GPU of its own and its share of the host's cores, as `comm.start` does. Among several ranks an
    uncaught error of all of them, or the loss of another one, becomes one line (`sys.excepthook`). A second call does
    nothing. Without a launcher the process is rank 0 of 1.

    Args:
      threads: threads of this rank for TensorFlow's operations; by default the host's cores divided by its ranks.

    Raises:
      UserError: if the launcher's variables are incomplete or a rank has no GPU of its own.
    """
    if _process.place is not None:
        return
    place = ready(threads)
    connect_early(place)
    _process.place = place
    if _process.place.size > 1:
        _process.hook, sys.excepthook = sys.excepthook, _in_one_line(sys.excepthook)


def _in_one_line(otherwise: Hook) -> Hook:
    """Returns a hook that prints one line for errors that are not this rank's alone, and no line twice."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SharedError) and rank() > 0:
            time.sleep(_FIRST_SPEAKS)
        elif isinstance(error, SharedError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif lost_rank.is_loss(error):
            print(UserError(lost_rank.described(error, "")), file=sys.stderr, flush=True)
        else:
            otherwise(kind, error, trace)

    return hook


def is_ready() -> bool:
    """Whether `init` was called, or this is a single process, which needs none."""
    return _process.place is not None or placement().size == 1


def rank() -> int:
    """The number of this process among all, from 0.

    Raises:
      UserError: before `init`, where a launcher has started several ranks.
    """
    return _place().rank


def size() -> int:
    """The number of processes; errors as for `rank`."""
    return _place().size


def local_rank() -> int:
    """The number of this process among those of its host, from 0; errors as for `rank`."""
    return _place().local_rank


def intend(settings: Settings) -> None:
    """Leaves the settings of the exchange of gradients, before the ranks are connected.

    Raises:
      UserError: if the ranks go by other settings already, or the grid does not hold them.
    """
    known = _process.settings
    if known is not None and known != settings and size() > 1:
        raise UserError(
            f"allreduce={settings.allreduce}, compression={settings.compression}: the ranks go by allreduce="
            f"{known.allreduce}, compression={known.compression} already; give all optimizers the same settings, and "
            "make the first before anything that communicates"
        )
    check_grids(_place(), (settings,))
    _process.settings = settings


def communicator() -> Communicator:
    """The ranks, connected at the first call; every rank makes that call.

    Raises:
      UserError: before `init`, where a launcher has started several ranks; else as `comm.start`.
    """
    if _process.communicator is None:
        _process.settings = _process.settings or Settings()
        _process.communicator = connect(_place(), _process.settings)
    return _process.communicator


def shutdown() -> None:
    """Leaves the group; the process may call `init` again, for tests and notebooks."""
    if _process.communicator is not None:
        _process.communicator.shutdown()
    if _process.hook is not None:
        sys.excepthook = _process.hook
    _process.place = _process.settings = _process.communicator = _process.hook = None


def _place() -> Placement:
    place = _process.place or placement()
    if _process.place is None and place.size > 1:
        raise UserError(f"{place.size} ranks were started: call hybrid_imagenet.init() before anything else")
    return place
