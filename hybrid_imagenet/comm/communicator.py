"""Defines the collective operations between ranks, which also work alone at size 1."""

from __future__ import annotations

import abc
import contextlib
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from hybrid_imagenet.comm.packing import padded
from hybrid_imagenet.errors import EXIT_USAGE, SharedError, UserError

if typing.TYPE_CHECKING:
    import tensorflow as tf


class Communicator(abc.ABC):
    """Runs collective operations over all ranks. Every rank calls the same ones in the same order.

    Attributes:
      rank: number of this process, from 0.
      size: number of processes.
      local_rank: number of this process among the ranks of its host.
      local_size: number of processes on this host.
      hosts: the name of every rank's host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    hosts: tuple[str, ...]

    @abc.abstractmethod
    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum of a tensor over ranks, with its shape and type. Works in and outside of
        a graph.

        Args:
          tensor: float16, float32, float64, int32 or int64 of any shape, which is the same on all
          ranks.
          name: pairs the operation with the same one of the other ranks; unique among operations
            that run at one time.
        """

    @abc.abstractmethod
    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the same sum of a tensor in the host's memory, where it stays: no GPU takes part
        or is waited for.
        """

    @abc.abstractmethod
    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Returns the sum over the `Settings.neighbors` ranks of this one's group; for the rest as
        `allreduce_sum`.
        """

    @abc.abstractmethod
    def reduce_gradients(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Returns the mean of each gradient over ranks, in the vectors that travel: a GPU has few
        kernels to start.

        Each gradient is divided by the number of ranks in FP32 before the sum, so that a sum in
        FP16 cannot overflow where the mean does not; then it is cast to the wire's type and summed.

        Args:
          grads: one floating-point tensor per variable, of static shape, in the order of the
          variables.
          names: the variables' names, unique, for logs and for choosing tensors that stay in FP32
            on the wire.

        Returns:
          One vector for each bucket, in the wire's type, each gradient filled up with zeros to a
          multiple of `comm.packing.ROW`; and the positions of each bucket's gradients, in their
          order. Gradients without elements are in no bucket.

        Raises:
          TypeError: for sparse gradients (tf.IndexedSlices) or gradients that are not
          floating-point.
          ValueError: if the numbers of gradients and names differ, a gradient is None or its shape
            is not static.
        """

    @abc.abstractmethod
    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Overwrites the variables of all ranks with the values of rank 0. For use outside of
        graphs.

        Args:
          variables: tf.Variable objects (of a Keras variable, its `value`), of any type but string,
            in the same order with the same shapes and types on all ranks.

        Raises:
          UserError: if the ranks' variables do not match.
        """

    @abc.abstractmethod
    def broadcast_object(self, obj: Any) -> Any:
        """Returns what rank 0 passed, on all ranks, carried as JSON: tuples come out as lists, keys
        as strings.
        """

    @abc.abstractmethod
    def allgather_object(self, obj: Any) -> list[Any]:
        """Returns what each rank passed, in the order of ranks, carried as JSON."""

    def agree(self, error: UserError | str | None) -> None:
        """Ends all ranks together when one of them has met an error. Every rank calls it.

        Args:
          error: this rank's, or its message; None if all is well.

        Raises:
          SharedError: on all ranks, with the first message by rank and its exit code; after its
            rank and host if that is not rank 0.
        """
        code = error.exit_code if isinstance(error, UserError) else EXIT_USAGE
        for rank, found in enumerate(
            self.allgather_object(None if error is None else [str(error), code])
        ):
            if found is not None:
                where = f"rank {rank} on {self.hosts[rank]}: " if rank else ""
                raise SharedError(where + found[0], found[1])

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Ends all ranks with one message and exit code if a rank raises UserError inside; every
        rank calls it.
        """
        found = None
        try:
            yield
        except UserError as error:
            found = error
        self.agree(found)

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.allgather_object(None)

    def statistics(self) -> dict[str, Any]:
        """Returns the costs of the reduction of gradients.

        Returns:
          Nothing at size 1, else `buckets` (list of bytes, number of tensors, type on the wire and
          algorithm each),
          `bytes` per step, and since the last call `steps` and `exposed_ms`: the mean time per step
          from the last gradient to the last sum. Steps are not timed on GPUs, where a clock in the
          step would make the host wait
          for the device, nor with `Settings.deterministic`: `steps` is 0 then and `exposed_ms`
            None.
        """
        return {}

    @abc.abstractmethod
    def shutdown(self) -> None:
        """Ends communication; nothing but the attributes may be used afterwards."""


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Packs tensors of one type side by side into one vector, each filled up with zeros to whole
    rows.
    """
    import tensorflow as tf

    pieces = []
    for tensor in tensors:
        count = tensor.shape.num_elements()
        pieces.append(tf.reshape(tensor, [-1]))
        if padded(count) > count:
            pieces.append(tf.zeros([padded(count) - count], tensor.dtype))
    return tf.concat(pieces, 0) if len(pieces) > 1 else pieces[0]


def travelling(grads: Sequence[tf.Tensor], ranks: int, wire: str) -> tf.Tensor:
    """Packs gradients, each divided by `ranks` in FP32 and cast: a GPU in one program, a processor
    after the cast.
    """
    import tensorflow as tf

    from hybrid_imagenet import xla

    def packed(*values: tf.Tensor) -> tf.Tensor:
        vector = pack([tf.cast(value, tf.float32) for value in values])
        return tf.cast(vector / float(ranks) if ranks > 1 else vector, wire)

    return (
        xla.compile_on_gpu(packed)(*grads)
        if xla.has_gpu()
        else pack([packed(grad) for grad in grads])
    )


def check_gradients(grads: Sequence[tf.Tensor], names: Sequence[str]) -> None:
    """Raises what `Communicator.reduce_gradients` lists for gradients it cannot reduce."""
    import tensorflow as tf

    if len(grads) != len(names) or len(set(names)) != len(names):
        raise ValueError(
            f"{len(grads)} gradients need as many unique names, not {len(names)} ({len(set(names))}"
            " unique)"
        )
    for name, grad in zip(names, grads, strict=True):
        if grad is None:
            raise ValueError(f"no gradient reaches {name}")
        if isinstance(grad, tf.IndexedSlices):
            raise TypeError(
                f"the gradient of {name} is sparse (tf.IndexedSlices): convert it with"
                " tf.convert_to_tensor"
            )
        if not grad.dtype.is_floating:
            raise TypeError(f"the gradient of {name} is {grad.dtype.name}, not floating-point")
        if not grad.shape.is_fully_defined():
            raise ValueError(
                f"the gradient of {name} has the shape {grad.shape}, which is not static"
            )
