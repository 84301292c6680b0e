"""The mean of gradients over real ranks: wire dtypes, extreme values, algorithms, bad input."""

import pytest

from hybrid_imagenet import comm
from hybrid_imagenet.errors import UserError
from tests.comm import programs


@pytest.fixture(scope="module", params=["horovod", "tensorflow"])
def outcomes(pools, request):
    engine = request.param
    return pools["tensorflow" if engine == "tensorflow" else 4].call(programs.reductions, engine)


def test_means_are_within_the_rounding_of_the_wire(outcomes):
    for out in outcomes:
        for case in [key for key in out if " " in key]:
            worst, alike, steps, algorithms, wires, timed, _ = out[case]
            assert worst <= 1.0, (case, worst)
            assert alike and timed and steps == 1, case
            compression, allreduce = case.split()
            wire = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[compression]
            assert wires == [wire]
            if allreduce in ("torus", "masters"):
                assert algorithms == [allreduce]
            if allreduce == "size_switched":
                assert algorithms == ["masters", "ring"]
            if compression == "bf16":
                assert "exchange" in algorithms


def test_sixteen_bits_send_half_the_bytes(outcomes):
    elements = 36 + 1 + 1000 + 37
    for out in outcomes:
        assert out["none ring"][-1] == 4 * elements
        assert out["fp16 ring"][-1] == out["bf16 ring"][-1] == 2 * elements


def test_extreme_values_give_the_same_result_on_all_ranks(outcomes):
    for out in outcomes:
        a, b, c, d, e = out["values"]
        assert a == ["60000.0", "-60000.0"]
        assert b == [repr(2.0**-20), "0.0"]
        assert c == ["inf", "1.0", "nan"]
        assert d == ["inf", "1.0"]
        assert e == ["0.0", "1.0"]


def test_start_with_a_grid_of_another_size_raises(pools):
    settings = {"allreduce": "torus", "options": {"torus_grid": "2x2"}}
    wrong = "--torus_grid=2x2: 2x2 has 4 ranks, but {0} are needed. Use 1x{0}."
    assert pools[2].call(programs.start_error, settings) == [wrong.format(2)] * 2
    with pytest.raises(UserError) as caught:
        comm.start(comm.CommunicationSettings(**settings))
    assert str(caught.value) == wrong.format(1)


def test_hierarchical_on_hosts_with_different_numbers_of_ranks_raises(pools):
    for message in pools[4].call(
        programs.start_error, {"allreduce": "hierarchical"}, ["near", "far", "far", "far"]
    ):
        assert message.startswith(
            "--allreduce=hierarchical: the hosts have different numbers of ranks (near 1, far 3)"
        )
