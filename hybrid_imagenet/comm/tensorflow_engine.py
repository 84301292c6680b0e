"""Connects several ranks through TensorFlow's own runtime, without Horovod
(--engine=tensorflow).
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hybrid_imagenet import private_api
from hybrid_imagenet.comm import hosts, launcher_variables
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.environment import RANK_VARIABLE, Placement, placement
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.errors import UserError, pluralize

# the watchdog names a silent rank after 30 s, with its stack; TensorFlow's 10 s are too short
_HEARTBEAT_MS = 35_000


class Members(NamedTuple):
    """A group: its number, the same on all ranks, and its ranks in ascending order."""

    number: int
    ranks: tuple[int, ...]


class TensorFlowCollectives(Collectives):
    """TensorFlow's operations, which find each other by numbers: one for the group and one for each
    operation in it.

    A group has tensors on one kind of device only, so the ranks have one object for GPUs and
    another for their hosts.
    """

    def __init__(self, rank: int, size: int, *, gpu: bool = False) -> None:
        """Makes the group of all ranks, of tensors on GPUs if `gpu` says so. TensorFlow must know
        the ranks already.
        """
        self._rank, self._gpu = rank, gpu
        self._groups: dict[tuple[int, ...], Members] = {}
        self._names: dict[int, str] = {}
        self._places: dict[int, list[int]] = {}
        # NCCL's kernels must start in one order on all ranks: the runtime orders what shares a
        # resource.
        self._token = [tf.Variable(0.0, trainable=False).handle] if gpu else []
        self._everyone = self.create_group(range(size))

    def create_group(self, ranks: Sequence[int]) -> Members:
        """Returns the group; the first request gives it the next number."""
        key = tuple(sorted(ranks))
        return self._groups.setdefault(key, Members(len(self._groups) + 1, key))

    def allreduce(
        self,
        tensor: tf.Tensor,
        name: str,
        group: Members | None = None,
        *,
        use_name_scope: bool = False,
    ) -> tf.Tensor:
        if use_name_scope and not tf.executing_eagerly():
            name = tf.compat.v1.get_default_graph().unique_name(name)
        return tf.raw_ops.CollectiveReduceV2(
            input=tensor, merge_op="Add", final_op="Id", **self._place("sum", tensor, name, group)
        )

    def reducescatter(self, vector: tf.Tensor, name: str, group: Members) -> tf.Tensor:
        """Sends each rank its part, and adds the parts in the order of ranks: the runtime has no
        such sum on CPUs.
        """
        parts = tf.unstack(tf.reshape(self._exchange(vector, name, group), [len(group.ranks), -1]))
        return tf.add_n(parts)

    def allgather(self, vector: tf.Tensor, name: str, group: Members | None = None) -> tf.Tensor:
        """Gathers in one operation; lengths are equal."""
        members = group or self._everyone
        carried = _carried(vector)
        found = tf.raw_ops.CollectiveGatherV2(
            input=carried, **self._place("gather", carried, name, group)
        )
        rows = _permuted(tf.reshape(found, [len(members.ranks), -1]), self._order(members))
        return tf.bitcast(tf.reshape(rows, [-1]), vector.dtype)

    def alltoall(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        return self._exchange(vector, name, self._everyone)

    def broadcast(
        self, tensor: tf.Tensor, root: int, name: str, group: Members | None = None
    ) -> tf.Tensor:
        # the runtime's broadcast takes no token: a receiver's would start first and block NCCL's
        # stream
        if self._gpu:
            return self.allreduce(
                tensor if self._rank == root else tf.zeros_like(tensor),
                f"{name} from {root}",
                group,
            )
        place = self._place(f"broadcast from {root}", tensor, name, group)
        del place["ordering_token"]
        if self._rank == root:
            return tf.raw_ops.CollectiveBcastSendV2(input=tensor, **place)
        return tf.raw_ops.CollectiveBcastRecvV2(T=tensor.dtype, shape=tensor.shape, **place)

    def _exchange(self, vector: tf.Tensor, name: str, group: Members) -> tf.Tensor:
        count, order = len(group.ranks), self._order(group)
        parts = tf.reshape(_carried(vector), [count, -1])
        carried = _permuted(parts, sorted(range(count), key=order.__getitem__))
        found = tf.raw_ops.CollectiveAllToAllV2(
            input=carried, **self._place("exchange", carried, name, group)
        )
        return tf.bitcast(tf.reshape(_permuted(found, order), [-1]), vector.dtype)

    def _order(self, group: Members) -> list[int]:
        """Returns the place that the runtime has given to each rank of a group; it does not tell,
        so ranks ask once.
        """
        if group.number not in self._places:
            with tf.init_scope():
                own = tf.constant(
                    [self._rank], tf.float32
                )  # integers of 32 bits lie on the host, also for a GPU
                place = self._place("order", own, f"group_{group.number}", group)
                found = tf.raw_ops.CollectiveGatherV2(input=own, **place).numpy().tolist()
            self._places[group.number] = [found.index(rank) for rank in group.ranks]
        return self._places[group.number]

    def _place(
        self, kind: str, tensor: tf.Tensor, name: str, group: Members | None
    ) -> dict[str, Any]:
        """Returns what tells the runtime which operation of which ranks this is."""
        members = group or self._everyone
        # The runtime wants the same shape and type whenever it meets a number again.
        label = f"{members.number} {kind} {tensor.dtype.name} {tensor.shape} {name}"
        number = zlib.crc32(label.encode()) >> 1  # 31 bits, positive
        if self._names.setdefault(number, label) != label:
            raise ValueError(
                f"{label!r} and {self._names[number]!r} have the same number: rename one"
            )
        return {
            "group_size": len(members.ranks),
            "group_key": 2 * members.number + self._gpu,
            "instance_key": number,
            "ordering_token": self._token,
            "communication_hint": "nccl" if self._gpu else "ring",
        }


def _carried(vector: tf.Tensor) -> tf.Tensor:
    """Returns a tensor whose type the operations carry: 16-bit integers go as the bits of 16-bit
    floats.
    """
    return tf.bitcast(vector, tf.float16) if vector.dtype == tf.uint16 else vector


def _permuted(rows: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    return rows if list(order) == sorted(order) else tf.gather(rows, order)


class TensorFlowCommunicator(ConnectedRanks):
    """Runs collectives over all ranks of a launcher, through servers that TensorFlow starts in each
    of them.
    """

    def __init__(
        self, settings: CommunicationSettings, others: Sequence[CommunicationSettings] = ()
    ) -> None:
        """Connects to the other ranks; a process does so once, and later communicators share the
        connection.

        Raises:
          UserError: if the algorithm or grid does not fit the ranks and their hosts or devices, or
            the ranks have no way to find each other.
        """
        place = placement()
        nccl = bool(tf.config.get_visible_devices("GPU"))
        for each in (settings, *others) if nccl else ():
            check_on_gpus(each)
        keys, self.rank, self.size = join(place), place.rank, place.size
        self._host_collectives = TensorFlowCollectives(place.rank, place.size)
        self._set_topology(place, keys or self.allgather_object(hosts.host_key()))
        if self.rank == 0:
            ports = pluralize(self.size, "TCP port")
            hosts_count = pluralize(len(set(self.hosts)), "host")
            print(
                f"warning: TensorFlow's engine opens {ports} without a password on all network"
                f" interfaces of {hosts_count}: anyone who reaches one can run code in this job, so"
                " use it only in a network that you trust (docs/trust.md)",
                file=sys.stderr,
                flush=True,
            )
        self.collectives = (
            TensorFlowCollectives(place.rank, place.size, gpu=True)
            if nccl
            else self._host_collectives
        )
        # Rank 0's number counts: it alone may know the run that is resumed, and with it the batch.
        neighbors = self.broadcast_object(settings.neighbors)
        self._neighbor_group = self._create_neighbor_group(neighbors, place.rank, place.size)
        self._set_reducer(settings, self.make_selector(settings), nccl)

    def shutdown(self) -> None:
        """Does nothing: the servers end with their processes."""


def check_on_gpus(settings: CommunicationSettings) -> None:
    """Refuses what needs an all-to-all or all-gather of TensorFlow over NCCL: four ranks on an H100
    got wrong sums.

    Raises:
      UserError: with the settings to take.
    """
    if settings.allreduce in ("torus", "hierarchical") or settings.compression == "bf16":
        raise UserError(
            "--engine=tensorflow: on GPUs --allreduce=torus, hierarchical and --compression=bf16"
            " give wrong sums: use --allreduce=ring with --compression=fp16, or --engine=horovod"
        )


@functools.cache
def join(place: Placement) -> list[list[str]] | None:
    """Starts this rank's server and tells TensorFlow of the others'.

    Returns:
      Every rank's `hosts.host_key`; None where TF_CONFIG or Slurm has given the addresses, and the
      keys are yet unknown.
    """
    cluster = launcher_variables.read(os.environ) if RANK_VARIABLE not in os.environ else None
    if cluster is not None:
        _connect(cluster.servers, place.rank)
        return None
    own, addresses = hosts.host_key(), hosts.asked_for(hosts.interfaces()).values()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        # The port is kept until all have theirs, so that no two ranks of a host are given the same
        # one.
        found = hosts.gather([*own, str(port), *addresses], place.size)
    keys = [each[: len(own)] for each in found]
    if all(key == own for key in keys):
        places = ["127.0.0.1"] * place.size  # "localhost" is not known in every container
    else:
        places = hosts.meeting_places([each[len(own) + 1 :] for each in found], keys)
    servers = [f"{address}:{each[len(own)]}" for address, each in zip(places, found, strict=True)]
    _connect(servers, place.rank)
    return keys


def _connect(servers: Sequence[str], rank: int) -> None:
    """Starts the server of `rank`; `servers` are the addresses of all ranks."""
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(servers)}),
        task_type="worker",
        task_id=rank,
        rpc_layer="grpc",
    )
    runtime = private_api.eager_context()
    runtime.configure_coordination_service = functools.partial(
        runtime.configure_coordination_service, heartbeat_timeout_in_ms=_HEARTBEAT_MS
    )
    try:
        # Its constructor is the public way to a server and to collective operations; nothing else
        # of it is used.
        tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except (
        RuntimeError
    ) as error:  # TensorFlow has begun without the others, as `model.fit` has when it first sums
        raise UserError(
            f"--engine=tensorflow: the ranks must be connected before TensorFlow is used ({error}):"
            " use Horovod here"
        ) from None
    if (
        threading.current_thread() is threading.main_thread()
    ):  # TensorFlow has taken SIGTERM and does nothing with it
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
