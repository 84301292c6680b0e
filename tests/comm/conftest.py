"""What ranks that Gloo connects come to, for several tests."""

import pytest

from tests.comm import programs


@pytest.fixture(scope="package")
def gloo(pools):
    """What each of four ranks has of one start."""
    outcomes = pools["gloo"].call(programs.once)
    pools["gloo"].close()
    return outcomes
