"""Implements the communicator of connected ranks by an engine's collective operations."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm import gpus
from hybrid_imagenet.comm.algorithms import Ranks, Selector
from hybrid_imagenet.comm.collectives import Collectives
from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.comm.gradients import GradientReducer
from hybrid_imagenet.comm.hosts import names
from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.errors import UserError

_log = logging.getLogger(__name__)

_PACK_BYTES = (
    64 << 20
)  # a broadcast of variables holds no more than this in addition to the variables


class ConnectedRanks(Communicator):
    """Runs collectives over several ranks. An engine's class connects them in its constructor."""

    names_last: ClassVar[bool] = False
    """Whether the engine may be given one name again and again; then it remembers what the ranks
    have agreed on.
    """
    collectives: Collectives
    _host: Collectives  # the operations on the host's memory
    _reducer: GradientReducer
    _neighbors: Any = None  # this rank's group, None for one alone
    _calls = 0

    def selector(self, settings: Settings, *, engine_does_it: bool = False) -> Selector:
        """Returns what sums buckets as the settings ask; see `Selector`."""
        return Selector(
            Ranks(self.rank, self.hosts, self.collectives), settings, engine_does_it=engine_does_it
        )

    def _take_places(self, place: Placement, keys: Sequence[Sequence[str]]) -> None:
        """Notes the place of this rank, and tells hosts apart by every rank's `hosts.key`."""
        self.rank, self.size = place.rank, place.size
        self.hosts = names(keys)
        here = [r for r, name in enumerate(self.hosts) if name == self.hosts[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)

    def _group_of_neighbors(self, count: int, rank: int, size: int) -> Any:
        """Asks for every group of `count` ranks; returns this rank's, None for one alone."""
        if size % count:
            raise UserError(f"{size} ranks do not make whole groups of {count}")
        if count == 1:
            return None
        groups = [
            self.collectives.group(range(first, first + count)) for first in range(0, size, count)
        ]
        return groups[rank // count]

    def _reduce_by(self, settings: Settings, selector: Selector, nccl: bool) -> None:
        """Sets how gradients are reduced; says what would otherwise only show as a slow run."""
        self._reducer = GradientReducer(self, settings, selector, nccl)
        if not nccl:
            return
        if self.rank == 0 and settings.compression == "bf16":
            _log.warning(
                "--compression=bf16 on GPUs is carried by an all-to-all exchange, for which each"
                " bucket waits for the host: --compression=fp16 is one all-reduce of NCCL"
            )
        reason = gpus.without_verbs() if len(set(self.hosts)) > 1 and self.local_rank == 0 else None
        if reason:
            _log.warning("host %s: NCCL will use TCP: %s", self.hosts[self.rank], reason)

    def allreduce_sum(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        return self.collectives.allreduce(tf.convert_to_tensor(tensor), name, scoped=True)

    def allreduce_on_host(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums by one all-reduce of the engine between the hosts."""
        with tf.device("CPU:0"):
            return self._host.allreduce(tf.convert_to_tensor(tensor), name, scoped=True)

    def allreduce_neighbors(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """Sums by one all-reduce among the ranks of the group, beside those of the other groups."""
        tensor = tf.convert_to_tensor(tensor)
        if self._neighbors is None:
            return tensor
        return self.collectives.allreduce(tensor, name, self._neighbors, scoped=True)

    def reduce_gradients(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Runs one reduction per bucket, of one vector, started as soon as the bucket's gradients
        exist.
        """
        return self._reducer.reduce(grads, names)

    def statistics(self) -> dict[str, Any]:
        """Returns the buckets, and the time for which steps waited for them since the last call."""
        return self._reducer.statistics()

    def broadcast_variables(self, variables: Sequence[tf.Variable]) -> None:
        """Sends the variables' bytes, packed, so that the type does not matter and small ones share
        a message.
        """
        table = [[v.shape.as_list(), v.dtype.name] for v in variables]
        digest = hashlib.sha256(json.dumps(table).encode()).hexdigest()
        differs = digest != self.broadcast_object(digest)
        self.agree(
            f"the {len(table)} variables to broadcast differ in number, shape or type from rank"
            " 0's: build the same model on every rank"
            if differs
            else None
        )
        pack: list[tf.Variable] = []
        size = 0
        for variable in variables:
            pack.append(variable)
            size += _bytes(variable)
            if size >= _PACK_BYTES:
                self._broadcast_pack(pack, size)
                pack, size = [], 0
        if pack:
            self._broadcast_pack(pack, size)

    def _broadcast_pack(self, pack: Sequence[tf.Variable], size: int) -> None:
        with tf.device("CPU:0"):
            if self.rank == 0:
                data = np.concatenate([np.frombuffer(v.numpy().tobytes(), np.uint8) for v in pack])
            else:
                data = np.zeros(size, np.uint8)
            received = self._broadcast(data)
        start = 0
        for variable in pack:
            end = start + _bytes(variable)
            if self.rank != 0:
                variable.assign(
                    received[start:end].view(variable.dtype.as_numpy_dtype).reshape(variable.shape)
                )
            start = end

    def broadcast_object(self, obj: Any) -> Any:
        """Sends the length, then the text."""
        text = json.dumps(obj).encode() if self.rank == 0 else b""
        length = int(self._broadcast(np.array([len(text)], np.int64))[0])
        data = np.frombuffer(text.ljust(length, b" "), np.uint8)
        return json.loads(self._broadcast(data).tobytes())

    def allgather_object(self, obj: Any) -> list[Any]:
        """Gathers the lengths of the texts, then the texts, filled up to the longest."""
        text = json.dumps(obj).encode()
        lengths = self._gather(np.array([len(text)], np.int64), "lengths")
        longest = int(lengths.max())
        texts = self._gather(_words(np.frombuffer(text.ljust(longest, b" "), np.uint8)), "texts")
        rows = texts.reshape(self.size, -1)
        return [json.loads(row.tobytes()[:n]) for row, n in zip(rows, lengths, strict=True)]

    def _gather(self, values: np.ndarray, kind: str) -> np.ndarray:
        with tf.device("CPU:0"):
            return self._host.allgather(tf.constant(values), self._name(kind)).numpy()

    def _broadcast(self, data: np.ndarray) -> np.ndarray:
        if not data.nbytes:
            return data
        with tf.device("CPU:0"):
            sent = self._host.broadcast(tf.constant(_words(data)), 0, self._name("broadcast"))
            return sent.numpy().view(np.uint8)[: data.nbytes].view(data.dtype)

    def _name(self, kind: str) -> str:
        """Names a collective outside of a graph: the ranks call these in one order, so they count
        alike.
        """
        if self.names_last:
            return kind
        self._calls += 1
        return f"{kind}_{self._calls}"


def _words(data: np.ndarray) -> np.ndarray:
    """Returns the bytes of an array as 32-bit integers, filled up with zeros: a type that every
    engine carries.
    """
    found = data.view(np.uint8)
    if missing := -len(found) % 4:
        found = np.concatenate([found, np.zeros(missing, np.uint8)])
    return found.view(np.int32)


def _bytes(variable: tf.Variable) -> int:
    return math.prod(variable.shape) * variable.dtype.size
