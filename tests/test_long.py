"""The table of what only --long runs names every such test, and no other."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
ROWS = set(
    re.findall(r"^\| `(\S+)::(\w+)` \|", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
)


def test_every_test_of_the_table_exists():
    assert len(ROWS) > 5
    for path, name in ROWS:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_the_table_is_that_of_the_tests(request):
    """Holds for those that were collected: all of them, if no files are given on the command
    line.
    """
    collected, slow = set(), set()
    for item in request.session.items:
        name = item.path.relative_to(ROOT).as_posix(), item.originalname
        collected.add(name)
        if "slow" in item.keywords:
            slow.add(name)
    assert slow - ROWS == set(), "add them to tests/README.md"
    assert ROWS & collected - slow == set(), "remove them from tests/README.md"
