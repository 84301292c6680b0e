import numpy as np
import pytest

from hybrid_imagenet.numerics.noise_scale import NoiseScale, advice, estimate
from tests.references.noise_scale_reference import expected_squares, simple_noise_scale

POPULATION = np.array([[1.0, 0.0], [3.0, 1.0], [2.0, -2.0]])


@pytest.mark.parametrize(("small", "big"), [(1, 2), (1, 4), (2, 6)])
def test_estimates_are_unbiased(small, big):
    squares = [expected_squares(POPULATION, batch) for batch in (small, big)]
    assert estimate(*squares, small, big) == pytest.approx(simple_noise_scale(POPULATION), rel=1e-12)


def test_the_running_average_of_noisy_gradients_finds_the_noise_scale():
    random, ranks, small = np.random.default_rng(0), 4, 8
    mean, deviation = np.full(50, 0.1), 2.0
    scale = NoiseScale(decay=0.999)
    for _ in range(4000):
        per_rank = mean + random.normal(0, deviation / np.sqrt(small), (ranks, 50))
        scale.add(np.mean(np.sum(per_rank**2, 1)), np.sum(per_rank.mean(0) ** 2), small, small * ranks)
    assert scale.value == pytest.approx(50 * deviation**2 / (mean @ mean), rel=0.1)


def test_the_first_update_counts_in_full():
    scale = NoiseScale()
    assert scale.value is None
    scale.add(3.0, 2.0, 1, 2)  # |G|^2 = 1, tr(Sigma) = 2
    assert scale.value == pytest.approx(2.0)


def test_no_answer_where_the_gradient_drowns_in_noise():
    scale = NoiseScale()
    scale.add(4.0, 1.0, 1, 2)  # |G|^2 = -2
    assert scale.value is None
    assert "not known yet" in advice(scale.value, 64)


def test_one_rank_alone_shows_no_noise():
    with pytest.raises(ValueError, match="two different sizes"):
        estimate(1.0, 1.0, 32, 32)
