"""Tests of `bench allreduce` without ranks."""

import pytest

from hybrid_imagenet.benchmarks import allreduce
from hybrid_imagenet.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4096", 4096), ("64K", 2**16), ("1m", 2**20), ("64MB", 2**26), ("2GiB", 2**31)],
)
def test_parse_size(text, expected):
    assert allreduce.parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "3", "1.5M", "4T"])
def test_parse_size_of_invalid_text_raises(text):
    with pytest.raises(UserError, match="Use at least 4 bytes, as in 64K"):
        allreduce.parse_size(text)


def test_bandwidth_is_defined_as_in_nccl_tests():
    row = allreduce._row(4, "ring", "fp16", 8_000_000, 4_000_000, 0.002)
    assert (row["bytes"], row["wire_bytes"], row["ranks"]) == (8_000_000, 4_000_000, 4)
    assert row["algbw_gb_s"] == pytest.approx(2.0)
    assert row["busbw_gb_s"] == pytest.approx(2.0 * 2 * 3 / 4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--algorithms=star"], "--algorithms=star is not valid, because there is no star."),
        (["--compression=fp8"], "--compression=fp8"),
        (["--engines=gloo"], "there is no gloo. Choose from horovod, tensorflow."),
        (["--sizes="], "need at least one value"),
    ],
)
def test_main_with_invalid_options_raises(words, message):
    with pytest.raises(UserError, match=message):
        allreduce.main(words)


def test_main_on_one_rank_raises():
    with pytest.raises(UserError, match="Start it as hybrid-imagenet run"):
        allreduce.main(["--sizes=4K"])
