import keras
import pytest

from hybrid_imagenet import models, optimizers
from hybrid_imagenet.optimizers.kinds import ParameterKind, classify, classify_by_rank


def test_kinds_come_from_the_layers_and_not_from_names():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(4, 3, name="batch_norm_bias_gamma")(inputs)
    x = keras.layers.BatchNormalization(name="conv")(x)
    inner = keras.Sequential(
        [keras.Input((6, 6, 4)), keras.layers.DepthwiseConv2D(3), keras.layers.LayerNormalization()]
    )
    x = keras.layers.GlobalAveragePooling2D()(inner(x))
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    k, b = ParameterKind.KERNEL, ParameterKind.BIAS
    scale, offset = ParameterKind.NORM_SCALE, ParameterKind.NORM_OFFSET
    assert classify(model) == [k, b, scale, offset, k, b, scale, offset, k, b]


def test_resnet50_has_54_kernels_one_bias_and_53_normalizations():
    model = models.create("resnet50", num_classes=10, image_size=32)
    kinds = classify(model)
    counts = {kind: kinds.count(kind) for kind in ParameterKind}
    assert list(counts.values()) == [54, 1, 53, 53]
    assert len(kinds) == len(model.trainable_variables) == 161


def test_without_a_model_the_rank_decides():
    variables = [keras.Variable([[1.0]]), keras.Variable([1.0])]
    assert classify_by_rank(variables) == [ParameterKind.KERNEL, ParameterKind.BIAS]


def test_create_refuses_a_name_that_it_does_not_know():
    with pytest.raises(ValueError, match="optimizer=adam"):
        optimizers.create("adam")
