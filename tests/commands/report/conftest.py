import pytest

from tests.commands.report.synthetic import make_run


@pytest.fixture
def runs(tmp_path):
    """Writes two synthetic runs: an unfinished one with few values, and a complete one."""
    make_run(tmp_path / "one", world_size=1, recipe="goyal", finished=False, epochs=9, full=False)
    make_run(tmp_path / "two", world_size=2)
    return [str(tmp_path / "one"), str(tmp_path / "two")]
