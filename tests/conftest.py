"""Options of the test suite."""

import os

import pytest

from hybrid_imagenet.comm.environment import prefer_onednn

prefer_onednn(os.environ)  # tests in this process run the kernels that programs run


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run the long forms of tests")


def pytest_collection_modifyitems(config, items):
    """Leaves the long forms out unless they are asked for."""
    if not config.getoption("--long"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="long form: run with --long"))
