"""Averages the gradients of a step over all ranks, in buckets that overlap with backpropagation."""

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
from hybrid_imagenet.comm.algorithms import AlgorithmSelector, AllReduceAlgorithm
from hybrid_imagenet.comm.communicator import check_gradients, pack_for_allreduce
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.errors import pluralize

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator

_log = logging.getLogger(__name__)


class GradientReducer:
    """Averages lists of gradients over all ranks of a communicator."""

    def __init__(
        self,
        communicator: Communicator,
        settings: CommunicationSettings,
        selector: AlgorithmSelector,
        nccl: bool = False,
    ) -> None:
        """Keeps the settings; nothing is sent before the first `reduce`.

        Args:
          communicator: Connects the ranks over which gradients are averaged.
          settings: Wire dtype and bucket sizes, the same on all ranks.
          selector: Selects the all-reduce algorithm of each bucket.
          nccl: Whether gradients are sent by NCCL, that is, from GPU to GPU.
        """
        self._communicator = communicator
        self._settings = settings
        self._selector = selector
        self._nccl = nccl
        self._plans: dict[str, BucketPlan] = {}
        # Two elements: exposed seconds, and number of steps since the last call of `statistics`.
        with tf.device("CPU:0"):
            self._exposed_time = tf.Variable(tf.zeros([2], tf.float64), trainable=False)

    def reduce(
        self, grads: Sequence[tf.Tensor], names: Sequence[str]
    ) -> tuple[list[tf.Tensor], list[tuple[int, ...]]]:
        """Averages gradients over all ranks; see `Communicator.reduce_gradients`.

        All ranks must make the first call with a list of names and shapes, because they then agree
        on its buckets.
        """
        check_gradients(grads, names)
        plan = self._plan_for(grads, names)
        sums = []
        for index, bucket in enumerate(plan.buckets):
            vector = pack_for_allreduce(
                [grads[position] for position in bucket.members],
                self._communicator.size,
                bucket.wire_dtype,
            )
            algorithm = plan.algorithms[index]
            sums.append(algorithm.allreduce(vector, f"{plan.name_prefix}_{index}"))
        if not (self._settings.deterministic or self._nccl):
            self._measure_exposed_time(grads, sums)
        return sums, [bucket.members for bucket in plan.buckets]

    def statistics(self) -> dict[str, Any]:
        """Returns the cost of the reduction; see `Communicator.statistics`."""
        seconds, steps = self._exposed_time.numpy()
        self._exposed_time.assign(tf.zeros_like(self._exposed_time))
        buckets = []
        for plan in self._plans.values():
            for bucket, algorithm in zip(plan.buckets, plan.algorithms, strict=True):
                buckets.append(
                    {
                        "bytes": bucket.bytes,
                        "tensors": len(bucket.members),
                        "wire": bucket.wire_dtype,
                        "algorithm": algorithm.name,
                    }
                )
        return {
            "buckets": buckets,
            "bytes": sum(bucket["bytes"] for bucket in buckets),
            "steps": int(steps),
            "exposed_ms": 1000 * float(seconds / steps) if steps else None,
        }

    def _measure_exposed_time(self, grads: Sequence[tf.Tensor], sums: Sequence[tf.Tensor]) -> None:
        """Adds the time from the last gradient to the last sum.

        In this time nothing hides the communication. Only gradients in host memory are timed. On a
        GPU, each edge to the clock would be an empty copy that waits for the device, and the next
        step would start on an idle device. A profile shows the time there
        (docs/communication.md).
        """
        with tf.device("CPU:0"):
            with tf.control_dependencies(grads):
                start = tf.timestamp()
            with tf.control_dependencies([*sums, start]):
                end = tf.timestamp()
            self._exposed_time.assign_add([end - start, 1.0])

    def _plan_for(self, grads: Sequence[tf.Tensor], names: Sequence[str]) -> BucketPlan:
        """Returns the plan for these gradients, made at the first call from rank 0's order.

        Plans are kept, because the ranks exchange messages to make one. If a rank traces its step
        again, it must not wait for ranks that do not.

        Raises:
          SharedError: On all ranks, if the gradients of a rank differ from those of rank 0.
        """
        table = [[name, list(grad.shape)] for name, grad in zip(names, grads, strict=True)]
        key = hashlib.sha256(json.dumps(table).encode()).hexdigest()
        if key not in self._plans:
            with tf.init_scope():
                error = None
                if self._communicator.broadcast_object(key) != key:
                    error = (
                        "The gradients differ from those of rank 0 in name, number or shape. Build"
                        " the same model on every rank."
                    )
                self._communicator.raise_first_error(error)
                order = self._communicator.broadcast_object(backward_order(grads))
                elements = [grad.shape.num_elements() for grad in grads]
                self._plans[key] = self._make_plan(order, elements)
        return self._plans[key]

    def _make_plan(self, order: Sequence[int], elements: Sequence[int]) -> BucketPlan:
        """Groups gradients into buckets and selects an algorithm for each bucket.

        Args:
          order: Positions of the gradients in `backward_order`.
          elements: Number of elements of each gradient, by position.
        """
        buckets = fusion.make_buckets(
            order,
            elements,
            self._settings.wire_dtype,
            self._settings.fusion_bytes,
            self._settings.last_bucket_bytes(self._nccl),
        )
        algorithms = tuple(self._selector.algorithm_for(bucket) for bucket in buckets)
        if self._communicator.rank == 0:
            _log.debug(
                "gradients: %d in %s, %.3g MiB per step, by %s",
                len(elements),
                pluralize(len(buckets), "bucket"),
                sum(bucket.bytes for bucket in buckets) / 2**20,
                ", ".join(sorted({algorithm.name for algorithm in algorithms})),
            )
        # The sums of two lists of gradients may run at the same time, so each list has its own
        # names.
        name_prefix = f"gradients_{len(self._plans)}_of" if self._plans else "gradients"
        return BucketPlan(tuple(buckets), algorithms, name_prefix)


@dataclasses.dataclass(frozen=True)
class BucketPlan:
    """The buckets of one list of gradients, the same on all ranks.

    Attributes:
      buckets: Buckets in the order in which backpropagation completes them.
      algorithms: All-reduce algorithm of each bucket.
      name_prefix: Prefix of the names of the all-reduces.
    """

    buckets: tuple[fusion.Bucket, ...]
    algorithms: tuple[AllReduceAlgorithm, ...]
    name_prefix: str = "gradients"


def backward_order(grads: Sequence[tf.Tensor]) -> list[int]:
    """Returns the positions of gradients in the order in which the graph can compute them.

    The time of a gradient is estimated by its depth: the number of operations on the longest path
    to it. The gradients of the last layers have shorter paths than those of the first layers.
    Gradients of equal depth, and gradients outside of a graph, are in the reverse order of the
    variables.
    """
    reverse_order = range(len(grads) - 1, -1, -1)
    symbolic_ops = [grad.op for grad in grads if tf.is_symbolic_tensor(grad)]
    if not symbolic_ops:
        return list(reverse_order)
    depths = _graph_depths(symbolic_ops[0].graph)

    def depth(position: int) -> int:
        grad = grads[position]
        return depths[grad.op.name] if tf.is_symbolic_tensor(grad) else 0

    return sorted(reverse_order, key=depth)


def _graph_depths(graph: tf.Graph) -> dict[str, int]:
    """Returns the depth of each operation by name.

    The depth is the number of operations on the longest path of data or control edges to the
    operation, itself included.
    """
    depths: dict[str, int] = {}
    # Operations are listed in the order of their creation, so the inputs of an operation come
    # before it.
    for op in graph.get_operations():
        predecessors = [tensor.op.name for tensor in op.inputs]
        predecessors += [control_input.name for control_input in op.control_inputs]
        depths[op.name] = 1 + max((depths.get(name, 0) for name in predecessors), default=0)
    return depths
