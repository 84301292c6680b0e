"""Batch normalization: virtual GPUs, modes of the statistics, and several ranks."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.models import factory, normalization
from hybrid_imagenet.models.normalization import BatchNormalization, normalize_over_ranks
from tests.references.moments_reference import merged

EPSILON = 1e-3
STATISTICS = ("moving_mean", "moving_variance")


def reference(x, gamma, beta, dy, epsilon=EPSILON):
    """Returns outputs, gradients, mean and biased variance in float64.

    Reference: the equations of section 3 of Ioffe and Szegedy (2015).
    """
    axes = (0, 1, 2)
    count = x[..., 0].size
    mean = x.mean(axes)
    variance = x.var(axes)
    normal = (x - mean) / np.sqrt(variance + epsilon)
    d_normal = dy * gamma
    d_variance = (d_normal * (x - mean)).sum(axes) * -0.5 * (variance + epsilon) ** -1.5
    d_mean = (
        -d_normal.sum(axes) / np.sqrt(variance + epsilon)
        - 2 * d_variance * (x - mean).sum(axes) / count
    )
    dx = (
        d_normal / np.sqrt(variance + epsilon)
        + d_variance * 2 * (x - mean) / count
        + d_mean / count
    )
    return normal * gamma + beta, (dx, (dy * normal).sum(axes), dy.sum(axes)), mean, variance


def draw(shape=(4, 3, 5, 6), seed=0):
    random = np.random.default_rng(seed)
    x = random.normal(1.0, 2.0, shape)
    return (
        x,
        random.uniform(0.5, 1.5, shape[-1]),
        random.normal(size=shape[-1]),
        random.normal(size=shape),
    )


def build(gamma, beta, **options):
    layer = BatchNormalization(epsilon=EPSILON, **options)
    layer.build((None, None, None, len(gamma)))
    layer.gamma.assign(gamma)
    layer.beta.assign(beta)
    return layer


def run(layer, x, dy, training=True):
    x = tf.constant(x, layer.compute_dtype)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=training)
        loss = tf.reduce_sum(tf.cast(y, tf.float32) * tf.constant(dy, tf.float32))
    return y, tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])


@pytest.mark.parametrize("virtual_gpus", [1, 3])
@pytest.mark.parametrize(
    ("policy", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 0.03), ("mixed_float16", 0.005)]
)
def test_batch_norm_normalizes_the_part_of_each_virtual_gpu_as_a_batch(
    policy, tolerance, virtual_gpus
):
    x, gamma, beta, dy = draw((6, 3, 5, 4))
    layer = build(gamma, beta, dtype=policy, virtual_gpus=virtual_gpus)
    x = tf.cast(x, layer.compute_dtype).numpy().astype(np.float64)
    outputs, gradients = run(layer, x, dy)
    slices = zip(np.split(x, virtual_gpus), np.split(dy, virtual_gpus), strict=True)
    expected = [reference(images, gamma, beta, slopes) for images, slopes in slices]
    assert outputs.dtype == layer.compute_dtype
    np.testing.assert_allclose(
        tf.cast(outputs, tf.float32),
        np.concatenate([e[0] for e in expected]),
        rtol=tolerance,
        atol=tolerance,
    )
    inputs, scales, offsets = zip(*(e[1] for e in expected), strict=True)
    for actual, expected_value in zip(
        gradients, (np.concatenate(inputs), sum(scales), sum(offsets)), strict=True
    ):
        np.testing.assert_allclose(
            tf.cast(actual, tf.float32),
            expected_value,
            atol=tolerance * np.abs(expected_value).max(),
        )
    mean, variance = merged([e[2] for e in expected], [e[3] for e in expected])
    # The statistics are summed in FP32 for every compute type.
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-5)


def test_batch_norm_keeps_moving_averages_per_virtual_gpu_until_merged():
    """Compares one layer with two virtual GPUs with the merged statistics of two layers.

    The statistics are merged after the second of three steps.
    """
    together = build(np.ones(6), np.zeros(6), mode="moving", momentum=0.75, virtual_gpus=2)
    alone = [build(np.ones(6), np.zeros(6), mode="moving", momentum=0.75) for _ in range(2)]
    for step in range(3):
        x = draw((4, 3, 5, 6), seed=step)[0].astype(np.float32)
        together(x, training=True)
        for part, layer in enumerate(alone):
            layer(x[2 * part : 2 * part + 2], training=True)
        means, variances = (
            [getattr(layer, name).numpy() for layer in alone] for name in STATISTICS
        )
        mean, variance = merged(means, variances)
        np.testing.assert_allclose(together.moving_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(together.moving_variance.numpy(), variance, rtol=1e-5)
        if step == 1:
            together.deviations.assign(tf.zeros_like(together.deviations))
            for layer in alone:
                layer.moving_mean.assign(mean)
                layer.moving_variance.assign(variance)


@pytest.mark.parametrize("mode", ["last", "precise"])
def test_batch_norm_last_and_precise_overwrite_the_statistics_in_each_call(mode):
    layer = build(np.ones(6), np.zeros(6), mode=mode)
    for seed in (1, 2):
        x = draw(seed=seed)[0]
        layer(x.astype(np.float32), training=True)
        np.testing.assert_allclose(
            layer.moving_mean.numpy(), x.mean((0, 1, 2)), rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(layer.moving_variance.numpy(), x.var((0, 1, 2)), rtol=1e-4)


def test_batch_norm_moving_averages_biased_statistics():
    layer = build(np.ones(6), np.zeros(6), mode="moving", momentum=0.75)
    mean = np.zeros(6)
    variance = np.ones(6)
    for seed in (1, 2, 3):
        x = draw(seed=seed)[0]
        layer(x.astype(np.float32), training=True)
        mean = 0.75 * mean + 0.25 * x.mean((0, 1, 2))
        variance = 0.75 * variance + 0.25 * x.var((0, 1, 2))
    np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-5)


def test_batch_norm_inference_uses_the_stored_statistics_unchanged():
    x, gamma, beta, dy = draw()
    layer = build(gamma, beta)
    layer.moving_mean.assign(np.full(6, 0.5))
    layer.moving_variance.assign(np.full(6, 4.0))
    outputs, (dx, _, _) = run(layer, x, dy, training=False)
    factor = gamma / np.sqrt(4.0 + EPSILON)
    np.testing.assert_allclose(outputs, (x - 0.5) * factor + beta, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dx, dy * factor, rtol=1e-4, atol=1e-5)
    assert np.all(layer.moving_mean.numpy() == 0.5)


def test_batch_norm_frozen_does_not_depend_on_the_batch():
    model = factory.create("resnet8", 3, 32, width=8, zero_last_gamma=False)
    layers = list(normalization.batch_norm_layers(model))
    for layer in layers:
        layer.trainable = False
    before = [m.numpy() for pair in normalization.inference_statistics(model) for m in pair]
    images = np.random.default_rng(0).normal(size=(4, 32, 32, 3)).astype(np.float32)
    together = model(images, training=True).numpy()
    halves = np.concatenate([model(images[:2], training=True), model(images[2:], training=True)])
    np.testing.assert_allclose(together, halves, rtol=1e-4, atol=1e-5)
    after = [m.numpy() for pair in normalization.inference_statistics(model) for m in pair]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    for layer in layers:
        layer.trainable = True
    model(images, training=True)
    assert not np.array_equal(normalization.inference_statistics(model)[0][0].numpy(), before[0])


class ThreadRanks:
    """Sums over threads that represent ranks; the k-th calls of all ranks belong together."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.tensors = [None] * size
        self.names = [[] for _ in range(size)]

    def allreduce(self, rank):
        def summed(tensor, name):
            self.names[rank].append(name)
            self.tensors[rank] = tensor
            self.barrier.wait()
            total = tf.add_n(self.tensors)
            self.barrier.wait()
            return total

        return summed

    def run(self, work):
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, range(self.size)))


@pytest.mark.parametrize("cuts", [(0, 2, 4, 6), (0, 1, 3, 6)], ids=["equal", "unequal"])
@pytest.mark.parametrize(("policy", "tolerance"), [("float32", 1e-5), ("mixed_bfloat16", 0.03)])
def test_batch_norm_synchronized_over_ranks_equals_one_rank_with_all_images(
    policy, tolerance, cuts
):
    x, gamma, beta, dy = draw((6, 3, 5, 4))
    x = tf.cast(x, tf.bfloat16).numpy().astype(np.float64)
    ranks = ThreadRanks(3)
    layers = [
        build(gamma, beta, dtype=policy, allreduce=ranks.allreduce(r), name="bn") for r in range(3)
    ]
    results = ranks.run(
        lambda r: run(layers[r], x[cuts[r] : cuts[r + 1]], dy[cuts[r] : cuts[r + 1]])
    )
    expected, (dx, d_gamma, d_beta), mean, variance = reference(x, gamma, beta, dy)
    outputs = np.concatenate([tf.cast(y, tf.float32) for y, _ in results])
    np.testing.assert_allclose(outputs, expected, rtol=tolerance, atol=tolerance)
    inputs = np.concatenate([tf.cast(g[0], tf.float32) for _, g in results])
    np.testing.assert_allclose(inputs, dx, atol=tolerance * np.abs(dx).max())
    # Parameters get local gradients, which the optimizer sums over ranks later.
    np.testing.assert_allclose(
        sum(g[1] for _, g in results), d_gamma, rtol=1e-3, atol=tolerance * 50
    )
    np.testing.assert_allclose(
        sum(g[2] for _, g in results), d_beta, rtol=1e-3, atol=tolerance * 50
    )
    for layer in layers:
        np.testing.assert_allclose(layer.moving_mean.numpy(), mean, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(layer.moving_variance.numpy(), variance, rtol=1e-4)
    assert ranks.names[0] == ranks.names[1] == ["bn/moments", "bn/gradient_moments"]


@pytest.mark.parametrize("mean", [0.0, 30.0, 345.0])
@pytest.mark.parametrize("has_mask", [False, True])
def test_normalize_over_ranks_with_a_large_mean_equals_one_process(mean, has_mask):
    x = np.random.default_rng(2).normal(mean, 1.0, (12, 8, 8, 4)).astype(np.float32)
    ranks = ThreadRanks(2)
    cuts = (0, 5, 12)

    def work(rank):
        part = tf.constant(x[cuts[rank] : cuts[rank + 1]])
        mask = tf.ones([*part.shape[:3], 1]) if has_mask else None
        ones = tf.ones([4])
        return normalize_over_ranks(
            part, ones, tf.zeros([4]), EPSILON, ranks.allreduce(rank), "bn", mask
        )

    (first, _, variance), (second, _, _) = ranks.run(work)
    expected, *_ = reference(x.astype(np.float64), 1.0, 0.0, x)
    # The mean of each rank is FP32, and so are the differences to it.
    np.testing.assert_allclose(
        variance, x.astype(np.float64).var((0, 1, 2)), rtol=2e-6 + 3e-8 * mean
    )
    outputs = np.concatenate([first, second])
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-5 + 4e-7 * mean)


@pytest.mark.parametrize("mode", ["last", "moving"])
def test_deferred_statistics_update_gives_the_statistics_of_separate_updates(mode):
    def layers_and_images():
        layers = []
        for seed, channels in enumerate((6, 16, 3)):
            x, gamma, beta, _ = draw((4, 3, 5, channels), seed)
            layers.append((build(gamma, beta, mode=mode), tf.constant(x, tf.float32)))
        return layers

    def stored(layers):
        return [getattr(layer, name).numpy() for layer, _ in layers for name in STATISTICS]

    one_by_one = layers_and_images()
    together = layers_and_images()
    for _ in range(2):
        for layer, images in one_by_one:
            layer(images, training=True)
        before = stored(together)
        with normalization.deferred_statistics_update():
            for layer, images in together:
                layer(images, training=True)
            for value, old in zip(stored(together), before, strict=True):
                np.testing.assert_array_equal(value, old)
        for value, expected in zip(stored(together), stored(one_by_one), strict=True):
            np.testing.assert_array_equal(value, expected)
