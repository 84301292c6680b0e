"""Finds the order in which backpropagation produces gradients."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def appearance(grads: Sequence[tf.Tensor]) -> list[int]:
    """Returns the positions of the gradients in the order in which the graph can produce them.

    A gradient's time is the length of the longest chain of operations before it in its graph: late layers have
    shorter chains than early ones. Equal lengths, and gradients outside of a graph, come last variable first.
    """
    backward = range(len(grads) - 1, -1, -1)
    if any(tf.is_symbolic_tensor(grad) for grad in grads):
        depths = _depths([grad.op for grad in grads if tf.is_symbolic_tensor(grad)])
        return sorted(backward, key=lambda i: depths[grads[i].op.name] if tf.is_symbolic_tensor(grads[i]) else 0)
    return list(backward)


def _depths(ops: Sequence[tf.Operation]) -> dict[str, int]:
    """Returns, for each operation of the graph by name, the length of the longest path of data or control to it."""
    depths: dict[str, int] = {}
    for op in ops[0].graph.get_operations():  # in order of creation: inputs come first
        before = [tensor.op.name for tensor in op.inputs] + [control.name for control in op.control_inputs]
        depths[op.name] = 1 + max((depths.get(name, 0) for name in before), default=0)
    return depths
