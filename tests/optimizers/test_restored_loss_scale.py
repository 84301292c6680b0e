"""Whether training continues with the loss scale of a checkpoint."""

import pytest

from hybrid_imagenet.optimizers import restored_loss_scale
from hybrid_imagenet.optimizers.loss_scale import LossScale


def restored(**configuration):
    """Returns a loss scale with the values of a checkpoint."""
    loss_scale = LossScale(**configuration)
    for variable, value in zip(loss_scale.variables, (64.0, 5, 7, 2), strict=True):
        variable.assign(value)
    return loss_scale


def values(loss_scale):
    return [float(variable.numpy()) for variable in loss_scale.variables]


@pytest.mark.parametrize(
    "configuration", [{"initial": 64.0}, {"initial": 2.0**15, "dynamic": True}]
)
def test_restored_loss_scale_of_the_same_configuration_continues(configuration):
    saved = restored_loss_scale.describe(LossScale(**configuration))
    loss_scale = restored(**configuration)
    assert not restored_loss_scale.restart_if_changed(loss_scale, saved)
    assert values(loss_scale) == [64, 5, 7, 2]


@pytest.mark.parametrize(
    ("saved", "configuration"),
    [
        ({"initial": 1.0}, {"initial": 2.0**15, "dynamic": True}),
        ({"initial": 2.0**15, "dynamic": True}, {"initial": 1.0}),
        ({"initial": 8.0}, {"initial": 1.0}),
        ({"initial": 1.0, "dynamic": True}, {"initial": 2.0**15, "dynamic": True}),
        ({"initial": 8.0}, {"initial": 8.0, "dynamic": True}),
    ],
)
def test_restored_loss_scale_of_another_configuration_starts_again(saved, configuration):
    loss_scale = restored(**configuration)
    description = restored_loss_scale.describe(LossScale(**saved))
    assert restored_loss_scale.restart_if_changed(loss_scale, description)
    # The total of skipped steps stays.
    assert values(loss_scale) == [configuration["initial"], 0, 7, 0]
