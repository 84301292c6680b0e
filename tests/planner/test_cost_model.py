"""Tests the cost model of all-reduce algorithms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.comm.torus import Grid
from hybrid_imagenet.planner import cost_model
from hybrid_imagenet.planner.cost_model import COSTS, Layer, Link, Topology, simulate_exchange
from tests.references import cost_model_reference as reference

SIZE = st.floats(0, 1e9)
LINK = st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-8))
RANKS = st.integers(1, 200)


@given(SIZE, RANKS, LINK)
def test_ring_seconds_is_the_sum_over_its_rounds(size, ranks, link):
    assert cost_model.ring_seconds(size, ranks, Link(*link)) == pytest.approx(
        reference.ring(size, ranks, *link), rel=1e-9
    )


@given(SIZE, st.integers(1, 40), st.integers(1, 40), LINK, LINK)
def test_torus_and_masters_seconds_are_the_sums_over_their_rounds(
    size, vertical, horizontal, first, second
):
    expected = reference.torus(size, vertical, horizontal, first, second)
    seconds = cost_model.torus_seconds(
        size, Grid(vertical, horizontal), Link(*first), Link(*second)
    )
    assert seconds == pytest.approx(expected, rel=1e-9)
    expected = reference.masters(size, vertical, horizontal, first, second)
    seconds = cost_model.masters_seconds(size, vertical, horizontal, Link(*first), Link(*second))
    assert seconds == pytest.approx(expected, rel=1e-9)


def test_costs_belong_to_values_of_allreduce():
    # Under any other name, an algorithm would be predicted with the cost of the ring.
    assert COSTS.keys() <= ALGORITHMS.keys()


CLUSTER = Topology(3, 8, Link.of(100, 5), Link.of(5, 50))


@pytest.mark.parametrize(
    ("grid", "row", "column_flows"),
    [
        # Rows are hosts, so 8 columns leave each host.
        (Grid(3, 8), "inside", 8),
        (Grid(6, 4), "inside", 4),
        # A row crosses hosts as one flow.
        (Grid(2, 12), "between", 8),
        # 6 does not divide 8, so some rows cross hosts.
        (Grid(4, 6), "between", 6),
        (Grid(1, 24), "between", 8),
    ],
)
def test_torus_links_of_a_grid_depend_on_whether_rows_cross_hosts(grid, row, column_flows):
    horizontal, vertical = CLUSTER.torus_links(grid)
    assert horizontal == getattr(CLUSTER, row)
    assert vertical == CLUSTER.between.shared(column_flows)


def test_cost_on_one_host_does_not_depend_on_the_network():
    alone = Topology(1, 8, Link.of(100, 5), Link.of(0.001, 1e6))
    for cost in COSTS.values():
        assert cost(1e8, alone, None, 0.0) < 0.01


def test_cost_of_algorithms_on_a_cluster_equals_the_reference():
    size = 51e6
    inside = (5e-6, 1e-11)
    between = (50e-6, 2e-10)
    large = {name: cost(size, CLUSTER, None, 2.0**18) for name, cost in COSTS.items()}
    small = {name: cost(1000, CLUSTER, None, 2.0**18) for name, cost in COSTS.items()}
    assert large["ring"] == pytest.approx(reference.ring(size, 24, *between))
    assert large["hierarchical"] == pytest.approx(
        reference.torus(size, 3, 8, inside, (50e-6, 8 * 2e-10))
    )
    assert large["masters"] == pytest.approx(reference.masters(size, 3, 8, inside, between))
    assert large["size_switched"] == large["ring"]
    assert small["size_switched"] == small["masters"]


# Backpropagation takes 6 s: the last layer 3 s, the middle 2 s, the first 1 s.
LAYERS = [Layer(10, 1), Layer(20, 2), Layer(30, 3)]


@pytest.mark.parametrize(
    ("fusion", "seconds_per_byte", "exposed", "buckets"),
    [
        # Each gradient is sent when it is ready. Only 0.1 s for the first layer remain at the end.
        (0, 0.01, 0.1, (30, 20, 10)),
        # Messages take 3 to 6, 6 to 8 and 8 to 9 s, but backpropagation ends at 6 s.
        (0, 0.1, 1 + 2 + 3 - 3, (30, 20, 10)),
        (50, 0.01, 0.1, (50, 10)),
        # One bucket overlaps nothing.
        (60, 0.01, 0.6, (60,)),
        (1000, 0.01, 0.6, (60,)),
        (0, 0.0, 0.0, (30, 20, 10)),
    ],
)
def test_simulate_exchange_overlaps_buckets_with_backpropagation(
    fusion, seconds_per_byte, exposed, buckets
):
    result = simulate_exchange(LAYERS, 6.0, 1, fusion, lambda size: size * seconds_per_byte)
    assert result.buckets == buckets
    assert result.exposed_seconds == pytest.approx(exposed)
    assert result.seconds == pytest.approx(60 * seconds_per_byte)
