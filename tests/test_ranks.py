"""Tests that tests are skipped only if they need Horovod and it is not installed."""

import pytest

from hybrid_imagenet.comm.process import ENGINE_VARIABLE
from tests import ranks
from tests.support import program


def connects(engine="horovod"):
    """Has the signature of a function that a test calls on ranks."""


@pytest.mark.parametrize(
    ("function", "arguments", "option", "is_skipped"),
    [
        (connects, [], "", True),
        (connects, ["horovod"], "", True),
        (connects, ["tensorflow"], "", False),
        (lambda: None, [], "", True),
        (lambda: None, [], "tensorflow", False),
    ],
)
def test_pool_without_horovod_skips_calls_that_it_would_connect(
    monkeypatch, function, arguments, option, is_skipped
):
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv(ENGINE_VARIABLE, raising=False)
    if option:
        monkeypatch.setenv(ENGINE_VARIABLE, option)
    pool = ranks.Pool(2)
    monkeypatch.setattr(pool, "_start", lambda: 1 / 0)
    with pytest.raises(pytest.skip.Exception if is_skipped else ZeroDivisionError):
        pool.call(function, *arguments)


def test_command_without_horovod_skips_ranks_that_it_would_connect(monkeypatch):
    monkeypatch.setattr(ranks.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(program, "ENGINE", "horovod")
    assert program.command(1)
    with pytest.raises(pytest.skip.Exception):
        program.command(2)
    monkeypatch.setattr(program, "ENGINE", "tensorflow")
    assert program.command(2)
    with pytest.raises(pytest.skip.Exception):
        program.command(2, launcher="horovodrun")
