"""ResNets: their size, their forward pass and their options."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory
from hybrid_imagenet.models.normalization import BatchNormalization
from tests.references import resnet_reference

# Parameters for 1000 classes. resnet8 is not in the paper and was counted by hand.
PUBLISHED = {
    "resnet8": 1_489_704,
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
}


def trainable_parameters(model):
    return sum(int(np.prod(v.shape)) for v in model.trainable_variables)


@pytest.mark.parametrize("name", PUBLISHED)
def test_resnet_has_the_published_number_of_parameters(name):
    assert resnet_reference.parameter_count(name, 1000) == PUBLISHED[name]
    # In this scope no weights are drawn, which would take long.
    with keras.StatelessScope():
        model = factory.create(name, 1000, 224)
    assert trainable_parameters(model) == PUBLISHED[name]


def test_resnet8_narrow_for_small_images_has_the_counted_parameters():
    """ResNet-8 with 16, 32 and 64 channels and 10 classes is counted by hand."""
    model = factory.create("resnet8", 10, 28, width=16, stem="3x3")
    stem = 432 + 32
    first = 4608 + 64
    second = 14336 + 192
    third = 57344 + 384
    classifier = 650
    assert trainable_parameters(model) == stem + first + second + third + classifier
    assert trainable_parameters(model) == resnet_reference.parameter_count("resnet8", 10, 16, 3)
    sides = [model.get_layer(f"stage{stage}_block1_relu").output.shape[1] for stage in (1, 2, 3)]
    assert sides == [28, 14, 7]
    strided = factory.create("resnet8", 10, 28, width=16, stem="3x3_stride2")
    assert strided.get_layer("stage3_block1_relu").output.shape[1:] == (4, 4, 64)
    assert trainable_parameters(strided) == trainable_parameters(model)


def randomized(model, seed):
    """Assigns values that no initializer gives, so that swapped variables are noticed."""
    random = np.random.default_rng(seed)
    for variable in model.variables:
        if variable.ndim == 1:
            variable.assign(random.uniform(0.5, 1.5, variable.shape))
    return model


def weights_in_order(model):
    convolutions = []
    for layer in model.layers:
        if isinstance(layer, keras.layers.Conv2D):
            norm = model.get_layer(layer.name.removesuffix("conv") + "bn")
            values = (layer.kernel, norm.gamma, norm.beta, norm.moving_mean, norm.moving_variance)
            convolutions.append(
                (layer.name, tuple(np.asarray(v.value, np.float64) for v in values))
            )

    # The order of the paper has the projection first within a block.
    def paper_order(item):
        name = item[0]
        if name == "stem_conv":
            return (0, 0, 0)
        stage, block, part = name.removesuffix("_conv").split("_")
        return (int(stage[5:]), int(block[5:]), 0 if part == "shortcut" else int(part))

    dense = model.get_layer("logits")
    ordered = [values for _, values in sorted(convolutions, key=paper_order)]
    return ordered, (np.asarray(dense.kernel.value), np.asarray(dense.bias.value))


@pytest.mark.parametrize(
    ("name", "side", "width", "stem"),
    [
        ("resnet18", 40, 64, "imagenet"),
        ("resnet50", 40, 64, "imagenet"),
        ("resnet50_v1", 40, 16, "imagenet"),
        ("resnet8", 28, 6, "3x3"),
        ("resnet50", 24, 6, "3x3_stride2"),
    ],
)
def test_resnet_forward_pass_equals_the_oracle(name, side, width, stem):
    model = randomized(
        factory.create(name, 7, side, width=width, stem=stem, zero_last_gamma=False, seed=3), 1
    )
    images = np.random.default_rng(0).normal(size=(3, side, side, 3)).astype(np.float32)
    convolutions, classifier = weights_in_order(model)
    wide = images.astype(np.float64)
    for training in (False, True):
        expected = resnet_reference.logits(
            name, wide, convolutions, classifier, stem=stem, training=training
        )
        actual = model(images, training=training).numpy()
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize(("flag", "gamma"), [(True, 0.0), (False, 1.0)])
def test_zero_last_gamma_sets_the_last_scale_of_each_block(flag, gamma):
    model = factory.create("resnet50", 3, 32, width=2, zero_last_gamma=flag)
    all_norms = [n for n in model.layers if isinstance(n, BatchNormalization)]
    norms = [n for n in all_norms if n.name.endswith("_3_bn")]
    assert len(norms) == 16
    assert all(np.all(n.gamma.numpy() == gamma) for n in norms)
    others = [n for n in all_norms if n not in norms]
    assert len(others) == 53 - 16
    assert all(np.all(n.gamma.numpy() == 1) for n in others)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_resnet_in_reduced_precision_keeps_float32_variables_and_logits(precision):
    model = factory.create("resnet10", 5, 64, precision=precision, zero_last_gamma=False)
    wide = factory.create("resnet10", 5, 64, zero_last_gamma=False)
    assert model.input.dtype == precision.removeprefix("mixed_")
    assert {v.dtype for v in model.variables} == {"float32"}
    images = np.random.default_rng(0).normal(size=(8, 64, 64, 3)).astype(np.float32)
    narrow = model(tf.cast(images, model.input.dtype), training=True)
    assert narrow.dtype == tf.float32
    expected = wide(images, training=True).numpy()
    assert np.std(narrow.numpy() - expected) < 0.1 * np.std(expected)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "resnet51",
            {},
            "--model=resnet51 does not exist. Choose one of resnet8, resnet10, resnet18",
        ),
        ("resnet18", {"stem": "5x5"}, "--stem=5x5 does not exist. Choose one of imagenet, 3x3"),
        (
            "alexnet_bn",
            {},
            "--image_size=32 is too small for --model=alexnet_bn. Set 63 pixels or more.",
        ),
    ],
)
def test_create_with_invalid_arguments_is_rejected(name, options, words):
    with pytest.raises(UserError, match=words):
        factory.create(name, 10, 32, **options)


def test_resnet_loaded_from_a_file_gives_the_same_results(tmp_path):
    model = randomized(factory.create("resnet10", 4, 32, width=8, batch_norm="moving"), 2)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    images = np.random.default_rng(0).normal(size=(2, 32, 32, 3)).astype(np.float32)
    np.testing.assert_array_equal(model(images).numpy(), loaded(images).numpy())
    assert loaded.get_layer("stem_bn").mode == "moving"


def test_resnet_for_any_image_size_equals_networks_for_each_size():
    any_size = factory.create("resnet8", 5, None, width=16, zero_last_gamma=False)
    for side in (32, 48):
        images = np.random.default_rng(side).normal(size=(2, side, side, 3)).astype(np.float32)
        one_size = factory.create("resnet8", 5, side, width=16, zero_last_gamma=False)
        one_size.set_weights(any_size.get_weights())
        for training in (False, True):
            run = tf.function(lambda x, model, t=training: model(x, training=t))
            np.testing.assert_allclose(
                run(images, any_size), run(images, one_size), rtol=1e-4, atol=1e-4
            )
