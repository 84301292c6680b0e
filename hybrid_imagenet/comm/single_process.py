"""Implements the communicator of a single process, which needs no engine."""

from __future__ import annotations

import json
import socket
import typing
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.comm.communicator import Communicator, check_gradients, pack_for_allreduce

if typing.TYPE_CHECKING:
    import tensorflow as tf


class SingleProcess(Communicator):
    """Runs every collective over one rank, as the identity.

    Gradients are not sent, so they are only cast to FP32.
    """

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

    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.allreduce_sum(tensor, name)

    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.allreduce_sum(tensor, name)

    def reduce_gradients(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Packs the gradients in FP32; see `Communicator.reduce_gradients`."""
        from hybrid_imagenet.xla import has_gpu

        check_gradients(grads, names)
        nonempty = tuple(i for i, grad in enumerate(grads) if grad.shape.num_elements())
        # A GPU needs the fewest kernels for one bucket. A CPU copies less if each gradient has its
        # own bucket.
        buckets: list[tuple[int, ...]] = [nonempty] if has_gpu() else [(i,) for i in nonempty]
        vectors = [
            pack_for_allreduce([grads[i] for i in bucket], 1, "float32") for bucket in buckets
        ]
        return vectors, buckets

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Leaves the variables as they are."""

    def broadcast_object(self, obj: Any) -> Any:
        """Returns the object as JSON changes it, as with several ranks."""
        return json.loads(json.dumps(obj))

    def allgather_object(self, obj: Any) -> list[Any]:
        return [json.loads(json.dumps(obj))]

    def shutdown(self) -> None:
        """Does nothing."""
