"""Defines the operations that an engine brings: sums and exchanges among all ranks, or among the
ranks of a group.

All else in `comm` is made of them. `horovod_engine` has them from Horovod, `tensorflow_engine` from
TensorFlow itself.
"""

from __future__ import annotations

import abc
import typing
from collections.abc import Sequence
from typing import Any

if typing.TYPE_CHECKING:
    import tensorflow as tf


class Collectives(abc.ABC):
    """Operations among ranks, in and outside of graphs.

    Every rank of a group calls the same ones in the same order. A `name` pairs an operation with
    the same one of the other ranks, and is unique among those that run at one time. A `group` is
    what `group` has returned; None is all ranks.
    """

    @abc.abstractmethod
    def group(self, ranks: Sequence[int]) -> Any:
        """Returns the group of these ranks. All ranks of the job ask for the same groups in the
        same order.
        """

    @abc.abstractmethod
    def allreduce(
        self, tensor: tf.Tensor, name: str, group: Any = None, *, scoped: bool = False
    ) -> tf.Tensor:
        """Returns the sum of a tensor; types as in `Communicator.allreduce_sum`, and those of
        `Settings.wire`.

        Args:
          tensor: of the same shape and type on all ranks.
          name: as for the class.
          group: as for the class.
          scoped: several operations of a graph may have this name; TensorFlow's scopes and numbers
            tell them apart.
        """

    def allreduce_apart(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum of a tensor over all ranks, by an operation that the engine merges with
        no other.

        Operations merge by the time at which they come, so that their sums would be rounded
        differently from run to run.
        """
        return self.allreduce(tensor, name)

    @abc.abstractmethod
    def reducescatter(self, flat: tf.Tensor, name: str, group: Any) -> tf.Tensor:
        """Returns this rank's part of the sum of a tensor [n], n a multiple of the ranks, which
        have parts in order.
        """

    @abc.abstractmethod
    def allgather(self, flat: tf.Tensor, name: str, group: Any = None) -> tf.Tensor:
        """Returns the tensors [n] of the ranks one after the other, in their order."""

    @abc.abstractmethod
    def alltoall(self, flat: tf.Tensor, name: str) -> tf.Tensor:
        """Sends part r of a tensor [n] to rank r; returns what the ranks have sent here, in their
        order.
        """

    @abc.abstractmethod
    def broadcast(self, tensor: tf.Tensor, root: int, name: str, group: Any = None) -> tf.Tensor:
        """Returns the tensor of rank `root`, its number among all ranks; shape and type are the
        same on all.
        """
