"""The guess whether gradients are those of a scaled loss."""

import pytest
import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.loss_scaling_origin import LossScaling, LossScalingOrigin

SCALE = LossScale(8.0)


def test_loss_scaling_origin_forgets_a_scaled_loss_after_its_gradients():
    origin = LossScalingOrigin()
    assert origin.state is LossScaling.NOT_SCALED
    origin.scaled()
    assert origin.state is LossScaling.SCALED
    origin.check(SCALE)
    assert origin.state is LossScaling.NOT_SCALED
    with pytest.raises(UserError, match="gradients of a loss that was not scaled"):
        origin.check(SCALE)


def test_loss_scaling_origin_without_a_scale_needs_no_scaled_loss():
    origin = LossScalingOrigin()
    origin.check(LossScale())
    assert origin.state is LossScaling.NOT_SCALED


def test_loss_scaling_origin_remembers_a_graph_that_only_scales_the_loss():
    """Later executions of the graph scale the loss, but no Python code of it runs again."""
    origin = LossScalingOrigin()
    tf.function(origin.scaled, autograph=False)()
    for _ in range(2):
        assert origin.state is LossScaling.SCALED_IN_GRAPH
        origin.check(SCALE)


def test_loss_scaling_origin_forgets_a_loss_that_the_graph_of_the_whole_step_scales():
    origin = LossScalingOrigin()

    @tf.function(autograph=False)
    def step():
        origin.scaled()
        origin.check(SCALE)

    step()
    assert origin.state is LossScaling.NOT_SCALED
