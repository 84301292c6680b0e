import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_imagenet.comm import cost_model
from hybrid_imagenet.comm.cost_model import Layer, Link, Topology, simulate_exchange
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.comm.torus import Grid
from tests.references import cost_model_reference as reference

COSTS = {name: known.cost for name, known in ALGORITHMS.items() if known.cost is not None}
SIZE = st.floats(0, 1e9)
LINK = st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-8))
RANKS = st.integers(1, 200)


@given(SIZE, RANKS, LINK)
def test_ring_is_its_rounds(size, ranks, link):
    assert cost_model.ring_seconds(size, ranks, Link(*link)) == pytest.approx(
        reference.ring(size, ranks, *link), rel=1e-9
    )


@given(SIZE, st.integers(1, 40), st.integers(1, 40), LINK, LINK)
def test_torus_and_masters_are_their_rounds(size, vertical, horizontal, first, second):
    expected = reference.torus(size, vertical, horizontal, first, second)
    found = cost_model.torus_seconds(size, Grid(vertical, horizontal), Link(*first), Link(*second))
    assert found == pytest.approx(expected, rel=1e-9)
    expected = reference.masters(size, vertical, horizontal, first, second)
    found = cost_model.masters_seconds(size, vertical, horizontal, Link(*first), Link(*second))
    assert found == pytest.approx(expected, rel=1e-9)


def test_bus_bandwidth_of_a_ring_without_latency_is_that_of_the_link():
    size, link = 1e8, Link.of(12.5, 0)
    assert cost_model.bus_bandwidth(
        size, cost_model.ring_seconds(size, 7, link), 7
    ) == pytest.approx(12.5e9)


CLUSTER = Topology(3, 8, Link.of(100, 5), Link.of(5, 50))


@pytest.mark.parametrize(
    ("grid", "row", "column_flows"),
    [
        (Grid(3, 8), "inside", 8),  # rows are hosts; 8 columns leave each host
        (Grid(6, 4), "inside", 4),
        (Grid(2, 12), "between", 8),  # a row crosses hosts as one flow
        (Grid(4, 6), "between", 6),  # 6 does not divide 8: some rows cross
        (Grid(1, 24), "between", 8),
    ],
)
def test_links_of_a_grid(grid, row, column_flows):
    horizontal, vertical = CLUSTER.torus_links(grid)
    assert horizontal == getattr(CLUSTER, row)
    assert vertical == CLUSTER.between.shared(column_flows)


def test_one_host_never_uses_the_network():
    alone = Topology(1, 8, Link.of(100, 5), Link.of(0.001, 1e6))
    for cost in COSTS.values():
        assert cost(1e8, alone, None, 0.0) < 0.01


def test_algorithms_on_a_cluster():
    size = 51e6
    inside, between = (5e-6, 1e-11), (50e-6, 2e-10)
    at, small = (
        {name: cost(n, CLUSTER, None, 2.0**18) for name, cost in COSTS.items()}
        for n in (size, 1000)
    )
    assert at["ring"] == pytest.approx(reference.ring(size, 24, *between))
    assert at["hierarchical"] == pytest.approx(
        reference.torus(size, 3, 8, inside, (50e-6, 8 * 2e-10))
    )
    assert at["masters"] == pytest.approx(reference.masters(size, 3, 8, inside, between))
    assert at["size_switched"] == at["ring"]
    assert small["size_switched"] == small["masters"]


# Backpropagation takes 6 s: the last layer 3 s, the middle 2 s, the first 1 s.
LAYERS = [Layer(10, 1), Layer(20, 2), Layer(30, 3)]


@pytest.mark.parametrize(
    ("fusion", "seconds_per_byte", "exposed", "buckets"),
    [
        (
            0,
            0.01,
            0.1,
            (30, 20, 10),
        ),  # each is sent when it is ready; only the first layer's 0.1 s is left
        (
            0,
            0.1,
            1 + 2 + 3 - 3,
            (30, 20, 10),
        ),  # 3 to 6, 6 to 8, 8 to 9 s; backpropagation ends at 6 s
        (50, 0.01, 0.1, (50, 10)),
        (60, 0.01, 0.6, (60,)),  # one bucket overlaps nothing
        (1000, 0.01, 0.6, (60,)),
        (0, 0.0, 0.0, (30, 20, 10)),
    ],
)
def test_buckets_travel_while_backpropagation_goes_on(fusion, seconds_per_byte, exposed, buckets):
    result = simulate_exchange(LAYERS, 6.0, 1, fusion, lambda size: size * seconds_per_byte)
    assert result.buckets == buckets
    assert result.exposed_seconds == pytest.approx(exposed)
    assert result.seconds == pytest.approx(60 * seconds_per_byte)
