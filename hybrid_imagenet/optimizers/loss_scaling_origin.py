"""Remembers whether a loss was scaled before its gradients reach an optimizer."""

from __future__ import annotations

import enum

import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.loss_scale import LossScale


class LossScaling(enum.Enum):
    """Whether the loss whose gradients `apply` gets next was scaled."""

    NOT_SCALED = "scale_loss was not called since the last apply"
    SCALED = "scale_loss was called since the last apply"
    SCALED_IN_GRAPH = "a graph calls scale_loss, and later executions of it are not seen here"


class LossScalingOrigin:
    """Checks that a loss was scaled before its gradients are applied.

    Gradients do not show whether their loss was scaled, so `scale_loss` and `apply` report their
    calls here. Each optimizer has its own object, because it has its own scale.

    Attributes:
      state: Whether the loss whose gradients `apply` gets next was scaled.
    """

    def __init__(self) -> None:
        """Starts without a scaled loss."""
        self.state = LossScaling.NOT_SCALED

    def scaled(self) -> None:
        """Records a call of `scale_loss`."""
        is_traced = tf.inside_function()
        self.state = LossScaling.SCALED_IN_GRAPH if is_traced else LossScaling.SCALED

    def check(self, loss_scale: LossScale) -> None:
        """Records a call of `apply`.

        Raises:
          UserError: If there is a loss scale, but `scale_loss` was not called.
        """
        if self.state is LossScaling.NOT_SCALED and not loss_scale.is_one:
            raise UserError(
                "optimizer.apply got gradients of a loss that was not scaled, but they are computed"
                " or sent in FP16, in which small ones become 0. Differentiate"
                " optimizer.scale_loss(loss), for each optimizer its own, or use"
                " DistributedOptimizer(loss_scale=1)."
            )
        # If only `scale_loss` is in a graph, each execution of the graph scales the loss, but only
        # its tracing has called `scaled`.
        is_only_scaling_in_graph = (
            self.state is LossScaling.SCALED_IN_GRAPH and not tf.inside_function()
        )
        if not is_only_scaling_in_graph:
            self.state = LossScaling.NOT_SCALED
