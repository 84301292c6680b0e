"""Starts real ranks for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
ROOT = Path(__file__).parents[2]


def run(ranks: int, code: str, *, timeout: float = 120, environ: dict[str, str] | None = None, launcher=()):
    """Runs Python code on several ranks of this machine; returns the finished process with its output as text."""
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OPAL_PREFIX": sys.prefix,
        "PYTHONPATH": str(ROOT),
    }
    start = [str(MPIRUN), "--oversubscribe", "--bind-to", "none", *launcher, "-np", str(ranks)] if ranks else []
    return subprocess.run(
        [*start, sys.executable, "-c", code],
        env=env | (environ or {}),
        cwd=ROOT,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


def results(ranks: int, code: str, **options) -> list:
    """Runs code that calls `report(value)` once on each rank; returns the values in the order of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        head = (
            "import json, os\n"
            "def report(value):\n"
            "    rank = os.environ.get('OMPI_COMM_WORLD_RANK', '0')\n"
            f"    open(f'{folder}/{{rank}}', 'w').write(json.dumps(value))\n"
        )
        done = run(ranks, head + code, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(max(ranks, 1))]
