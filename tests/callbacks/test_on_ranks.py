"""Skipped steps, merged statistics and random numbers on real ranks."""

import numpy as np
import pytest

from tests.callbacks import rank_programs
from tests.references.moments_reference import population_moments
from tests.support import program


@pytest.fixture(scope="module")
def ranks(pools):
    """Returns the results of `skip_and_merge` on four ranks."""
    return pools[4].call(rank_programs.skip_and_merge)


def test_loss_scale_overflow_on_one_rank_skips_the_step_on_all(ranks):
    size = len(ranks)
    states_by_rank = [states for states, _ in ranks]
    assert all(states == states_by_rank[0] for states in states_by_rank)
    taken, skipped, large = states_by_rank[0]
    # The gradients are 1 to size, so this is their mean.
    assert taken[0] == -(1 + size) / 2
    # The loss scale makes the gradient 1024e-6 / size, which FP16 can represent.
    assert taken[2] == pytest.approx(-1e-6, rel=1e-3)
    assert (taken[3:], skipped[3:]) == ([1024.0, 1], [512.0, 1])
    assert skipped[:3] == taken[:3]
    assert large[0] == taken[0] - 60
    assert large[4] == 2


def test_batch_norm_statistics_cover_the_images_of_all_ranks(ranks):
    size = len(ranks)
    images = [
        np.random.default_rng(r).normal(r, 1 + r, (4, 3, 3, 2)).astype(np.float32)
        for r in range(size)
    ]
    for _, (mean, variance) in ranks:
        for channel in range(2):
            parts = [part[..., channel].ravel().tolist() for part in images]
            np.testing.assert_allclose(
                [mean[channel], variance[channel]], population_moments(parts), rtol=2e-5
            )


def test_random_numbers_differ_between_ranks_also_after_a_resume(pools, tiny_data, tmp_path):
    small = [flag for flag in program.FLAGS if not flag.startswith(("--model", "--stem"))]
    common = [*small, "--model=tests.training.own_networks:with_dropout", f"--data_dir={tiny_data}"]
    seeds = set()
    for flag, steps in (("--max_steps=5", 5), ("--resume", 12)):
        first, second = pools[2].call(
            rank_programs.train_with_dropout, [*common, f"--run_dir={tmp_path}", flag]
        )
        assert first[0] != second[0] and first[1] == second[1] == steps
        seeds.add((first[0], second[0]))
    assert len(seeds) == 1
