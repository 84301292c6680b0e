"""Reduces a step's gradients: order, buckets, types on the wire, and the mean."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import typing
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hybrid_imagenet.comm import fusion
from hybrid_imagenet.comm.algorithms import Algorithm, Selector
from hybrid_imagenet.comm.communicator import check_gradients, travelling
from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.errors import pluralize

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The reduction of one list of gradients, the same on all ranks.

    Attributes:
      buckets: by the time at which they are complete.
      algorithms: what sums each bucket.
      name: of its reductions; two lists of gradients may be under way at once.
    """

    buckets: tuple[fusion.Bucket, ...]
    algorithms: tuple[Algorithm, ...]
    name: str = "gradients"


class GradientReducer:
    """Reduces lists of gradients over all ranks of a communicator."""

    def __init__(
        self, communicator: Communicator, settings: Settings, selector: Selector, nccl: bool = False
    ) -> None:
        """Takes the settings; nothing is exchanged before the first `reduce`. `nccl` says if NCCL
        carries gradients.
        """
        self._communicator, self._settings, self._selector = communicator, settings, selector
        self._nccl = nccl
        self._plans: dict[str, Plan] = {}
        with tf.device("CPU:0"):
            self._exposed = tf.Variable(
                tf.zeros([2], tf.float64), trainable=False
            )  # seconds, steps

    def reduce(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """See `Communicator.reduce_gradients`. The first call for a list of names must be made on
        all ranks.
        """
        check_gradients(grads, names)
        plan = self._plan(grads, names)
        received = []
        for number, (bucket, algorithm) in enumerate(
            zip(plan.buckets, plan.algorithms, strict=True)
        ):
            sent = travelling(
                [grads[m] for m in bucket.members], self._communicator.size, bucket.wire
            )
            received.append(algorithm.sum(sent, f"{plan.name}_{number}"))
        if not (self._settings.deterministic or self._nccl):
            self._time(grads, received)
        return received, [bucket.members for bucket in plan.buckets]

    def _time(self, before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> None:
        """Adds the time from the last gradient to the last sum: communication that nothing hides.

        For gradients on the host only. On a GPU each edge to the clock would be an empty copy that
        waits for the device, and the next step would start on an idle one; there a profile tells
        (docs/communication.md).
        """
        with tf.device("CPU:0"):
            with tf.control_dependencies(before):
                start = tf.timestamp()
            with tf.control_dependencies([*after, start]):
                end = tf.timestamp()
            self._exposed.assign_add([end - start, 1.0])

    def statistics(self) -> dict[str, Any]:
        """Returns what travels per step and how long the step waits for it; see
        `Communicator.statistics`.
        """
        seconds, steps = self._exposed.numpy()
        self._exposed.assign(tf.zeros_like(self._exposed))
        buckets = [
            {
                "bytes": bucket.bytes,
                "tensors": len(bucket.members),
                "wire": bucket.wire,
                "algorithm": algorithm.name,
            }
            for plan in self._plans.values()
            for bucket, algorithm in zip(plan.buckets, plan.algorithms, strict=True)
        ]
        return {
            "buckets": buckets,
            "bytes": sum(bucket["bytes"] for bucket in buckets),
            "steps": int(steps),
            "exposed_ms": 1000 * float(seconds / steps) if steps else None,
        }

    def _plan(self, grads: Sequence[tf.Tensor], names: Sequence[str]) -> Plan:
        """Makes the plan for these gradients once, from rank 0's order: a retrace must not wait for
        other ranks.
        """
        table = [[name, list(grad.shape)] for name, grad in zip(names, grads, strict=True)]
        key = hashlib.sha256(json.dumps(table).encode()).hexdigest()
        if key not in self._plans:
            with tf.init_scope():
                differs = self._communicator.broadcast_object(key) != key
                reason = (
                    "its gradients differ in name, number or shape from rank 0's"
                    if differs
                    else None
                )
                self._communicator.agree(reason)
                order = self._communicator.broadcast_object(appearance(grads))
                self._plans[key] = self._make_plan(order, [g.shape.num_elements() for g in grads])
        return self._plans[key]

    def _make_plan(self, order: Sequence[int], elements: Sequence[int]) -> Plan:
        late = self._settings.late_bytes(self._nccl)
        buckets = fusion.pack(
            order, elements, self._settings.wire, self._settings.fusion_bytes, late
        )
        algorithms = tuple(map(self._selector.of, buckets))
        if self._communicator.rank == 0:
            used = ", ".join(sorted({algorithm.name for algorithm in algorithms}))
            total, packed = (
                sum(bucket.bytes for bucket in buckets) / 2**20,
                pluralize(len(buckets), "bucket"),
            )
            _log.debug(
                "gradients: %d in %s, %.3g MiB per step, by %s", len(elements), packed, total, used
            )
        name = f"gradients_{len(self._plans)}_of" if self._plans else "gradients"
        return Plan(tuple(buckets), algorithms, name)


def appearance(grads: Sequence[tf.Tensor]) -> list[int]:
    """Returns the positions of the gradients in the order in which the graph can produce them.

    A gradient's time is the length of the longest chain of operations before it in its graph: late
    layers have shorter chains than early ones. Equal lengths, and gradients outside of a graph,
    come last variable first.
    """
    backward = range(len(grads) - 1, -1, -1)
    if any(tf.is_symbolic_tensor(grad) for grad in grads):
        depths = _depths([grad.op for grad in grads if tf.is_symbolic_tensor(grad)])
        return sorted(
            backward,
            key=lambda i: depths[grads[i].op.name] if tf.is_symbolic_tensor(grads[i]) else 0,
        )
    return list(backward)


def _depths(ops: Sequence[tf.Operation]) -> dict[str, int]:
    """Returns, for each operation of the graph by name, the length of the longest path of data or
    control to it.
    """
    depths: dict[str, int] = {}
    for op in ops[0].graph.get_operations():  # in order of creation: inputs come first
        before = [tensor.op.name for tensor in op.inputs] + [
            control.name for control in op.control_inputs
        ]
        depths[op.name] = 1 + max((depths.get(name, 0) for name in before), default=0)
    return depths
