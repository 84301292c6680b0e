"""Connects several ranks through Horovod (--engine=horovod)."""

from __future__ import annotations

import logging
import os
import pkgutil
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.cluster import hosts
from hybrid_imagenet.cluster.environment import read_placement
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.settings import ALGORITHMS, CommunicationSettings

_NATIVE_MESSAGE = "Horovod's own torus over NCCL, with one row per host"
_COMPOSED_MESSAGE = (
    "composed of operations among sets of ranks. Horovod negotiates all of them except all-reduces"
    " again at each step, and they wait for all earlier work of the GPU. Compare it with"
    " --allreduce=ring."
)
_log = logging.getLogger(__name__)


class HorovodCommunicator(ConnectedRanks):
    """Runs collectives over all ranks through Horovod."""

    reusable_names = True

    def __init__(
        self,
        settings: CommunicationSettings,
        additional_settings: Sequence[CommunicationSettings] = (),
    ) -> None:
        """Connects to the other ranks, after the environment has been configured.

        Args:
          settings: How gradients are sent.
          additional_settings: Settings of further reductions, whose groups Horovod must know at its
            start.

        Raises:
          UserError: If the algorithm or grid does not fit the ranks and their hosts.
        """
        placement = read_placement()
        self.collectives = HorovodCollectives(placement.size)
        self._host_collectives = self.collectives
        nccl = _configure_horovod(settings)
        own_key = hosts.host_key()
        gathered = hosts.gather_by_mpi([*own_key, str(settings.neighbors)], placement.size)
        host_keys = [strings[: len(own_key)] for strings in gathered]
        # The number of rank 0 counts, because only rank 0 may know the run that is resumed, and
        # with it the batch size.
        group_size = int(gathered[0][-1])
        self._neighbor_group = self._create_neighbor_group(
            group_size, placement.rank, placement.size
        )
        native_algorithm = nccl and _horovod_supports_natively(
            settings, hosts.unique_host_names(host_keys)
        )
        if native_algorithm:
            os.environ.setdefault("HOROVOD_TORUS_ALLREDUCE", "1")
        self._set_topology(placement, host_keys)
        selector = self.make_selector(settings, native_algorithm=native_algorithm)
        for each_settings in additional_settings:
            # Its only purpose here is to create the groups of its algorithm before Horovod starts.
            self.make_selector(each_settings)
        if not hvd.is_initialized():
            hvd.init(process_sets=self.collectives.process_sets())
        hosts.check_connected_size(hvd.size(), placement.size)
        self._set_gradient_exchange(settings, selector, nccl)
        if nccl and self.rank == 0 and settings.allreduce != "ring":
            message = _NATIVE_MESSAGE if native_algorithm else _COMPOSED_MESSAGE
            _log.info("--allreduce=%s is %s", settings.allreduce, message)

    def shutdown(self) -> None:
        """Disconnects this rank; collectives of the other ranks then fail."""
        hvd.shutdown()


def _configure_horovod(settings: CommunicationSettings) -> bool:
    """Sets Horovod's environment variables, which it reads when it starts.

    Variables that the launcher or the user has set stay as they are.

    Returns:
      Whether gradients are sent by NCCL.
    """
    nccl = bool(hvd.nccl_built() and tf.config.get_visible_devices("GPU"))
    # The interval in milliseconds at which Horovod's thread looks for new operations; its default
    # is 1. A step on a GPU is so short that waits of this length matter. On CPUs the shorter
    # interval costs nothing (docs/dev/measurements.md).
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.2")
    # Each bucket is one group. If Horovod fused groups that happen to be ready together, sums would
    # be rounded differently from run to run.
    os.environ.setdefault("HOROVOD_DISABLE_GROUP_FUSION", "1")
    # This is the limit for operations outside groups. 0 turns their fusion off, too.
    fusion_threshold = 0 if settings.deterministic else 2 * settings.fusion_bytes
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(fusion_threshold))
    if nccl:
        # Hand sums to the next operation while NCCL still computes them. Otherwise Horovod's thread
        # waits for each sum on the host, and what follows is launched only then.
        os.environ.setdefault("HOROVOD_ENABLE_ASYNC_COMPLETION", "1")
    return nccl


def _horovod_supports_natively(settings: CommunicationSettings, host_names: Sequence[str]) -> bool:
    """Returns whether `settings.allreduce` is Horovod's own torus over NCCL.

    That torus has one row per host. Horovod's hierarchical all-reduce is the same algorithm but is
    not used, because between hosts it sums in host memory, through MPI.

    Args:
      settings: The algorithm with its options.
      host_names: Host of every rank.
    """
    algorithm = pkgutil.resolve_name(ALGORITHMS[settings.allreduce].constructor)
    is_native: bool = algorithm.has_one_row_per_host(host_names, settings.options)
    return is_native


class HorovodCollectives(Collectives):
    """Runs Horovod's operations; a group is one of Horovod's process sets.

    All process sets are passed to `hvd.init`. Horovod could also add them later. But then its
    thread exchanges their number with the other ranks in every cycle, and holds meanwhile the lock
    that every operation needs.
    """

    def __init__(self, size: int) -> None:
        """Creates the group of all ranks.

        Args:
          size: Number of ranks.
        """
        self._all_ranks = tuple(range(size))
        self._process_sets = {self._all_ranks: hvd.global_process_set}

    def create_group(self, ranks: Sequence[int]) -> hvd.ProcessSet:
        key = tuple(sorted(ranks))
        if key not in self._process_sets:
            self._process_sets[key] = hvd.ProcessSet(list(key))
        return self._process_sets[key]

    def process_sets(self) -> list[hvd.ProcessSet]:
        """Returns all process sets except the global one.

        Pass them to `hvd.init`, because they can be used only after that.
        """
        return [
            process_set
            for ranks, process_set in self._process_sets.items()
            if ranks != self._all_ranks
        ]

    def allreduce(
        self,
        tensor: tf.Tensor,
        name: str,
        group: hvd.ProcessSet | None = None,
        *,
        use_name_scope: bool = False,
    ) -> tf.Tensor:
        return hvd.allreduce(
            tensor,
            op=hvd.Sum,
            name=name,
            process_set=group or hvd.global_process_set,
            ignore_name_scope=not use_name_scope,
        )

    def allreduce_unfused(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a group of one tensor, because HOROVOD_DISABLE_GROUP_FUSION keeps groups apart."""
        return hvd.grouped_allreduce([tensor], op=hvd.Sum, name=name, ignore_name_scope=True)[0]

    def allreduce_max(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.allreduce(tensor, op=hvd.Max, name=name)

    def reducescatter(self, vector: tf.Tensor, name: str, group: hvd.ProcessSet) -> tf.Tensor:
        return hvd.reducescatter(
            vector, op=hvd.Sum, name=name, process_set=group, ignore_name_scope=True
        )

    def allgather(
        self, vector: tf.Tensor, name: str, group: hvd.ProcessSet | None = None
    ) -> tf.Tensor:
        process_set = group or hvd.global_process_set
        return hvd.allgather(vector, name=name, process_set=process_set, ignore_name_scope=True)

    def alltoall(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        return hvd.alltoall(vector, name=name, ignore_name_scope=True)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, group: hvd.ProcessSet | None = None
    ) -> tf.Tensor:
        process_set = group or hvd.global_process_set
        return hvd.broadcast(
            tensor, root, name=name, process_set=process_set, ignore_name_scope=True
        )
