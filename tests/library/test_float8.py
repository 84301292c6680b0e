"""Models in float8 on several ranks; tests/optimizers/test_float8.py tests one rank."""

import numpy as np
import pytest

from tests.library import float8


@pytest.fixture(scope="module")
def rank_results(pools):
    """Returns the results of each rank, without accumulation and with two micro-batches."""
    return pools[2].call(float8.fit_on_rank)


@pytest.mark.parametrize("steps", [None, 2])
def test_float8_fit_on_two_ranks_equals_one_process_with_their_batches(rank_results, steps):
    """Covers accumulation too: with two micro-batches, the third batch remains in the sums."""
    first, second = [results[bool(steps)] for results in rank_results]
    assert first == second
    expected = float8.fit(steps=steps)
    assert first.keys() == expected.keys()
    for name, values in expected.items():
        # The loss of a rank is the mean over half as many examples, so its gradients are twice as
        # large before the mean over ranks.
        factor = 2 if name.startswith("outputs_grad") and max(values) != 1 else 1
        np.testing.assert_allclose(
            first[name], np.multiply(values, factor), rtol=1e-5, atol=1e-7, err_msg=name
        )
    # These are the largest inputs of both ranks, without rounding.
    for name in expected:
        if name.startswith("inputs"):
            assert first[name] == expected[name], name
    largest = [np.abs(x).max() for x, _ in float8.batches()]
    if steps is None:
        assert sorted(first["inputs_amax_history"])[-3:] == sorted(largest[:3])
    else:
        assert max(first["inputs_amax_history"]) == max(largest[:2])
        assert first["inputs_amax_history_sum"][0] == largest[2]
