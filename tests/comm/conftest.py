"""Ranks that the tests of communication share."""

import pytest

from tests import ranks


@pytest.fixture(scope="package")
def gloo():
    """Four ranks that horovodrun started with Gloo."""
    with ranks.own(4, "gloo") as pool:
        yield pool
