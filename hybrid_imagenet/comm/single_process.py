"""Implements the communicator of a single process, which needs no engine."""

from __future__ import annotations

import json
import socket
import typing
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.comm.communicator import Communicator

if typing.TYPE_CHECKING:
    import tensorflow as tf


class SingleProcess(Communicator):
    """Runs every collective over one rank, as the identity."""

    def __init__(self) -> None:
        """Sets rank 0 of 1 on this host."""
        self.rank = 0
        self.size = 1
        self.local_rank = 0
        self.local_size = 1
        self.hosts = (socket.gethostname(),)

    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        import tensorflow as tf

        del name
        return tf.convert_to_tensor(tensor)

    def allreduce_max(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.allreduce_sum(tensor, name)

    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.allreduce_sum(tensor, name)

    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.allreduce_sum(tensor, name)

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Leaves the variables as they are."""

    def broadcast_object(self, obj: Any) -> Any:
        """Returns the object as JSON changes it, as with several ranks."""
        return json.loads(json.dumps(obj))

    def allgather_object(self, obj: Any) -> list[Any]:
        return [json.loads(json.dumps(obj))]

    def shutdown(self) -> None:
        """Does nothing."""
