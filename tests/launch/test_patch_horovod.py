"""Tests that the changes to Horovod's source are all made, or one line prints the reason."""

import runpy
import subprocess
import sys

import pytest

from tests.launch.shell import LAUNCH

PROGRAM = LAUNCH / "patch_horovod.py"


def patch(folder):
    return subprocess.run(
        [sys.executable, str(PROGRAM), str(folder)], capture_output=True, text=True
    )


@pytest.fixture
def changes():
    """Returns the changes that the program makes."""
    return runpy.run_path(str(PROGRAM))["CHANGES"]


def make_source(folder, changes):
    for name, text, _ in changes:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"before {text} after\n")


def test_notice_names_every_file_of_horovod_that_is_changed(changes):
    notice = (LAUNCH.parent / "NOTICE").read_text()
    assert {name for name, _, _ in changes} == {
        line.strip()
        for line in notice.splitlines()
        if line.startswith("   ") and "/" in line and " " not in line.strip()
    }
    assert "Apache License" in (LAUNCH.parent / "LICENSE").read_text()


def test_patch_horovod_makes_every_change(tmp_path, changes):
    make_source(tmp_path, changes)
    result = patch(tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    for name, text, replacement in changes:
        content = (tmp_path / name).read_text()
        assert replacement in content
        assert not (text not in ("", "$") and f"before {text} after" in content)
    assert (tmp_path / "horovod/tensorflow/xla_mpi_ops.cc").read_text() == ""


@pytest.mark.parametrize("number", range(3))
def test_patch_horovod_rejects_another_version_in_one_line(tmp_path, changes, number):
    make_source(tmp_path, changes)
    name, text, _ = [change for change in changes if change[1] not in ("", "$")][number]
    path = tmp_path / name
    path.write_text(path.read_text().replace(text, text * 2))
    result = patch(tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"error: {name} is not as in Horovod 0.28.1" in result.stderr
