"""Tests that the table of tests that only --long runs lists these tests and no others."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
ROWS = set(
    re.findall(r"^\| `(\S+)::(\w+)` \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
)


def test_table_of_long_tests_names_existing_tests():
    assert len(ROWS) > 5
    for path, name in ROWS:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_table_of_long_tests_equals_the_slow_marks(request):
    # Only collected tests can be compared. These are all tests if no files are on the command line.
    collected = set()
    slow = set()
    for item in request.session.items:
        name = item.path.relative_to(ROOT).as_posix(), item.originalname
        collected.add(name)
        if "slow" in item.keywords:
            slow.add(name)
    assert slow - ROWS == set(), "add them to tests/README.md"
    assert ROWS & collected - slow == set(), "remove them from tests/README.md"
