"""Connects several ranks through Horovod. `start` calls it after the environment has been prepared."""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.comm import hosts
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.comm.horovod_collectives import HorovodCollectives
from hybrid_imagenet.comm.selection import Selector
from hybrid_imagenet.comm.settings import ALGORITHMS, Settings
from hybrid_imagenet.errors import UserError

_ITSELF = "Horovod's own torus over NCCL, with one row per host"
_COMPOSED = (
    "made of operations among sets of ranks: Horovod negotiates all but all-reduces anew at each step, and they wait "
    "for all that the GPU was given before; compare it with --allreduce=ring"
)
_log = logging.getLogger(__name__)


class HorovodCommunicator(ConnectedRanks):
    """Runs collectives over all ranks, through Horovod."""

    names_last = True

    def __init__(self, settings: Settings, others: Sequence[Settings] = ()) -> None:
        """Connects to the other ranks.

        Args:
          settings: how gradients travel.
          others: settings of further reductions, whose sets of ranks are to be known too.

        Raises:
          UserError: if the algorithm or grid does not fit the ranks and their hosts.
        """
        place = placement()
        self.collectives = self._host = HorovodCollectives(place.size)
        self._neighbors = self._group_of_neighbors(settings.neighbors, place.rank, place.size)
        nccl = _set_engine(settings)
        composed = any(s.allreduce != "ring" for s in (settings, *others))
        keys = hosts.gather(hosts.key()) if composed else None
        itself = nccl and keys is not None and _does_itself(settings, hosts.names(keys))
        if itself:
            os.environ.setdefault("HOROVOD_TORUS_ALLREDUCE", "1")
        if keys is None:
            if composed:
                os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"  # more sets will follow
            hvd.init(process_sets=self.collectives.made())
        if hvd.is_initialized() and hvd.size() != place.size:
            raise UserError(
                f"{place.size} ranks were started, but MPI connects {hvd.size()} of them: start them with "
                "hybrid-imagenet run or srun --mpi=pmix, or connect them by --engine=tensorflow"
            )
        self.rank, self.size = place.rank, place.size
        self._take_places(keys or self.allgather_object(hosts.key()))
        selector = Selector(self, settings, self.collectives, itself)
        for other in others:
            Selector(self, other, self.collectives)  # asks for its sets
        if not hvd.is_initialized():
            hvd.init(process_sets=self.collectives.made())
        self._reduce_by(settings, selector, nccl)
        if nccl and self.rank == 0 and settings.allreduce != "ring":
            _log.info("--allreduce=%s is %s", settings.allreduce, _ITSELF if itself else _COMPOSED)

    def shutdown(self) -> None:
        """Leaves the group; the other ranks' later collectives fail."""
        hvd.shutdown()


def _nccl() -> bool:
    """Returns whether NCCL carries the gradients."""
    return bool(hvd.nccl_built() and tf.config.get_visible_devices("GPU"))


def _does_itself(settings: Settings, names: Sequence[str]) -> bool:
    """Returns whether Horovod's torus over NCCL, one row per host, is what `settings.allreduce` asks for.

    Its hierarchical all-reduce is not used: between hosts that sums in the memory of the hosts, through MPI.

    Args:
      settings: how gradients travel.
      names: the host of every rank.
    """
    found: bool = pkgutil.resolve_name(ALGORITHMS[settings.allreduce].constructor).rows_are_hosts(
        names, **settings.options
    )
    return found


def _set_engine(settings: Settings) -> bool:
    """Sets Horovod's own options; returns whether NCCL carries the gradients.

    Horovod reads them when it starts. What the launcher or the user has set stays.
    """
    nccl = _nccl()
    os.environ.setdefault("HOROVOD_CYCLE_TIME", f"{settings.cycle_ms(nccl):g}")
    # A bucket is one group. Groups must not be merged, or sums would be rounded differently from run to run.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(2 * settings.fusion_bytes))
    if nccl:
        # Sums are handed on while they still run; otherwise Horovod waits for each on the host, and what follows is
        # launched only then.
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    return nccl
