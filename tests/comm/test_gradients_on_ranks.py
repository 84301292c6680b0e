"""The mean of gradients over real ranks: types on the wire, extreme values, choices of algorithm, bad input."""

import pytest

from tests.ranks import results, run

HEAD = """
import logging
import numpy as np
from hybrid_imagenet import comm
from hybrid_imagenet.comm import Settings
"""

REDUCERS = (
    HEAD
    + """
OTHERS = [Settings(allreduce=name) for name in ("torus", "masters", "hybrid", "auto")]
c = comm.start(Settings(compression="none"), others=OTHERS)
import tensorflow as tf
from hybrid_imagenet.comm.gradients import GradientReducer
from hybrid_imagenet.comm.selection import Selector
def reducer(**settings):
    s = Settings(**settings)
    return GradientReducer(c, s, Selector(c, s, c.sets))
def reduce(r, grads, names):
    out = tf.function(lambda *g: r.reduce(g, names), autograph=False)(*[tf.constant(g, tf.float32) for g in grads])
    return [np.asarray(t.numpy(), np.float64) for t in out]
"""
)

PRECISION = """
shapes = [(3, 3, 4), (), (1000,), (0,), (37,)]
names = ["kernel", "scalar", "big", "empty", "dense/keep"]
rng = np.random.default_rng(0)
everyone = [[np.float32(rng.normal(size=s) * 10.0 ** rng.uniform(-3, 3, s)) for s in shapes] for _ in range(c.size)]
out = {}
for compression in ("none", "fp16", "bf16"):
    for allreduce in ("ring", "torus", "masters", "hybrid", "auto"):
        if compression == "bf16" and allreduce not in ("ring", "auto"):
            continue
        r = reducer(allreduce=allreduce, compression=compression, fusion_threshold_mb=0.001,
                    options={"hybrid_threshold_kb": 1} if allreduce == "hybrid" else {}, fp32_gradients=("keep",))
        got = reduce(r, everyone[c.rank], names)
        bits = {"none": 24, "fp16": 11, "bf16": 8}[compression]
        worst = 0.0
        for k, name in enumerate(names):
            parts = np.stack([np.float64(rank[k]) for rank in everyone]) / c.size
            b = 24 if "keep" in name else bits
            # FP32 division, then the cast and N - 1 additions round: N + 1 roundings; FP16 is subnormal below 2^-14.
            total = np.abs(parts).sum(0)
            bound = (c.size + 1) * (2.0**-b * total + (2.0**-25 if b == 11 else 0)) + 2.0**-22 * total
            error = np.abs(got[k] - parts.sum(0))
            if error.size:
                worst = max(worst, float((error / bound).max()))
        alike = c.allgather_object([g.tobytes().hex() for g in got])
        s = r.statistics()
        algorithms, wires = (sorted({b[key] for b in s["buckets"]}) for key in ("algorithm", "wire"))
        out[f"{compression} {allreduce}"] = [
            worst, all(a == alike[0] for a in alike), s["steps"], algorithms, wires, s["exposed_ms"] >= 0, s["bytes"]
        ]
"""

EXTREMES = """
names = ["a", "b", "c", "d", "e", "keep"]
inf, nan = np.inf, np.nan
mine = [
    np.array([60000.0, -60000.0]),                       # the sum overflows FP16, the mean does not
    np.array([2.0**-20, 2.0**-24]),                       # subnormal in FP16; after division by 4 the second is lost
    np.array([inf if c.rank == 1 else 1.0, 1.0, nan if c.rank == 2 else 1.0]),
    np.array([1e6 if c.rank == 3 else 0.0, 1.0]),        # overflows on one rank only
    np.array([1e-9, 1.0]),                               # lost in FP16
    np.array([1e-9, 1e6]),
]
r = reducer(compression="fp16", fp32_gradients=("keep",), wire_health_every_steps=2)
step = tf.function(lambda *g: r.reduce(g, names), autograph=False)
for _ in range(3):  # the first and the third are counted
    got = step(*[tf.constant(m, tf.float32) for m in mine])
out["values"] = [[repr(float(x)) for x in g.numpy()] for g in got]
out["health"] = [
    [h.name, h.elements, h.overflow, h.underflow, h.nonfinite, h.zeros, h.first_rank] for h in r.wire_health()
]
out["again"] = sum(h.elements for h in r.wire_health())
out["traces"] = step.experimental_get_tracing_count()
"""


@pytest.fixture(scope="module")
def outcomes():
    return results(4, REDUCERS + PRECISION + EXTREMES + "report(out)\n")


def test_means_are_within_the_rounding_of_the_wire(outcomes):
    for out in outcomes:
        for case in [key for key in out if " " in key]:
            worst, alike, steps, algorithms, wires, timed, _ = out[case]
            assert worst <= 1.0, (case, worst)
            assert alike and timed and steps == 1, case
            compression, allreduce = case.split()
            wire = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[compression]
            assert wires == sorted({wire, "float32"})
            if allreduce in ("torus", "masters"):
                assert algorithms == [allreduce]
            if case == "none hybrid":
                assert algorithms == ["masters", "ring"]
            if compression == "bf16":
                assert "exchange" in algorithms


def test_half_the_bytes_travel_in_sixteen_bits(outcomes):
    elements = 36 + 1 + 1000 + 37
    for out in outcomes:
        assert out["none ring"][-1] == 4 * elements
        assert out["fp16 ring"][-1] == out["bf16 ring"][-1] == 2 * elements + 2 * 37


def test_auto_decides_alike_on_all_ranks(outcomes):
    for case in ("none auto", "fp16 auto"):
        assert len({str(out[case][3]) for out in outcomes}) == 1


def test_extreme_values_meet_the_same_fate_on_all_ranks(outcomes):
    for out in outcomes:
        a, b, c, d, e, keep = out["values"]
        assert a == ["60000.0", "-60000.0"]
        assert b == [repr(2.0**-20), "0.0"]
        assert c == ["inf", "1.0", "nan"]
        assert d == ["inf", "1.0"]
        assert e[0] == "0.0" and keep[1] == "1000000.0" and float(keep[0]) == pytest.approx(1e-9)


def test_the_health_of_the_wire_names_layer_and_rank(outcomes):
    for out in outcomes:
        assert out["traces"] == 1  # though the counters are made on the way
        health = {row[0]: row[1:] for row in out["health"]}
        assert set(health) == {"a", "b", "c", "d", "e", "keep"}
        assert [health[name].pop(4) for name in sorted(health)] == [0, 0, 0, 2 * 3, 0, 0]  # zeros as computed
        assert health["keep"] == [2 * 2 * 4, 0, 0, 0, None]
        assert health["a"] == [2 * 2 * 4, 0, 0, 0, None]
        assert health["b"] == [2 * 2 * 4, 0, 2 * 4, 0, None]
        assert health["c"] == [3 * 2 * 4, 0, 0, 4, 1]
        assert health["d"] == [2 * 2 * 4, 2, 0, 0, 3]
        assert health["e"] == [2 * 2 * 4, 0, 2 * 4, 0, None]
        assert out["again"] == 0


def test_a_grid_that_does_not_hold_the_ranks_ends_with_one_line():
    code = (
        HEAD
        + """
import sys
try:
    comm.start(Settings(allreduce="torus", options={"torus_grid": "2x2"}))
except comm.UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""
    )
    for ranks in (0, 2):
        done = run(ranks, code)
        assert done.returncode == 2
        expected = f"--torus_grid=2x2: 2x2 holds 4 ranks, not {max(ranks, 1)}: use 1x{max(ranks, 1)}"
        assert expected in done.stdout.splitlines()


def test_hosts_with_different_numbers_of_ranks():
    """Three ranks, two of them as if on another host."""
    code = (
        HEAD
        + """
import os
from hybrid_imagenet.comm import hosts
hosts.key = lambda: [["near", "far", "far"][int(os.environ["OMPI_COMM_WORLD_RANK"])], ""]
try:
    comm.start(Settings(allreduce="hierarchical"))
except comm.UserError as error:
    report(str(error))
"""
    )
    for message in results(3, code):
        assert message.startswith("--allreduce=hierarchical: the hosts hold different numbers of ranks (near 1, far 2)")
