"""Implements the communicator of a process that works alone; it needs no Horovod."""

from __future__ import annotations

import json
import socket
import typing
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.comm.communicator import Communicator, check_gradients, travelling

if typing.TYPE_CHECKING:
    import tensorflow as tf


class SingleProcess(Communicator):
    """Runs every collective over one rank, as the identity. Gradients meet no wire, so they are
    only cast to FP32.
    """

    def __init__(self) -> None:
        self.rank = self.local_rank = 0
        self.size = self.local_size = 1
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
        """Returns the gradients in FP32; raises as described in `Communicator`."""
        from hybrid_imagenet.xla import has_gpu

        check_gradients(grads, names)
        members = tuple(i for i, grad in enumerate(grads) if grad.shape.num_elements())
        # A GPU has few kernels to start for one bucket. A processor copies less for a bucket each.
        buckets: list[tuple[int, ...]] = [members] if has_gpu() else [(i,) for i in members]
        return [travelling([grads[i] for i in bucket], 1, "float32") for bucket in buckets], buckets

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Leaves the variables as they are."""

    def broadcast_object(self, obj: Any) -> Any:
        """Returns the object after the same trip through JSON as with several ranks."""
        return json.loads(json.dumps(obj))

    def allgather_object(self, obj: Any) -> list[Any]:
        return [json.loads(json.dumps(obj))]

    def shutdown(self) -> None:
        """Does nothing."""
