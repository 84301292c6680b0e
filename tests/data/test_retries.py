"""Tests when a request to a server is repeated, and when it fails."""

import time

import pytest

from hybrid_imagenet.data import remote
from hybrid_imagenet.data.remote import Retries
from hybrid_imagenet.errors import StorageError


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(remote, "_RETRY_DELAYS_SECONDS", (0.01,))


class Request:
    """Replaces a request whose attempts take a number of seconds each, and then fail or succeed."""

    def __init__(self, *attempts):
        self.attempts = attempts
        self.num_attempts = 0

    def __call__(self):
        seconds, error = self.attempts[min(self.num_attempts, len(self.attempts) - 1)]
        self.num_attempts += 1
        time.sleep(seconds)
        if error is not None:
            raise error
        return self.num_attempts


BROKEN = OSError("the connection broke")


def test_retries_repeat_a_slow_transfer_that_breaks_once():
    assert Retries(0.2)(Request((0.4, BROKEN), (0.4, None)), "file") == 2


def test_retries_count_a_request_that_never_ends_as_failed(monkeypatch):
    monkeypatch.setattr(remote, "_MIN_REQUEST_SECONDS", 0.1)
    with pytest.raises(StorageError, match=r"not done after 0\.1 seconds"):
        Retries(0.05)(Request((60, None)), "file")


def test_retries_give_a_request_with_patience_more_time(monkeypatch):
    monkeypatch.setattr(remote, "_MIN_REQUEST_SECONDS", 0.1)
    assert Retries(0.05)(Request((0.3, None)), "file", patience=100) == 1


@pytest.mark.parametrize("error", [FileNotFoundError("x"), PermissionError("x")])
def test_retries_do_not_repeat_a_permanent_error(error):
    request = Request((0, error))
    with pytest.raises(FileNotFoundError, match="place"):
        Retries(5)(request, "place")
    assert request.num_attempts == 1


def test_retries_end_after_the_timeout_and_warn_once_per_outage(caplog):
    retries = Retries(0.2)
    request = Request((0, BROKEN))
    began = time.monotonic()
    with pytest.raises(
        StorageError, match=r"file has failed for --storage_timeout=0\.2 seconds .*broke"
    ):
        retries(request, "file")
    assert time.monotonic() - began >= 0.2
    assert request.num_attempts > 2
    assert caplog.text.count("trying again") == 1
    assert retries(Request((0, None)), "file") == 1
    assert retries(Request((0, BROKEN), (0, None)), "file") == 2
    assert caplog.text.count("trying again") == 2
