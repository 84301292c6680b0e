"""AlexNet with batch normalization: its size and its forward pass."""

import keras
import numpy as np

from hybrid_imagenet.models import factory
from tests.models.test_resnet import randomized
from tests.references import alexnet_reference


def test_alexnet_for_imagenet_has_62_380_232_parameters():
    # In this scope no weights are drawn, which would take long.
    with keras.StatelessScope():
        model = factory.create("alexnet_bn", 1000, 224)
    assert sum(int(np.prod(v.shape)) for v in model.trainable_variables) == 62_380_232
    assert [tuple(v.shape) for v in model.trainable_variables] == alexnet_reference.shapes()
    names = [layer.name for layer in model.layers]
    # The oracle does not check this, because with scales above 0 both orders give the same result.
    assert names.index("pool5_bn") == names.index("pool5") + 1


def test_alexnet_forward_pass_equals_the_oracle():
    """At 111 pixels pool5 is 2 x 2, so that the order in which it is flattened matters."""
    model = randomized(factory.create("alexnet_bn", 5, 111), 1)
    images = np.random.default_rng(0).normal(size=(2, 111, 111, 3)).astype(np.float32)

    def values(*variables):
        return tuple(np.asarray(v.value, np.float64) for v in variables)

    def norm(name):
        layer = model.get_layer(name)
        return values(layer.gamma, layer.beta, layer.moving_mean, layer.moving_variance)

    stages = [f"stage{i}" for i in range(1, 6)]
    expected = alexnet_reference.logits(
        images.astype(np.float64),
        [values(model.get_layer(f"{stage}_conv").kernel)[0] for stage in stages],
        [norm(f"{stage}_bn") for stage in stages],
        norm("pool5_bn"),
        [
            values(model.get_layer(name).kernel, model.get_layer(name).bias)
            for name in ("hidden6", "hidden7", "logits")
        ],
    )
    actual = model(images, training=False).numpy()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
