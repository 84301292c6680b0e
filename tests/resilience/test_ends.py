"""Tests that real commands end as tests/ends.csv describes when they are stopped."""

import csv

import pytest

from tests.support import ends
from tests.support.ends import Case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    data_folder = tmp_path_factory.mktemp("ends")
    ends.make_data(data_folder)
    return data_folder


def documented_ends():
    """Returns the exit codes and saved steps of the table, by the first three cells of a row."""
    with ends.TABLE.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        assert tuple(next(reader)) == ends.COLUMNS
        return {tuple(cells[:3]): (int(cells[3]), cells[4]) for cells in reader}


def test_table_of_ends_has_each_case_in_order():
    assert list(documented_ends()) == [case.key for case in ends.cases()]


@pytest.mark.parametrize(
    "case",
    [
        Case(("plan",), ends.START, "INT"),
        Case(ends.TRAIN, ends.LOADING, "INT"),
        Case(ends.RUN, ends.COMPILING, "TERM"),
    ],
    ids=lambda case: f"{case.name}, {case.moment}, {case.stop}",
)
def test_command_that_is_stopped_ends_as_documented(case, folder):
    end = ends.end(case, folder)
    assert (end.code, end.saved) == documented_ends()[case.key], end
    assert len(end.lines) == sum(word in ("INT", "TERM") for word in case.stop.split())
    assert end.left == ()


@pytest.mark.slow
def test_every_command_that_is_stopped_ends_as_documented(folder):
    ends.train(folder)
    results = {case: ends.end(case, folder) for case in ends.cases()}
    codes = {case.key: (end.code, end.saved) for case, end in results.items()}
    assert codes == documented_ends()
    assert not [(case, end) for case, end in results.items() if end.left]
    slow_answers = [
        (case, end) for case, end in results.items() if case.trains and (end.answer or 0) > 2
    ]
    assert not slow_answers
