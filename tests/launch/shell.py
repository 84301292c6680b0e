"""Starts the shell scripts under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), *(ROOT / "dev").glob("*.sh"), ROOT / ".ci" / "run"])

# Variables that change the scripts, and must not be inherited from the user who runs the tests.
_REMOVED_VARIABLES = (
    "HOSTS",
    "INTERFACE",
    "RANKS",
    "DOCKER",
    "DRY_RUN",
    "HYBRID_IMAGENET_PYTHON",
    "CUDA_HOME",
    "TENSORFLOW",
)


def environment(**variables: str) -> dict[str, str]:
    """Returns the variables for scripts, which use the environment that runs the tests."""
    env = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
    env["HYBRID_IMAGENET_VENV"] = sys.prefix
    return env | variables


def run(
    *command: str | Path, timeout: float = 60, cwd: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a command with `variables` in its environment and returns its exit code and output."""
    return subprocess.run(
        [str(word) for word in command],
        env=environment(**variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


def error_line(result: subprocess.CompletedProcess[str]) -> str:
    """Returns the only line that a script printed on standard error; fails if there is not one."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
