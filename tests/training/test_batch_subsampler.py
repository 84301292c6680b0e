"""Batches that differ by GPU and step: their sizes, and means weighted by count."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet.order import sampling
from hybrid_imagenet.training.batch_subsampler import BatchSubsampler


def batch(step, images):
    examples = np.arange(step * images, (step + 1) * images, dtype=np.int64)
    seeds = sampling.seeds(1, np.zeros(images, np.int64), examples)
    return {"image": tf.constant(examples), "seed": tf.constant(seeds)}


def alone(tensor, name):
    return tensor


def test_batch_subsampler_draws_a_count_for_each_gpu_and_step():
    subsampler = BatchSubsampler(2, 4, 1, alone)
    counts = np.stack(
        [subsampler.draw_counts(batch(step, 4 * 6)["seed"]).numpy() for step in range(200)]
    )
    assert set(counts.ravel()) == {2, 3, 4, 5, 6}
    share = np.bincount(counts.ravel(), minlength=7)[2:] / counts.size
    assert np.abs(share - 0.2).max() < 4 * np.sqrt(0.2 * 0.8 / counts.size)
    assert not (counts[:, 0] == counts[:, 1]).all()
    assert len(set(counts.sum(1))) > 5


def test_batch_subsampler_uses_the_first_images_of_each_gpu():
    subsampler = BatchSubsampler(1, 3, 1, alone)
    whole = batch(7, 3 * 5)
    used, weight = subsampler(whole)
    counts = subsampler.draw_counts(whole["seed"]).numpy()
    expected = np.concatenate(
        [7 * 15 + 5 * part + np.arange(count) for part, count in enumerate(counts)]
    )
    np.testing.assert_array_equal(used["image"], expected)
    assert used["seed"].shape[0] == len(expected)
    assert float(weight) == 1.0


def test_batch_subsampler_on_ranks_equals_virtual_gpus_weighted_by_count():
    whole = batch(3, 4 * 8)
    counts = BatchSubsampler(1, 4, 1, alone).draw_counts(whole["seed"]).numpy()
    means = []
    for rank in range(2):
        rank_batch = {name: values[16 * rank : 16 * rank + 16] for name, values in whole.items()}
        used, weight = BatchSubsampler(
            1, 2, 2, lambda tensor, name: tensor * 0 + float(counts.sum())
        )(rank_batch)
        assert used["image"].shape[0] == counts[2 * rank : 2 * rank + 2].sum()
        means.append(float(weight) * np.mean(used["image"]))
    together, _ = BatchSubsampler(1, 4, 1, alone)(whole)
    assert np.mean(means) == pytest.approx(np.mean(together["image"]))
    assert len(set(counts)) > 1
