"""Tests the contents of the source distribution and the wheel."""

import subprocess
import sys
import tarfile
import zipfile

import pytest

from tests.launch.shell import ROOT


def test_sdist_contains_exactly_the_files_of_the_repository(tmp_path):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout of git")
    # setuptools writes only to tmp_path, so the checkout does not change.
    command = [
        "egg_info",
        f"--egg-base={tmp_path}",
        "sdist",
        "--formats=tar",
        f"--dist-dir={tmp_path}",
    ]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=ROOT, check=True, capture_output=True
    )
    (path,) = tmp_path.glob("*.tar")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).exists()}
    generated = {name for name in names if ".egg-info/" in name} | {"PKG-INFO", "setup.cfg"}
    assert tracked <= names
    new = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert names - tracked - generated <= set(new.stdout.splitlines())


def test_wheel_contains_the_files_that_the_program_reads(tmp_path):
    # setuptools writes only to tmp_path, so the checkout does not change.
    command = [
        "egg_info",
        f"--egg-base={tmp_path}",
        "build",
        f"--build-base={tmp_path / 'build'}",
        "bdist_wheel",
        f"--dist-dir={tmp_path}",
        f"--bdist-dir={tmp_path / 'wheel'}",
    ]
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=ROOT, check=True, capture_output=True
    )
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
    package = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "hybrid_imagenet").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    shipped = {
        f"hybrid_imagenet/{folder}/{file.name}"
        for folder in ("flags", "examples")
        for file in (ROOT / folder).iterdir()
        if file.is_file()
    }
    assert {name for name in names if ".dist-info/" not in name} == package | shipped
