"""Defines the collective operations that ranks use to talk to each other."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hybrid_imagenet.errors import EXIT_USAGE, SharedError, UserError

if typing.TYPE_CHECKING:
    import tensorflow as tf

    from hybrid_imagenet.comm.algorithms import AlgorithmSelector
    from hybrid_imagenet.comm.settings import CommunicationSettings


class Communicator(abc.ABC):
    """Runs collective operations over all ranks.

    Every rank must call the same operations in the same order. `SingleProcess` implements them for
    one process, `ConnectedRanks` for several.

    Attributes:
      rank: Number of this process, from 0.
      size: Number of processes.
      local_rank: Number of this process among the ranks of its host, from 0.
      local_size: Number of ranks on this host.
      hosts: Name of every rank's host, in the order of ranks.
      gradient_exchange: How gradients are exchanged; None for a single process.
      num_gradient_lists: Number of lists of gradients whose reduction was planned. All ranks plan
        the same lists in the same order, so it gives each list its own names.
      has_broadcast_model: Whether the weights of a model were sent from rank 0 to all ranks.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]
    gradient_exchange: GradientExchange | None = None
    num_gradient_lists: int = 0
    has_broadcast_model: bool = False

    @abc.abstractmethod
    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over all ranks, inside or outside a graph.

        Args:
          tensor: Any shape, the same on all ranks; float16, float32, float64, int32 or int64.
          name: Pairs this operation with the same operation of the other ranks. It must be unique
            among operations that run at the same time.

        Returns:
          The sum, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def allreduce_max(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Takes the elementwise maximum of a tensor over all ranks, inside or outside a graph.

        Args:
          tensor: Any shape, the same on all ranks; float32, float64, int32 or int64. It must not
            contain NaN, because engines and ranks differ in their maximum with NaN.
          name: See `allreduce_sum`.

        Returns:
          The maximum, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over all ranks in host memory.

        No GPU takes part, so the host does not wait for the work that a GPU has queued.

        Args:
          tensor: See `allreduce_sum`; it should be in host memory already.
          name: See `allreduce_sum`.

        Returns:
          The sum in host memory, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over the ranks of this rank's neighbor group.

        Ranks 0 to n - 1 form the first group, ranks n to 2n - 1 the second, and so on, where n is
        `CommunicationSettings.neighbors`. All groups run at the same time.

        Args:
          tensor: See `allreduce_sum`.
          name: See `allreduce_sum`, and the same in all groups.

        Returns:
          The sum over the group, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Overwrites the variables of all ranks with the values of rank 0, outside of graphs.

        Args:
          variables: `tf.Variable` objects (for a Keras variable, its `value`) of any dtype except
            string, in the same order with the same shapes and dtypes on all ranks.

        Raises:
          SharedError: On all ranks, if the variables of a rank do not match those of rank 0.
        """

    @abc.abstractmethod
    def broadcast_object(self, obj: Any) -> Any:
        """Returns the object that rank 0 passed, on all ranks.

        The object is sent as JSON, so tuples become lists, and keys become strings. The objects of
        other ranks are ignored.
        """

    @abc.abstractmethod
    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns the objects of all ranks, in the order of ranks, sent as JSON."""

    def raise_first_error(self, error: UserError | str | None) -> None:
        """Raises the same error on all ranks if at least one rank passes an error.

        Every rank must call it, so that no rank goes on alone and waits for the others forever.

        Args:
          error: The error of this rank, or its message; None if there is none.

        Raises:
          SharedError: On all ranks, with the message and exit code of the lowest rank that passed
            an error. The message begins with that rank and its host, unless it is rank 0.
        """
        report = None
        if error is not None:
            exit_code = error.exit_code if isinstance(error, UserError) else EXIT_USAGE
            report = [str(error), exit_code]
        for rank, rank_report in enumerate(self.allgather_object(report)):
            if rank_report is not None:
                message, exit_code = rank_report
                where = f"rank {rank} on {self.hosts[rank]}: " if rank > 0 else ""
                raise SharedError(where + message, exit_code)

    @contextlib.contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raises the same error on all ranks if a rank raises UserError inside this context.

        Every rank must enter the context. When they leave it, they exchange their errors by
        `raise_first_error`.
        """
        user_error = None
        try:
            yield
        except UserError as error:
            user_error = error
        self.raise_first_error(user_error)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.allgather_object(None)

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends communication. After it, use nothing of this object except its attributes."""


def _accept_dtype(wire_dtype: str) -> None:
    """Does nothing, because the dtype is supported."""


@dataclasses.dataclass(frozen=True)
class GradientExchange:
    """How connected ranks exchange gradients.

    Attributes:
      settings: Bucket sizes and algorithm, the same on all ranks.
      selector: Selects the all-reduce of each bucket.
      nccl: Whether gradients are sent by NCCL, that is, from GPU to GPU.
      check_wire_dtype: Called with the name of the dtype in which gradients will be sent; warns
        about one that is slow, and raises UserError for one that the engine does not support.
    """

    settings: CommunicationSettings
    selector: AlgorithmSelector
    nccl: bool = False
    check_wire_dtype: Callable[[str], None] = _accept_dtype
