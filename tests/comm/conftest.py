"""Ranks that the tests of communication share."""

import pytest


@pytest.fixture(scope="package")
def gloo(pools):
    """Four ranks that horovodrun started with Gloo; nobody else calls them."""
    yield pools["gloo"]
    pools["gloo"].close()
