"""Fixtures of the tests of the library."""

import pytest

from hybrid_imagenet.resilience.stop_signals import REQUESTS


@pytest.fixture(autouse=True)
def _signals_of_a_failed_fit_end(process_state_is_restored):
    """Restores the signal handlers of a `fit` with `Checkpoint` that has raised an exception.

    No callback is called then. The handlers that are left end the process, as the earlier ones do.
    """
    yield
    REQUESTS.end()
