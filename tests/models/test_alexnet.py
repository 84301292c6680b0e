import numpy as np
import tensorflow as tf

from hybrid_imagenet import models
from hybrid_imagenet.models import normalization


def test_layers_follow_krizhevsky_with_normalization_after_pool5():
    model = models.create("alexnet_bn", 3, 63)
    names = [layer.name for layer in model.layers]
    assert names.index("pool5_bn") == names.index("pool5") + 1
    assert len(normalization.statistics(model)) == 6
    kernels = [model.get_layer(f"stage{i}_conv").kernel.shape for i in range(1, 6)]
    assert kernels == [(11, 11, 3, 96), (5, 5, 96, 256), (3, 3, 256, 384), (3, 3, 384, 384), (3, 3, 384, 256)]


def test_pool5_of_a_224_image_is_6_by_6():
    model = models.create("alexnet_bn", 3, 224)
    assert model.get_layer("pool5").output.shape == (None, 6, 6, 256)


def test_a_step_moves_every_variable():
    model = models.create("alexnet_bn", 3, 63, precision="mixed_bfloat16")
    images = tf.cast(np.random.default_rng(0).normal(size=(4, 63, 63, 3)), tf.bfloat16)
    with tf.GradientTape() as tape:
        logits = model(images, training=True)
        loss = tf.reduce_sum(logits[:, 0])
    assert logits.dtype == tf.float32
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    assert all(np.abs(g).max() > 0 for g in gradients)
