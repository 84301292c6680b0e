"""Starts real ranks for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
HOROVODRUN = Path(sys.prefix) / "bin" / "horovodrun"
ROOT = Path(__file__).parents[1]


def run(ranks: int, code: str, *, timeout: float = 300, gloo: bool = False):
    """Runs Python code on several ranks of this machine; returns the finished process with its output as text.

    Args:
      ranks: number of ranks; 0 starts a single process without a launcher.
      code: what each rank runs.
      timeout: seconds.
      gloo: starts horovodrun with Gloo instead of mpirun.
    """
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OPAL_PREFIX": sys.prefix,
        "PYTHONPATH": str(ROOT),
    }
    launcher = [str(HOROVODRUN), "--gloo"] if gloo else [str(MPIRUN), "--oversubscribe", "--bind-to", "none"]
    start = [*launcher, "-np", str(ranks)] if ranks else []
    with tempfile.NamedTemporaryFile("w", suffix=".py") as program:
        program.write(code)
        program.flush()
        return subprocess.run(
            [*start, sys.executable, program.name],
            env=env,
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
            "    rank = os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('HOROVOD_RANK', '0'))\n"
            f"    open(f'{folder}/{{rank}}', 'w').write(json.dumps(value))\n"
        )
        done = run(ranks, head + code, **options)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(max(ranks, 1))]
