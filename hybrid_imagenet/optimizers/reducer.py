"""Averages the gradients of a step over all ranks, in buckets that overlap with backpropagation."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hybrid_imagenet import xla
from hybrid_imagenet.comm import fusion
from hybrid_imagenet.comm.algorithms import AllReduceAlgorithm
from hybrid_imagenet.comm.communicator import Communicator, GradientExchange
from hybrid_imagenet.comm.packing import round_up_to_rows
from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.optimizers.layout import Packed

_log = logging.getLogger(__name__)


class GradientReducer:
    """Averages the gradients of one optimizer over all ranks of a communicator.

    Attributes:
      wire_dtype: Name of the dtype in which gradients are sent, such as "float16".
      request_sum: Counts of the hosts that each `reduce` sums as well; None sums none.
    """

    def __init__(self, communicator: Communicator, wire_dtype: str = "float32") -> None:
        """Keeps the communicator; nothing is sent before the first `reduce`."""
        self._communicator = communicator
        self.wire_dtype = wire_dtype
        self.request_sum: RequestSum | None = None
        self._plans: dict[str, BucketPlan] = {}
        # Two elements: exposed seconds, and number of steps since the last call of `statistics`. A
        # single process needs none, and a variable that is made while a step is traced would make
        # TensorFlow trace it again.
        if communicator.gradient_exchange is not None:
            with tf.device("CPU:0"):
                self._exposed_time = tf.Variable(tf.zeros([2], tf.float64), trainable=False)

    def reduce(self, grads: Sequence[tf.Tensor], names: Sequence[str]) -> Packed:
        """Averages gradients over all ranks.

        Each gradient is divided by the number of ranks in FP32 before the sum, so that a sum in
        FP16 cannot overflow if the mean does not (Lu et al. §2.2.2). Then it is cast to the wire
        dtype and summed. Each bucket is one all-reduce of one vector, which starts as soon as the
        gradients of the bucket exist. The means stay packed as they were sent, because unpacking
        them would cost a GPU one kernel per variable. A single process only casts to FP32.

        All ranks must make the first call with a list of names and shapes, because they then agree
        on its buckets.

        Args:
          grads: One floating-point tensor per variable, with static shape, in the same order on
            all ranks.
          names: The variables' names, unique, in the same order. All ranks must pass the same
            names and shapes.

        Returns:
          One vector per bucket, in the wire dtype, in which each gradient is padded with zeros to a
          multiple of `comm.packing.ROW_SIZE`, and the positions of its gradients. Gradients without
          elements are in no bucket.

        Raises:
          TypeError: If a gradient is sparse (tf.IndexedSlices) or not floating-point.
          ValueError: If `grads` and `names` differ in length, names are not unique, a gradient is
            None, or its shape is not static.
          SharedError: On all ranks, if the gradients of a rank differ from those of rank 0.
        """
        check_gradients(grads, names)
        exchange = self._communicator.gradient_exchange
        if exchange is None:
            return _pack_without_ranks(grads)
        if self.request_sum is not None:
            self.request_sum.sum_over(self._communicator)
        plan = self._plan_for(grads, names, exchange)
        sums = []
        for index, bucket in enumerate(plan.buckets):
            vector = pack_for_allreduce(
                [grads[position] for position in bucket.members],
                self._communicator.size,
                bucket.wire_dtype,
            )
            algorithm = plan.algorithms[index]
            sums.append(algorithm.allreduce(vector, f"{plan.name_prefix}_{index}"))
        if not (exchange.settings.deterministic or exchange.nccl):
            self._measure_exposed_time(grads, sums)
        return Packed(sums, [bucket.members for bucket in plan.buckets])

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
        if self._communicator.gradient_exchange is None:
            return {}
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

    def _plan_for(
        self, grads: Sequence[tf.Tensor], names: Sequence[str], exchange: GradientExchange
    ) -> BucketPlan:
        """Returns the plan for these gradients, made at the first call from rank 0's order.

        Plans are kept, because the ranks exchange messages to make one. If a rank traces its step
        again, it must not wait for ranks that do not.

        Raises:
          SharedError: On all ranks, if the gradients of a rank differ from those of rank 0.
        """
        table = [[name, list(grad.shape)] for name, grad in zip(names, grads, strict=True)]
        key = hashlib.sha256(json.dumps([self.wire_dtype, table]).encode()).hexdigest()
        if key not in self._plans:
            with tf.init_scope():
                error = None
                if self._communicator.broadcast_object(key) != key:
                    error = (
                        "The gradients differ from those of rank 0 in name, number, shape or the"
                        " type in which they are sent. Build the same model and the same optimizer"
                        " on every rank."
                    )
                self._communicator.raise_first_error(error)
                order = self._communicator.broadcast_object(backward_order(grads))
                elements = [grad.shape.num_elements() for grad in grads]
                self._plans[key] = self._make_plan(order, elements, exchange)
        return self._plans[key]

    def _make_plan(
        self, order: Sequence[int], elements: Sequence[int], exchange: GradientExchange
    ) -> BucketPlan:
        """Groups gradients into buckets and selects an algorithm for each bucket.

        Args:
          order: Positions of the gradients in `backward_order`.
          elements: Number of elements of each gradient, by position.
          exchange: How the ranks exchange gradients.
        """
        exchange.check_wire_dtype(self.wire_dtype)
        settings = exchange.settings
        buckets = fusion.make_buckets(
            order,
            elements,
            self.wire_dtype,
            settings.fusion_bytes,
            settings.last_bucket_bytes(exchange.nccl),
        )
        algorithms = tuple(exchange.selector.algorithm_for(bucket) for bucket in buckets)
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
        list_number = self._communicator.num_gradient_lists
        self._communicator.num_gradient_lists += 1
        name_prefix = f"gradients_{list_number}_of" if list_number else "gradients"
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
    Gradients of equal depth, and gradients outside a graph, are in the reverse order of the
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


def _pack_without_ranks(grads: Sequence[tf.Tensor]) -> Packed:
    """Packs the gradients of a single process in FP32."""
    nonempty = tuple(i for i, grad in enumerate(grads) if grad.shape.num_elements())
    # A GPU needs the fewest kernels for one bucket. A CPU copies less if each gradient has its own
    # bucket.
    buckets: list[tuple[int, ...]] = [nonempty] if xla.has_gpu() else [(i,) for i in nonempty]
    vectors = [pack_for_allreduce([grads[i] for i in bucket], 1, "float32") for bucket in buckets]
    return Packed(vectors, buckets)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Concatenates tensors of one dtype to a vector, each padded with zeros to whole rows.

    A row has `comm.packing.ROW_SIZE` elements.
    """
    zeros: dict[int, tf.Tensor] = {}
    pieces = []
    for tensor in tensors:
        count = tensor.shape.num_elements()
        # Most gradients are vectors, and tracing an operation for each takes time.
        pieces.append(tensor if tensor.shape.rank == 1 else tf.reshape(tensor, [-1]))
        padding = round_up_to_rows(count) - count
        if padding:
            if padding not in zeros:
                zeros[padding] = tf.zeros([padding], tensor.dtype)
            pieces.append(zeros[padding])
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

    def scale(gradient: tf.Tensor) -> tf.Tensor:
        if ranks > 1:
            gradient = gradient / float(ranks)
        return tf.cast(gradient, wire_dtype)

    def pack_and_scale(*gradients: tf.Tensor) -> tf.Tensor:
        return scale(pack([tf.cast(gradient, tf.float32) for gradient in gradients]))

    if xla.has_gpu():
        return xla.compile_on_gpu(pack_and_scale)(*grads)
    return pack([scale(tf.cast(grad, tf.float32)) for grad in grads])


def check_gradients(grads: Sequence[tf.Tensor], names: Sequence[str]) -> None:
    """Raises the errors of `GradientReducer.reduce` for gradients that it cannot reduce."""
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
