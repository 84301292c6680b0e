"""Defines the collective operations that an engine provides.

Everything else in `comm` is composed of them. `horovod_engine` implements them with Horovod,
`tensorflow_engine` with TensorFlow's runtime.
"""

from __future__ import annotations

import abc
import typing
from collections.abc import Sequence
from typing import Any

if typing.TYPE_CHECKING:
    import tensorflow as tf


class Collectives(abc.ABC):
    """Runs collective operations among ranks, inside and outside graphs.

    All operations follow the same contract:

    Order: Every rank of a group calls the same operations in the same order.
    Pairing: A `name` pairs an operation with the same operation of the other ranks. It must be
      unique among operations that run at the same time.
    Groups: A `group` is a result of `create_group`; None means all ranks.
    """

    @abc.abstractmethod
    def create_group(self, ranks: Sequence[int]) -> Any:
        """Returns the group of these ranks, and creates it at the first request.

        Every rank of the job must request the same groups in the same order, also those that it
        does not belong to.

        Args:
          ranks: Numbers of the group's members among all ranks.
        """

    @abc.abstractmethod
    def allreduce(
        self, tensor: tf.Tensor, name: str, group: Any = None, *, use_name_scope: bool = False
    ) -> tf.Tensor:
        """Sums a tensor over the ranks of a group.

        Args:
          tensor: Any shape, the same on all ranks; a dtype of `Communicator.allreduce_sum`.
          name: See the class.
          group: See the class.
          use_name_scope: Whether several operations of a graph may have this name. TensorFlow's
            name scopes and suffixes then tell them apart.

        Returns:
          The sum, with the shape and dtype of `tensor`.
        """

    def allreduce_unfused(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over all ranks, without fusing it with other operations.

        Engines fuse operations that happen to arrive together, so fused sums could be rounded
        differently from run to run.

        Args:
          tensor: See `allreduce`.
          name: See the class.

        Returns:
          The sum, with the shape and dtype of `tensor`.
        """
        return self.allreduce(tensor, name)

    @abc.abstractmethod
    def allreduce_max(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Takes the elementwise maximum of a tensor over all ranks.

        Args:
          tensor: Any shape, the same on all ranks; float32, float64, int32 or int64, without NaN.
          name: See the class. Several operations of a graph may have this name; TensorFlow's name
            scopes and suffixes then tell them apart.

        Returns:
          The maximum, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def reducescatter(self, vector: tf.Tensor, name: str, group: Any) -> tf.Tensor:
        """Sums a vector over the ranks of a group and gives each rank one chunk of the sum.

        Args:
          vector: Shape [n], where n is divisible by the group's size; float16 or float32.
          name: See the class.
          group: See the class.

        Returns:
          Shape [n / group size]: the rank at position i of the group gets chunk i.
        """

    @abc.abstractmethod
    def allgather(self, vector: tf.Tensor, name: str, group: Any = None) -> tf.Tensor:
        """Concatenates the vectors of the ranks of a group, in the order of ranks.

        Args:
          vector: Shape [n], the same on all ranks.
          name: See the class.
          group: See the class.

        Returns:
          Shape [group size * n].
        """

    @abc.abstractmethod
    def alltoall(self, vector: tf.Tensor, name: str) -> tf.Tensor:
        """Sends chunk r of a vector to rank r, for all ranks r.

        Args:
          vector: Shape [n], where n is divisible by the number of ranks.
          name: See the class.

        Returns:
          Shape [n]: the chunks that the ranks have sent to this rank, in the order of ranks.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, name: str, group: Any = None) -> tf.Tensor:
        """Returns the tensor of rank `root` on all ranks of a group.

        Args:
          tensor: Shape and dtype are the same on all ranks.
          root: The sender's number among all ranks, not its position in the group.
          name: See the class.
          group: See the class.
        """
