"""Tests how gradients are grouped into buckets."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.optimizer import resnet50_shapes
from hybrid_imagenet.comm.fusion import WIRE_BYTES, make_buckets
from hybrid_imagenet.comm.settings import CommunicationSettings


@st.composite
def gradients(draw):
    count = draw(st.integers(0, 12))
    elements = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    order = draw(st.permutations(range(count)))
    return order, elements, draw(st.sampled_from(sorted(WIRE_BYTES))), draw(st.integers(0, 120))


@given(gradients())
def test_make_buckets_puts_each_gradient_into_one_bucket_in_backward_order(case):
    order, elements, wire, threshold = case
    buckets = make_buckets(order, elements, wire, threshold)
    members = [m for bucket in buckets for m in bucket.members]
    assert sorted(members) == [i for i, n in enumerate(elements) if n]
    order_of = {position: index for index, position in enumerate(order)}
    for bucket in buckets:
        assert bucket.wire_dtype == wire
        assert (
            bucket.bytes == sum(elements[m] for m in bucket.members) * WIRE_BYTES[bucket.wire_dtype]
        )
        assert [order_of[m] for m in bucket.members] == sorted(order_of[m] for m in bucket.members)


@given(gradients())
def test_make_buckets_makes_at_most_one_small_bucket_and_no_large_one(case):
    order, elements, wire, threshold = case
    buckets = make_buckets(order, elements, wire, threshold)
    assert sum(bucket.bytes < threshold for bucket in buckets) <= 1
    assert all(bucket.bytes < 2 * threshold or len(bucket.members) == 1 for bucket in buckets)


def test_make_buckets_closes_a_bucket_when_it_reaches_the_threshold():
    buckets = make_buckets([3, 2, 1, 0], [10, 10, 10, 10], "float16", 30)
    assert [(b.members, b.bytes) for b in buckets] == [((3, 2), 40), ((1, 0), 40)]
    assert [b.members for b in make_buckets([0, 1, 2], [1, 100, 1], "float16", 50)] == [
        (1,),
        (0, 2),
    ]
    assert [b.members for b in make_buckets([0, 1], [5, 5], "float16", 0)] == [(0,), (1,)]


def test_make_buckets_with_a_size_of_the_last_buckets_makes_them_small():
    # Nothing hides the last bucket. By size alone, it would have 28 % of ResNet-50's bytes.
    shapes = resnet50_shapes()
    elements = [math.prod(shape) for shape in shapes]
    order = range(len(shapes))[::-1]
    plain = [bucket.bytes for bucket in make_buckets(order, elements, "float16", 16 << 20)]
    small = [bucket.bytes for bucket in make_buckets(order, elements, "float16", 16 << 20, 4 << 20)]
    assert sum(plain) == sum(small) == 2 * 25_557_032
    assert plain[-1] > 0.25 * sum(plain)
    assert small[-1] < 0.09 * sum(small)
    assert small[:2] == plain[:2], "only the last ones differ"
    assert all(size < 8 << 20 for size in small[2:])
    assert CommunicationSettings().last_bucket_bytes(nccl=False) is None
    assert CommunicationSettings().last_bucket_bytes(nccl=True) == 4 << 20


def test_make_buckets_with_an_incomplete_order_raises():
    with pytest.raises(ValueError, match="each gradient once"):
        make_buckets([0, 0], [1, 1], "float16", 1)
