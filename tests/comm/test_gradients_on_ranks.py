"""Tests the mean of gradients over real ranks: dtypes, extreme values, algorithms, wrong input."""

import pytest

from hybrid_imagenet import comm
from hybrid_imagenet.errors import UserError
from tests.comm import programs


@pytest.fixture(
    scope="module", params=["horovod", pytest.param("tensorflow", marks=pytest.mark.slow)]
)
def outcomes(pools, request):
    engine = request.param
    return pools["tensorflow" if engine == "tensorflow" else 4].call(programs.reductions, engine)


def test_reduce_on_ranks_is_within_the_rounding_of_the_wire_dtype(outcomes):
    for out in outcomes:
        for case in [key for key in out if " " in key]:
            worst, are_equal, steps, algorithms, wires, is_timed, _ = out[case]
            assert worst <= 1.0, (case, worst)
            assert are_equal and is_timed and steps == 1, case
            compression, allreduce = case.split()
            wire = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[compression]
            assert wires == [wire]
            if allreduce in ("torus", "masters"):
                assert algorithms == [allreduce]
            if allreduce == "size_switched":
                assert algorithms == ["masters", "ring"]
            if compression == "bf16":
                assert "exchange" in algorithms


def test_reduce_on_ranks_in_sixteen_bits_sends_half_the_bytes(outcomes):
    elements = 36 + 1 + 1000 + 37
    for out in outcomes:
        assert out["none ring"][-1] == 4 * elements
        assert out["fp16 ring"][-1] == out["bf16 ring"][-1] == 2 * elements


def test_reduce_on_ranks_of_extreme_values_is_the_same_on_all_ranks(outcomes):
    for out in outcomes:
        a, b, c, d, e = out["values"]
        assert a == ["60000.0", "-60000.0"]
        assert b == [repr(2.0**-20), "0.0"]
        assert c == ["inf", "1.0", "nan"]
        assert d == ["inf", "1.0"]
        assert e == ["0.0", "1.0"]


def test_start_with_a_grid_of_another_size_raises(pools):
    settings = {"allreduce": "torus", "options": {"torus_grid": "2x2"}}
    expected = "--torus_grid=2x2: 2x2 has 4 ranks, but {0} are needed. Use 1x{0}."
    assert pools[2].call(programs.start_error, settings) == [expected.format(2)] * 2
    with pytest.raises(UserError) as error:
        comm.start(programs.communication_settings(**settings))
    assert str(error.value) == expected.format(1)


def test_start_with_hierarchical_on_hosts_with_different_numbers_of_ranks_raises(pools):
    for message in pools[4].call(
        programs.start_error, {"allreduce": "hierarchical"}, ["near", "far", "far", "far"]
    ):
        assert message.startswith(
            "--allreduce=hierarchical: the hosts have different numbers of ranks (near 1, far 3)"
        )
