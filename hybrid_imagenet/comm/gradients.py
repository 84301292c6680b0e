"""The reduction of a step's gradients: order, buckets, types on the wire, and the mean."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Sequence

import horovod.tensorflow as hvd
import tensorflow as tf

from hybrid_imagenet.comm import fusion
from hybrid_imagenet.comm.communicator import check_gradients
from hybrid_imagenet.comm.order import appearance
from hybrid_imagenet.comm.settings import Settings

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one list of gradients is reduced; the same on all ranks."""

    buckets: tuple[fusion.Bucket, ...]


class GradientReducer:
    """Reduces lists of gradients over all ranks of a communicator."""

    def __init__(self, communicator: Communicator, settings: Settings) -> None:
        """Nothing is exchanged before the first `reduce`."""
        self._communicator = communicator
        self._settings = settings
        self._plans: dict[str, Plan] = {}

    def reduce(self, grads: Sequence[tf.Tensor], names: Sequence[str]) -> list[tf.Tensor]:
        """See `Communicator.reduce_gradients`. The first call for a list of names must be made on all ranks."""
        check_gradients(grads, names)
        plan = self._plan(grads, names)
        reduced: dict[int, tf.Tensor] = {}
        for number, bucket in enumerate(plan.buckets):
            sent = [self._to_wire(grads[m], bucket.wire) for m in bucket.members]
            received = self._sum(sent, f"gradients_{number}")
            for member, tensor in zip(bucket.members, received, strict=True):
                reduced[member] = tf.cast(tensor, tf.float32)
        return [reduced[position] for position in range(len(grads))]

    def _to_wire(self, grad: tf.Tensor, wire: str) -> tf.Tensor:
        return tf.cast(tf.cast(grad, tf.float32) / float(self._communicator.size), wire)

    def _sum(self, tensors: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        return hvd.grouped_allreduce(tensors, op=hvd.Sum, name=name, ignore_name_scope=True)

    def _plan(self, grads: Sequence[tf.Tensor], names: Sequence[str]) -> Plan:
        """The plan for these gradients, made once, from rank 0's order: a retrace must not wait for other ranks."""
        table = [[name, list(grad.shape)] for name, grad in zip(names, grads, strict=True)]
        key = hashlib.sha256(json.dumps(table).encode()).hexdigest()
        if key not in self._plans:
            with tf.init_scope():
                self._check_alike(key)
                order = self._communicator.broadcast_object(appearance(grads))
            elements = [grad.shape.num_elements() for grad in grads]
            wires = [self._settings.wire(name) for name in names]
            self._plans[key] = Plan(tuple(fusion.pack(order, elements, wires, self._settings.fusion_bytes)))
        return self._plans[key]

    def _check_alike(self, key: str) -> None:
        differs = self._communicator.broadcast_object(key) != key
        self._communicator.agree("its gradients differ in name, number or shape from rank 0's" if differs else None)
