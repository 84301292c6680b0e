"""Defines the collective operations that ranks use to talk to each other."""

from __future__ import annotations

import abc
import contextlib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_imagenet.comm.packing import round_up_to_rows
from hybrid_imagenet.errors import EXIT_USAGE, SharedError, UserError

if typing.TYPE_CHECKING:
    import tensorflow as tf


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
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]

    @abc.abstractmethod
    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over all ranks, inside or outside of a graph.

        Args:
          tensor: Any shape, the same on all ranks; float16, float32, float64, int32 or int64.
          name: Pairs this operation with the same operation of the other ranks. It must be unique
            among operations that run at the same time.

        Returns:
          The sum, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over all ranks in host memory.

        No GPU takes part, so the host does not wait for the work that a GPU has queued.

        Args:
          tensor: As for `allreduce_sum`; it should be in host memory already.
          name: As for `allreduce_sum`.

        Returns:
          The sum in host memory, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums a tensor over the ranks of this rank's neighbor group.

        Ranks 0 to n - 1 form the first group, ranks n to 2n - 1 the second, and so on, where n is
        `CommunicationSettings.neighbors`. All groups run at the same time.

        Args:
          tensor: As for `allreduce_sum`.
          name: As for `allreduce_sum`, and the same in all groups.

        Returns:
          The sum over the group, with the shape and dtype of `tensor`.
        """

    @abc.abstractmethod
    def reduce_gradients(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Averages gradients over all ranks.

        Each gradient is divided by the number of ranks in FP32 before the sum, so that a sum in
        FP16 cannot overflow if the mean does not. Then it is cast to the wire dtype and summed.
        The means stay packed as they were sent, because unpacking them would cost a GPU one kernel
        per variable.

        Args:
          grads: One floating-point tensor per variable, with static shape, in the same order on
            all ranks.
          names: The variables' names, unique, in the same order. All ranks must pass the same
            names and shapes.

        Returns:
          A pair `(vectors, members)`. `vectors` has one vector per bucket, in the wire dtype, in
          which each gradient is padded with zeros to a multiple of `comm.packing.ROW_SIZE`.
          `members` has, for each bucket, the positions in `grads` of its gradients, in the order
          in which they are packed. Gradients without elements are in no bucket.

        Raises:
          TypeError: If a gradient is sparse (tf.IndexedSlices) or not floating-point.
          ValueError: If `grads` and `names` differ in length, names are not unique, a gradient is
            None, or its shape is not static.
        """

    @abc.abstractmethod
    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Overwrites the variables of all ranks with the values of rank 0, outside of graphs.

        Args:
          variables: tf.Variable objects (for a Keras variable, its `value`) of any dtype except
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

    def statistics(self) -> dict[str, Any]:
        """Returns the cost of reducing gradients, and restarts its measurement.

        Returns:
          {} if there is only one rank. Otherwise:

          buckets: For each bucket its `bytes`, number of `tensors`, `wire` dtype and `algorithm`.
          bytes: Bytes that each step sends.
          steps: Number of steps measured since the last call.
          exposed_ms: Mean time per step, in milliseconds, from the last gradient to the last sum.

          On GPUs and with `CommunicationSettings.deterministic`, steps are not timed: `steps` is 0
          and `exposed_ms` is None. On GPUs a clock inside the step would make the host wait for
          the device.
        """
        return {}

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends communication. After it, use nothing of this object except its attributes."""


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one dtype to a vector, each padded with zeros to whole rows.

    A row has `comm.packing.ROW_SIZE` elements.
    """
    import tensorflow as tf

    pieces = []
    for tensor in tensors:
        count = tensor.shape.num_elements()
        pieces.append(tf.reshape(tensor, [-1]))
        padding = round_up_to_rows(count) - count
        if padding:
            pieces.append(tf.zeros([padding], tensor.dtype))
    return tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def pack_for_allreduce(grads: Sequence[tf.Tensor], ranks: int, wire_dtype: str) -> tf.Tensor:
    """Divides gradients by the number of ranks, casts them to the wire dtype and packs them.

    On a GPU all of it is one XLA program, which needs few kernels. A CPU casts each gradient before
    packing, because it then copies fewer bytes.

    Args:
      grads: Floating-point tensors of static shape.
      ranks: Number of ranks, by which the gradients are divided in FP32.
      wire_dtype: Name of the dtype in which the vector is sent.

    Returns:
      A vector of dtype `wire_dtype`; see `pack`.
    """
    import tensorflow as tf

    from hybrid_imagenet import xla

    def scale_and_pack(*gradients: tf.Tensor) -> tf.Tensor:
        vector = pack([tf.cast(gradient, tf.float32) for gradient in gradients])
        if ranks > 1:
            vector = vector / float(ranks)
        return tf.cast(vector, wire_dtype)

    if xla.has_gpu():
        return xla.compile_on_gpu(scale_and_pack)(*grads)
    return pack([scale_and_pack(grad) for grad in grads])


def check_gradients(grads: Sequence[tf.Tensor], names: Sequence[str]) -> None:
    """Raises the errors of `Communicator.reduce_gradients` for gradients it cannot reduce."""
    import tensorflow as tf

    if len(grads) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"{len(grads)} gradients were passed with {len(names)} names, of which"
            f" {len(set(names))} are unique. Pass one unique name per gradient."
        )
    for name, grad in zip(names, grads, strict=True):
        if grad is None:
            raise ValueError(
                f"No gradient reaches {name}. Pass only variables that the loss depends on."
            )
        if isinstance(grad, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of {name} is sparse (tf.IndexedSlices). Convert it with"
                " tf.convert_to_tensor."
            )
        if not grad.dtype.is_floating:
            raise TypeError(
                f"The gradient of {name} has the dtype {grad.dtype.name}. Cast it to a"
                " floating-point dtype."
            )
        if not grad.shape.is_fully_defined():
            raise ValueError(
                f"The gradient of {name} has the shape {grad.shape}, which is not static. Set its"
                " shape with tf.ensure_shape."
            )
