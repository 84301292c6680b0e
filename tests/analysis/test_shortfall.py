"""Causes of a shortfall, from measurements whose cause is known."""

import dataclasses

import pytest

from hybrid_imagenet.analysis import shortfall
from hybrid_imagenet.analysis.shortfall import OneGpu, Together

# An A100 at 2,375 images/s with 256 images a step.
GOOD = OneGpu(
    images=256,
    step=107.8,
    profiled=109.0,
    busy=107.0,
    kinds={"convolution": 62.0, "normalization": 30.0, "ReLU, sums, pooling": 10.0, "change of layout": 0.0},
    launches=800,
    layout="NHWC",
    tensor_cores=0.97,
)
EIGHT = Together(ranks=8, hosts=1, step=111.0, compute=109.0, transport="NCCL 2.21, channels by P2P/CUMEM")


def causes(alone=GOOD, host=EIGHT, cluster=None, rate=30_000.0, expected=2375.0):
    return shortfall.causes(expected, alone, host, cluster, rate)


def changed(**changes):
    return dataclasses.replace(GOOD, **changes)


def test_a_gpu_that_is_as_fast_as_published_has_no_cause():
    assert causes() == []
    assert causes(changed(layout="NCHW")) == [], "it is fast enough all the same"
    assert causes(host=None, rate=None) == []


@pytest.mark.parametrize(
    ("alone", "text", "lost"),
    [
        (changed(step=180.0, slowed="heat"), "clocks are slowed down: heat", 180.0),
        (changed(step=180.0, tensor_cores=0.1, kinds=GOOD.kinds | {"convolution": 140.0}), "only 10 % of", 70.0),
        (changed(step=160.0, profiled=161.0, busy=160.0, layout="NCHW", kinds=GOOD.kinds | {"change of layout": 44.0}),
         "normalization runs in NCHW: 44.0 ms", 44.0),
        (changed(step=140.0, profiled=141.0, busy=140.0, kinds=GOOD.kinds | {"host copies": 30.0}, fetches=3.0,
                 returned=0.9),
         "3.0 copies to the host a step, each of which waits for the GPU; calls return after 90 % of a step", 30.0),
        (changed(step=150.0, profiled=152.0, busy=107.0), "waits 45.0 ms for the host, which starts 800 kernels", 45.0),
        (changed(step=130.0, profiled=131.0, busy=130.0), "nothing stands out", 130.0 - 107.8),
    ],
)  # fmt: skip
def test_the_first_cause_on_one_gpu_is_the_one_that_was_made(alone, text, lost):
    first = causes(alone)[0]
    assert text in first.what
    assert first.lost == pytest.approx(lost, abs=0.1)
    assert first.remedy


def test_a_gpu_without_matrix_units_is_not_asked_for_them():
    found = causes(changed(step=180.0, profiled=181.0, busy=180.0, tensor_cores=0.0, wants_tensor_cores=False))
    assert not any("tensor cores" in cause.what for cause in found)


def test_causes_of_a_host_and_a_cluster_follow_and_name_the_transport():
    host = dataclasses.replace(EIGHT, step=140.0, transport="channels by SHM/direct", warning="look at ACS")
    (cause,) = causes(host=host)
    assert "8 GPUs: 31.0 ms of communication that nothing hides; channels by SHM/direct" in cause.what
    assert cause.remedy == "look at ACS"
    cluster = Together(ranks=16, hosts=2, step=150.0, compute=109.0, transport="channels by NET/Socket/0")
    (cause,) = causes(cluster=cluster)
    assert cause.what.startswith("16 GPUs on 2 hosts: 41.0 ms")
    assert "hybrid-imagenet plan" in cause.remedy


def test_ranks_that_disturb_each_other_are_told_from_communication():
    (cause,) = causes(host=dataclasses.replace(EIGHT, step=131.0, compute=130.0))
    assert "8 GPUs: a step takes 130.0 ms before any communication, alone 107.8 ms" in cause.what


def test_input_that_is_too_slow_for_a_host_comes_last():
    (cause,) = causes(rate=9_000.0)
    assert "a host decodes 9,000 images/s and its GPUs take 18,450" in cause.what
    assert cause.lost == pytest.approx(1e3 * 8 * 256 / 9000 - 111)
    two = causes(changed(step=180.0, slowed="heat"), rate=2_000.0)
    assert [c.what.partition(":")[0] for c in (two[0], two[-1])] == ["the GPU's clocks are slowed down", "input"]


def test_without_an_expected_speed_what_stands_out_is_still_named():
    found = causes(changed(layout="NCHW", kinds=GOOD.kinds | {"change of layout": 20.0}), expected=None)
    assert [c.what.partition(":")[0] for c in found] == ["normalization runs in NCHW"]
    assert causes(expected=None) == []
