"""Runs a trial's process until Ctrl-C, then leaves with 7: `interrupted.py DIRECTORY`; `child` is that process."""

import pathlib
import subprocess
import sys
import time

from studies import running
from studies.trial_runs import Cell

if sys.argv[1] == "child":
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
try:
    running.run_process(
        Cell(pathlib.Path(sys.argv[1]), (), 2), [sys.executable, "-m", "tests.studies.interrupted", "child"]
    )
except KeyboardInterrupt:
    sys.exit(7)
