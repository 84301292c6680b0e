"""Connects several ranks through TensorFlow's own runtime, without Horovod (--engine=tensorflow)."""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Sequence

import tensorflow as tf

from hybrid_imagenet.comm import clusters, hosts
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.environment import Placement, placement
from hybrid_imagenet.comm.selection import Selector
from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.comm.tensorflow_collectives import TensorFlowCollectives
from hybrid_imagenet.errors import UserError


class TensorFlowCommunicator(ConnectedRanks):
    """Runs collectives over all ranks of a launcher, through servers that TensorFlow starts in each of them."""

    def __init__(self, settings: Settings, others: Sequence[Settings] = ()) -> None:
        """Connects to the other ranks; a process does so once, and later communicators share the connection.

        Args:
          settings: how gradients travel.
          others: settings of further reductions; their groups need no notice here.

        Raises:
          UserError: if the algorithm or grid does not fit the ranks and their hosts, or the ranks have no way to find
            each other.
        """
        del others
        place = placement()
        self.rank, self.size = place.rank, place.size
        keys = join(place)
        nccl = bool(tf.config.get_visible_devices("GPU"))
        self._host = TensorFlowCollectives(place.rank, place.size)
        self._take_places(keys or self.allgather_object(hosts.key()))
        if self.rank == 0 and len(set(self.hosts)) > 1:
            print(
                "warning: --engine=tensorflow opens a port on every rank that takes requests from whoever reaches it: "
                "use a trusted network (docs/trust.md)",
                file=sys.stderr,
            )
        self.collectives = TensorFlowCollectives(place.rank, place.size, gpu=True) if nccl else self._host
        self._neighbors = self._group_of_neighbors(settings.neighbors, place.rank, place.size)
        self._reduce_by(settings, Selector(self, settings, self.collectives), nccl)

    def shutdown(self) -> None:
        """Does nothing: the servers end with their processes."""


@functools.cache
def join(place: Placement) -> list[list[str]] | None:
    """Starts this rank's server and tells TensorFlow of the others'.

    Returns:
      Every rank's `hosts.key`; None where TF_CONFIG or Slurm has given the addresses, and the keys are yet unknown.
    """
    cluster = clusters.read(os.environ) if "OMPI_COMM_WORLD_RANK" not in os.environ else None
    if cluster is not None:
        _connect(cluster.servers, place.rank)
        return None
    own, addresses = hosts.key(), hosts.asked_for(hosts.interfaces()).values()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
        # The port is kept until all have theirs, so that no two ranks of a host are given the same one.
        found = hosts.gather([*own, str(port), *addresses])
    if found is None:
        raise UserError(
            "--engine=tensorflow: the ranks have no way to find each other: install mpi4py, and start them with "
            "hybrid-imagenet run"
        )
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
        tf.train.ClusterSpec({"worker": list(servers)}), task_type="worker", task_id=rank, rpc_layer="grpc"
    )
    try:
        # Its constructor is the public way to a server and to collective operations; nothing else of it is used.
        tf.distribute.MultiWorkerMirroredStrategy(resolver)
    except RuntimeError as error:  # TensorFlow has begun without the others, as `model.fit` has when it first sums
        raise UserError(
            f"--engine=tensorflow: the ranks must be connected before TensorFlow is used ({error}): use Horovod here"
        ) from None
