import os
import pathlib

import pytest

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import run_dir
from hybrid_imagenet.runlog.run_dir import RunDirectory, free_name, latest_name
from tests.support.promptly import promptly


def test_run_directory_with_a_run_needs_resume(tmp_path):
    path = tmp_path / "run"
    first = RunDirectory(path, resume=False)
    first.write_json("config.json", {"a": 1})
    first._lock.close()
    with pytest.raises(UserError, match="--resume"):
        RunDirectory(path, resume=False)
    again = RunDirectory(path, resume=True)
    assert again.resumed
    assert (path / "config.json").read_text() == '{\n  "a": 1\n}\n'


def test_run_directory_with_other_files_raises(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(UserError, match=r"thesis\.txt"):
            RunDirectory(tmp_path, resume=resume)


def test_run_directory_does_not_write_to_the_target_of_a_linked_lock(tmp_path):
    other = tmp_path / "thesis.txt"
    other.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(other)
    # A directory under /proc cannot be created.
    for path in (tmp_path / "run", pathlib.Path("/proc/self/run")):
        with pytest.raises(
            UserError,
            match=f"^--run_dir={path} cannot be used: .*Pass a directory",
        ):
            RunDirectory(path, resume=False)
    assert other.read_text() == "mine"


def test_free_name_and_latest_name_count_existing_directories(tmp_path):
    base = tmp_path / "hybrid-digits"
    assert free_name(base) == latest_name(base) == base
    base.mkdir()
    assert free_name(base).name == "hybrid-digits-2"
    assert latest_name(base) == base
    free_name(base).mkdir()
    assert latest_name(base).name == "hybrid-digits-2"
    assert free_name(base).name == "hybrid-digits-3"
    with pytest.raises(UserError, match="--run_dir=gs://b/run is a URL, but a local path"):
        run_dir.choose_directory("gs://b/run", "hybrid", "digits")


@pytest.mark.parametrize("name", ["lock", "config.json", "metrics.jsonl"])
def test_run_directory_with_a_fifo_instead_of_a_file_does_not_wait(tmp_path, name):
    run = RunDirectory(tmp_path, resume=False)
    run.write_json("config.json", {})
    run.release()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    error = promptly(lambda: RunDirectory(tmp_path, resume=True))
    if name != "lock":
        assert error == f"--run_dir={tmp_path}: {name} is not a regular file. Move it away."


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("hybrid-digts", "hybrid-digits", True),
        ("phtoos", "photos", True),
        ("hybriddigits", "hybrid-digits", True),
        ("lars-2", "lars-3", False),
        ("wd1e-4", "wd1e-5", False),
        ("adam", "adamw", False),
    ],
)
def test_check_directory_suggests_a_run_with_a_similar_name(tmp_path, one, other, alike):
    RunDirectory(tmp_path / other, resume=False).write_json("config.json", {})
    if alike:
        with pytest.raises(UserError, match=f"does not exist. Did you mean .*{other}"):
            run_dir.check_directory(tmp_path / one, resume=True)
    else:
        assert run_dir.check_directory(tmp_path / one, resume=True) == "new"
    assert run_dir.check_directory(tmp_path / one, resume=False) == "new"
    assert not (tmp_path / one).exists()


@pytest.mark.parametrize(
    "name", ["link", "link/run", "parent/link/run", f"new/{'x' * 300}"], ids=lambda name: name[:20]
)
def test_check_directory_that_cannot_be_created_raises_the_error_of_a_run(tmp_path, name):
    (tmp_path / "parent").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    (tmp_path / "parent" / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(UserError, match=r"cannot be used: .* Pass a directory"):
        run_dir.check_directory(tmp_path / name, resume=False)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["link", "link", "parent"]


def test_check_directory_in_a_new_directory_leaves_nothing_behind(tmp_path):
    assert run_dir.check_directory(tmp_path / "new" / "run", resume=False) == "new"
    assert not list(tmp_path.iterdir())


def test_check_directory_raises_the_errors_of_a_run_and_changes_nothing(tmp_path):
    lock_owner = RunDirectory(tmp_path / "held", resume=False)
    with pytest.raises(UserError, match="in use by another run"):
        run_dir.check_directory(tmp_path / "held", resume=False)
    lock_owner.release()
    assert run_dir.check_directory(tmp_path / "held", resume=False) == "empty"
    lock_owner.write_json("config.json", {})
    assert run_dir.check_directory(tmp_path / "held", resume=True) == "holds a run"
    with pytest.raises(UserError, match="Add --resume"):
        run_dir.check_directory(tmp_path / "held", resume=False)
    for path in (tmp_path / "held" / "config.json", tmp_path / "held" / "config.json" / "below"):
        with pytest.raises(UserError, match=r"config\.json is not a directory"):
            run_dir.check_directory(path, resume=False)
