"""Starts the shell scripts under test."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.rglob("*.sh"), ROOT / ".ci" / "run"])

# Variables that change what the scripts do and must not come from whoever runs the tests.
_OURS = (
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
    """The tests' own environment, with the scripts' directory for environments set to the one that
    runs the tests.
    """
    env = {name: value for name, value in os.environ.items() if name not in _OURS}
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
    """The one line that a script printed on standard error; fails if there are more or none."""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]
