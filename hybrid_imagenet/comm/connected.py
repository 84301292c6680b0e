"""Implements the communicator of several connected ranks with an engine's collectives."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.cluster.hosts import unique_host_names
from hybrid_imagenet.comm.algorithms import AlgorithmSelector, RankContext
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.communicator import Communicator, GradientExchange
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.errors import UserError

_log = logging.getLogger(__name__)

# A broadcast of variables copies them to host memory. Sending them in batches of about this size
# bounds the memory of these copies.
_BROADCAST_BATCH_BYTES = 64 << 20


class ConnectedRanks(Communicator):
    """Runs collectives over several ranks; the class of an engine connects them when created.

    Attributes:
      reusable_names: Whether all calls of one kind use the same name. Horovod caches what the ranks
        negotiate for a name, so a name that it knows is faster than a new one.
      collectives: The engine's collectives on the devices that hold the gradients.
    """

    reusable_names: ClassVar[bool] = False
    collectives: Collectives
    # The engine's collectives on tensors in host memory.
    _host_collectives: Collectives
    # The engine's group for `allreduce_neighbors`; None if each rank is alone in its group.
    _neighbor_group: Any = None
    # Number of collectives that `_collective_name` has named.
    _named_calls = 0

    def make_selector(
        self, settings: CommunicationSettings, *, native_algorithm: bool = False
    ) -> AlgorithmSelector:
        """Returns the selector of all-reduce algorithms for these settings."""
        context = RankContext(self.rank, self.hosts, self.collectives)
        return AlgorithmSelector(context, settings, native_algorithm=native_algorithm)

    def _set_topology(self, placement: Placement, host_keys: Sequence[Sequence[str]]) -> None:
        """Sets the attributes of `Communicator`: this rank and the hosts of all ranks.

        Args:
          placement: Rank and size of this process.
          host_keys: `hosts.host_key` of every rank, which differs between hosts even if they share
            a name.
        """
        self.rank = placement.rank
        self.size = placement.size
        self.hosts = unique_host_names(host_keys)
        own_host = self.hosts[self.rank]
        local_ranks = [rank for rank, host in enumerate(self.hosts) if host == own_host]
        self.local_rank = local_ranks.index(self.rank)
        self.local_size = len(local_ranks)

    def _create_neighbor_group(self, group_size: int, rank: int, size: int) -> Any:
        """Creates the groups of `allreduce_neighbors` and returns the group of this rank.

        Every rank must call it, because all ranks create all groups in the same order.

        Args:
          group_size: Number of ranks per group; a divisor of `size`.
          rank: This rank.
          size: Number of ranks.

        Returns:
          The engine's group; None if groups have one rank.

        Raises:
          UserError: If the ranks cannot be divided into groups of this size.
        """
        if size % group_size:
            raise UserError(
                f"{size} ranks cannot be divided into groups of {group_size}. Use a group size that"
                f" divides {size}."
            )
        if group_size == 1:
            return None
        groups = []
        for first in range(0, size, group_size):
            groups.append(self.collectives.create_group(range(first, first + group_size)))
        return groups[rank // group_size]

    def _set_gradient_exchange(
        self, settings: CommunicationSettings, selector: AlgorithmSelector, nccl: bool
    ) -> None:
        """Sets how gradients are exchanged, and warns about configurations that would be slow.

        Args:
          settings: Settings of the reduction.
          selector: Selects the all-reduce algorithm of each bucket.
          nccl: Whether gradients are sent by NCCL.
        """
        self.gradient_exchange = GradientExchange(settings, selector, nccl, self.check_wire_dtype)
        if not nccl:
            return
        # One rank per host reports a problem of its host.
        if len(set(self.hosts)) > 1 and self.local_rank == 0:
            problem = gpus.rdma_problem()
            if problem:
                _log.warning("host %s: NCCL will use TCP: %s", self.hosts[self.rank], problem)

    def check_wire_dtype(self, wire_dtype: str) -> None:
        """Warns if sending gradients in this dtype is slow; see `GradientExchange`."""
        exchange = self.gradient_exchange
        if wire_dtype == "bfloat16" and exchange is not None and exchange.nccl and self.rank == 0:
            _log.warning(
                "--compression=bf16 is slow on GPUs, because it needs an all-to-all exchange, for"
                " which each bucket waits for the host. Use --compression=fp16, which needs one"
                " all-reduce of NCCL."
            )

    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.collectives.allreduce(tf.convert_to_tensor(tensor), name, use_name_scope=True)

    def allreduce_max(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.collectives.allreduce_max(tf.convert_to_tensor(tensor), name)

    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        with tf.device("CPU:0"):
            return self._host_collectives.allreduce(
                tf.convert_to_tensor(tensor), name, use_name_scope=True
            )

    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        tensor = tf.convert_to_tensor(tensor)
        if self._neighbor_group is None:
            return tensor
        return self.collectives.allreduce(tensor, name, self._neighbor_group, use_name_scope=True)

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Overwrites the variables of all ranks with the values of rank 0.

        Variables are sent as bytes, so any dtype can be sent, and several small variables share a
        message. First the ranks compare their lists of variables, because a broadcast of different
        lengths would hang or mix up values.
        """
        table = [[variable.shape.as_list(), variable.dtype.name] for variable in variables]
        digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()
        error = None
        if digest != self.broadcast_object(digest):
            error = (
                f"The {len(table)} variables to broadcast differ from those of rank 0 in number,"
                " shape or dtype. Build the same model on every rank."
            )
        self.raise_first_error(error)
        batch: list[tf.Variable] = []
        batch_bytes = 0
        for variable in variables:
            batch.append(variable)
            batch_bytes += _num_bytes(variable)
            if batch_bytes >= _BROADCAST_BATCH_BYTES:
                self._broadcast_batch(batch, batch_bytes)
                batch = []
                batch_bytes = 0
        if batch:
            self._broadcast_batch(batch, batch_bytes)

    def _broadcast_batch(self, variables: Sequence[tf.Variable], total_bytes: int) -> None:
        """Broadcasts variables in one message, which has `total_bytes` bytes."""
        with tf.device("CPU:0"):
            if self.rank == 0:
                data = np.concatenate(
                    [np.frombuffer(variable.numpy().tobytes(), np.uint8) for variable in variables]
                )
            else:
                data = np.zeros(total_bytes, np.uint8)
            received = self._broadcast(data)
        if self.rank == 0:
            return
        start = 0
        for variable in variables:
            end = start + _num_bytes(variable)
            values = received[start:end].view(variable.dtype.as_numpy_dtype)
            variable.assign(values.reshape(variable.shape))
            start = end

    def broadcast_object(self, obj: Any) -> Any:
        """Sends the length of the object's JSON text, then the text."""
        text = json.dumps(obj).encode() if self.rank == 0 else b""
        length = int(self._broadcast(np.array([len(text)], np.int64))[0])
        data = np.frombuffer(text.ljust(length, b" "), np.uint8)
        return json.loads(self._broadcast(data).tobytes())

    def allgather_object(self, obj: Any) -> list[Any]:
        """Gathers the lengths of the JSON texts, then the texts, padded to the longest."""
        text = json.dumps(obj).encode()
        lengths = self._allgather(np.array([len(text)], np.int64), "lengths")
        max_length = int(lengths.max())
        padded_text = np.frombuffer(text.ljust(max_length, b" "), np.uint8)
        texts = self._allgather(_as_int32(padded_text), "texts")
        rows = texts.reshape(self.size, -1)
        return [
            json.loads(row.tobytes()[:length]) for row, length in zip(rows, lengths, strict=True)
        ]

    def _allgather(self, values: np.ndarray, kind: str) -> np.ndarray:
        """Gathers arrays [n] of all ranks as [size * n], in the order of ranks."""
        with tf.device("CPU:0"):
            gathered = self._host_collectives.allgather(
                tf.constant(values), self._collective_name(kind)
            )
            return gathered.numpy()

    def _broadcast(self, data: np.ndarray) -> np.ndarray:
        """Returns rank 0's array [n]; all ranks pass one of the same length and dtype."""
        if not data.nbytes:
            return data
        with tf.device("CPU:0"):
            received = self._host_collectives.broadcast(
                tf.constant(_as_int32(data)), 0, self._collective_name("broadcast")
            )
            received_bytes = received.numpy().view(np.uint8)[: data.nbytes]
            return received_bytes.view(data.dtype)

    def _collective_name(self, kind: str) -> str:
        """Names a collective outside of a graph.

        All ranks run these collectives in the same order, so a counter gives the same name to the
        same collective on every rank.
        """
        if self.reusable_names:
            return kind
        self._named_calls += 1
        return f"{kind}_{self._named_calls}"


def _as_int32(data: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array [n] as int32, padded with zeros, which every engine sends."""
    data_bytes = data.view(np.uint8)
    padding = -len(data_bytes) % 4
    if padding:
        data_bytes = np.concatenate([data_bytes, np.zeros(padding, np.uint8)])
    return data_bytes.view(np.int32)


def _num_bytes(variable: tf.Variable) -> int:
    return math.prod(variable.shape) * variable.dtype.size
