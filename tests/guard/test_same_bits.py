"""Short trainings end with the same bits as recorded.

If a digest changes, the commit must explain why and by how much results differ. `python -m
tests.guard.record` then records the new one.
"""

import pytest

from tests.guard import hashes, record, runs


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded-digits")
    record.write_digits(folder)
    return folder


@pytest.fixture(scope="module")
def expected():
    digests = hashes.load()
    if not digests:
        pytest.skip(
            f"no digests for this kind of machine ({hashes.key()}); see tests/guard/hashes.py"
        )
    return digests


def names():
    for name, run in runs.RUNS.items():
        # Pools have two or four ranks.
        if run.ranks > 1:
            yield pytest.param(name, marks=[] if name in runs.ALWAYS else pytest.mark.slow)


@pytest.mark.parametrize("name", list(names()))
def test_training_ends_with_the_recorded_bits(pools, digits, expected, tmp_path, name):
    digests = pools[runs.RUNS[name].ranks].call(
        runs.digest, name, str(digits), str(tmp_path / "run")
    )
    assert digests[0] == expected[name]


def test_resumed_runs_have_the_digest_of_the_run_without_an_interruption(expected):
    assert len(runs.RESUMED) == 6
    for resumed, whole in runs.RESUMED.items():
        assert expected[resumed] == expected[whole]


def test_hashes_have_a_digest_for_every_guarded_run(expected):
    assert set(expected) == set(runs.RUNS)
