"""Real commands end as docs/dev/ends.md says when they are stopped."""

import re

import pytest

from tests.support import ends
from tests.support.ends import Case


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ends")
    ends.make_data(made)
    return made


def written():
    """Returns the exit codes and saved steps of the page, by the first three cells of a row."""
    row = re.compile(r"^\| (.+?) \| (.+?) \| (.+?) \| (\d+) \| (.*?) \|", re.MULTILINE)
    return {
        cells[:3]: (int(cells[3]), cells[4])
        for cells in row.findall(ends.PAGE.read_text().partition(ends.SEVERAL)[0])
    }


@pytest.mark.parametrize(
    "case",
    [
        Case(("plan",), ends.START, "INT"),
        Case(ends.TRAIN, ends.LOADING, "INT"),
        Case(ends.TRAIN, ends.TRAINING, ends.TERMINAL),
        Case(ends.RUN, ends.COMPILING, "TERM"),
    ],
    ids=lambda case: f"{case.name}, {case.moment}, {case.stop}",
)
def test_a_command_ends_as_written(case, folder):
    ended = ends.end(case, folder)
    assert (ended.code, ended.saved) == written()[case.key], ended
    assert len(ended.lines) == sum(word in ("INT", "TERM") for word in case.stop.split())
    assert ended.left == ()


@pytest.mark.slow
def test_every_command_ends_as_written(folder):
    ends.train(folder)
    found = {case: ends.end(case, folder) for case in ends.cases()}
    assert {case.key: (end.code, end.saved) for case, end in found.items()} == written()
    assert not [(case, end) for case, end in found.items() if end.left]
    assert not [(case, end) for case, end in found.items() if case.trains and (end.answer or 0) > 2]
