"""Connects several ranks through Horovod. `start` calls it after the environment has been
prepared.
"""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.comm import hosts
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.comm.settings import ALGORITHMS, CommunicationSettings

_ITSELF = "Horovod's own torus over NCCL, with one row per host"
_COMPOSED = (
    "made of operations among sets of ranks: Horovod negotiates all but all-reduces again at each"
    " step, and they wait for all that the GPU was given before; compare it with --allreduce=ring"
)
_log = logging.getLogger(__name__)


class HorovodCollectives(Collectives):
    """Horovod's operations. A group is one of Horovod's process sets; all are given to `hvd.init`.

    Horovod could add sets later. Then its thread would exchange their number with the other ranks
    in every cycle, and hold meanwhile the lock that every operation needs.
    """

    def __init__(self, size: int) -> None:
        self._all = tuple(range(size))
        self._sets = {self._all: hvd.global_process_set}

    def create_group(self, ranks: Sequence[int]) -> hvd.ProcessSet:
        """Returns the set of these ranks; the first request makes it."""
        key = tuple(sorted(ranks))
        if key not in self._sets:
            self._sets[key] = hvd.ProcessSet(list(key))
        return self._sets[key]

    def made(self) -> list[hvd.ProcessSet]:
        """Returns all sets but the global one, for `hvd.init`, which makes them usable."""
        return [made for key, made in self._sets.items() if key != self._all]

    def allreduce(
        self,
        tensor: tf.Tensor,
        name: str,
        group: hvd.ProcessSet | None = None,
        *,
        use_name_scope: bool = False,
    ) -> tf.Tensor:
        where = group or hvd.global_process_set
        return hvd.allreduce(
            tensor, op=hvd.Sum, name=name, process_set=where, ignore_name_scope=not use_name_scope
        )

    def allreduce_unfused(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a group of one tensor: groups are not merged (HOROVOD_DISABLE_GROUP_FUSION)."""
        return hvd.grouped_allreduce([tensor], op=hvd.Sum, name=name, ignore_name_scope=True)[0]

    def reducescatter(self, vector: tf.Tensor, name: str, group: hvd.ProcessSet) -> tf.Tensor:
        return hvd.reducescatter(
            vector, op=hvd.Sum, name=name, process_set=group, ignore_name_scope=True
        )

    def allgather(
        self, vector: tf.Tensor, name: str, group: hvd.ProcessSet | None = None
    ) -> tf.Tensor:
        """Gathers in one operation; lengths may differ."""
        where = group or hvd.global_process_set
        return hvd.allgather(vector, name=name, process_set=where, ignore_name_scope=True)

    def alltoall(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.alltoall(vector, name=name, ignore_name_scope=True)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, group: hvd.ProcessSet | None = None
    ) -> tf.Tensor:
        where = group or hvd.global_process_set
        return hvd.broadcast(tensor, root, name=name, process_set=where, ignore_name_scope=True)


class HorovodCommunicator(ConnectedRanks):
    """Runs collectives over all ranks, through Horovod."""

    reusable_names = True

    def __init__(
        self, settings: CommunicationSettings, others: Sequence[CommunicationSettings] = ()
    ) -> None:
        """Connects to the other ranks.

        Args:
          settings: how gradients travel.
          others: settings of further reductions, whose sets of ranks are to be known too.

        Raises:
          UserError: if the algorithm or grid does not fit the ranks and their hosts.
        """
        place = placement()
        self.collectives = self._host_collectives = HorovodCollectives(place.size)
        nccl = _set_engine(settings)
        own_key = hosts.host_key()
        gathered = hosts.gather([*own_key, str(settings.neighbors)], place.size)
        keys = [entry[: len(own_key)] for entry in gathered]
        # Rank 0's number counts: it alone may know the run that is resumed, and with it the batch.
        neighbors = int(gathered[0][-1])
        self._neighbor_group = self._create_neighbor_group(neighbors, place.rank, place.size)
        itself = nccl and _horovod_supports_natively(settings, hosts.unique_host_names(keys))
        if itself:
            os.environ.setdefault("HOROVOD_TORUS_ALLREDUCE", "1")
        self._set_topology(place, keys)
        selector = self.make_selector(settings, native_algorithm=itself)
        for other in others:
            self.make_selector(other)  # asks for its sets
        if not hvd.is_initialized():
            hvd.init(process_sets=self.collectives.made())
        hosts.check_size(hvd.size(), place.size)
        self._set_reducer(settings, selector, nccl)
        if nccl and self.rank == 0 and settings.allreduce != "ring":
            _log.info("--allreduce=%s is %s", settings.allreduce, _ITSELF if itself else _COMPOSED)

    def shutdown(self) -> None:
        """Leaves the group; collectives that other ranks wait for, among themselves too, then
        fail.
        """
        hvd.shutdown()


def _horovod_supports_natively(settings: CommunicationSettings, names: Sequence[str]) -> bool:
    """Returns whether Horovod's torus over NCCL, one row per host, is what `settings.allreduce`
    asks for.

    Its hierarchical all-reduce is not used: between hosts that sums in the memory of the hosts,
    through MPI.
    """
    found: bool = pkgutil.resolve_name(
        ALGORITHMS[settings.allreduce].constructor
    ).has_one_row_per_host(names, **settings.options)
    return found


def _set_engine(settings: CommunicationSettings) -> bool:
    """Sets Horovod's own options; returns whether NCCL carries the gradients.

    Horovod reads them when it starts. What the launcher or the user has set stays.
    """
    nccl = bool(hvd.nccl_built() and tf.config.get_visible_devices("GPU"))
    # Milliseconds; 1 is Horovod's default. A GPU's step is short, and so are the waits that hide
    # behind it. Processors lose nothing by it (docs/dev/performance-log.md).
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.2")
    # A bucket is one group. Groups must not be merged, or sums would be rounded differently from
    # run to run.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    merged = 0 if settings.deterministic else 2 * settings.fusion_bytes  # outside of groups
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(merged))
    if nccl:
        # Sums are handed on while they still run; otherwise Horovod waits for each on the host, and
        # what follows is launched only then.
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    return nccl
