"""Tests grids of ranks, and simulates the sum over their rows and columns in NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_imagenet.comm import torus
from hybrid_imagenet.comm.torus import Grid


@st.composite
def layouts(draw):
    """Draws a grid and the hosts of its ranks, contiguous or not."""
    grid = Grid(draw(st.integers(1, 6)), draw(st.integers(1, 6)))
    hosts = draw(st.lists(st.sampled_from("abc"), min_size=grid.size, max_size=grid.size))
    return grid, hosts


def simulate(values, row_ranks):
    """Simulates reduce-scatter in rows, all-reduce in columns and all-gather in rows."""
    num_chunks = len(row_ranks[0])
    pad = -values.shape[1] % num_chunks
    data = np.pad(values, [(0, 0), (0, pad)])
    chunk_size = data.shape[1] // num_chunks
    chunk_of_rank = {}
    for row in row_ranks:
        total = data[list(row)].sum(0)
        for position, rank in enumerate(row):
            start = position * chunk_size
            chunk_of_rank[rank] = total[start : start + chunk_size]
    for column in torus.columns(row_ranks):
        total = sum(chunk_of_rank[rank] for rank in column)
        chunk_of_rank.update(dict.fromkeys(column, total))
    result = np.empty_like(data)
    for row in row_ranks:
        result[list(row)] = np.concatenate([chunk_of_rank[rank] for rank in row])
    return result[:, : values.shape[1]]


@given(layouts(), st.integers(0, 40))
def test_torus_sum_simulated_is_exact_on_every_rank(layout, elements):
    grid, hosts = layout
    values = np.random.default_rng(elements).integers(-100, 100, [grid.size, elements])
    sums = simulate(values, torus.rows(hosts, grid))
    np.testing.assert_array_equal(sums, np.broadcast_to(values.sum(0), sums.shape))


@given(layouts())
def test_rows_and_columns_cross_in_one_rank(layout):
    grid, hosts = layout
    rows = torus.rows(hosts, grid)
    columns = torus.columns(rows)
    assert (len(rows), len(columns)) == (grid.vertical, grid.horizontal)
    for lines in (rows, columns):
        assert sorted(rank for line in lines for rank in line) == list(range(grid.size))
    assert all(len(set(row) & set(column)) == 1 for row in rows for column in columns)


def test_rows_of_ranks_that_alternate_between_hosts_are_hosts():
    assert torus.rows(["a", "b", "a", "b"], Grid(2, 2)) == [[0, 2], [1, 3]]
    assert torus.rows(["b", "a", "a", "b"], Grid(2, 2)) == [[0, 3], [1, 2]]


@given(st.integers(1, 5000))
def test_nearest_square_has_the_most_square_grid_of_all_ranks(size):
    grid = torus.nearest_square(size)
    assert grid.size == size and grid.vertical <= grid.horizontal
    assert not any(size % v == 0 for v in range(grid.vertical + 1, int(size**0.5) + 1))


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        (["a"], "1x1"),
        (["a"] * 4, "2x2"),
        (["a"] * 7, "1x7"),
        (["a"] * 8, "2x4"),
        ([*"aaaabbbb"], "2x4"),
        ([*"aabbccdd"], "4x2"),
        # Each host has one rank, so rows cannot be hosts.
        ([*"abcdef"], "2x3"),
        # The hosts have different numbers of ranks.
        ([*"aabbbb"], "2x3"),
        ([f"n{i // 4}" for i in range(24)], "6x4"),
    ],
)
def test_default_grid_has_hosts_as_rows_if_they_are_equal(hosts, expected):
    assert str(torus.default_grid(hosts)) == expected


def test_default_grid_of_a_published_number_of_gpus_is_the_published_grid():
    # Mikami et al., Table 4.
    for size, expected in {
        1024: "32x32",
        2048: "32x64",
        2176: "34x64",
        3456: "48x72",
        4096: "64x64",
    }.items():
        assert str(torus.default_grid([f"n{i // 4}" for i in range(size)])) == expected


def test_host_grid_of_unequal_hosts_is_none():
    assert torus.host_grid([*"abab"]) == Grid(2, 2)
    assert torus.host_grid([*"abb"]) is None


@pytest.mark.parametrize(
    "text", ["", "2", "x", "2x", "axb", "2x2x2", "-1x-4", "2*2", "²x2", "1.5x2"]
)
def test_parse_grid_of_invalid_text_raises(text):
    with pytest.raises(ValueError, match="Write VxH"):
        torus.parse_grid(text)


def test_parse_grid_of_another_size_raises():
    assert torus.parse_grid("2X4", 8) == Grid(2, 4)
    with pytest.raises(ValueError, match=r"3x2 has 6 ranks, but 8 are needed. Use 2x4."):
        torus.parse_grid("3x2", 8)
    with pytest.raises(ValueError, match="empty grid"):
        torus.parse_grid("0x4")
