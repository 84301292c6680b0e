"""Replaces the training program: `pretend.py CELL_DIRECTORY SECONDS FLAG ...`.

It prints one line of JSON with the times at which it began and ended, and the cores and GPUs that
it may use. The top-1 accuracy is 0.5 + seed / 100, and seed 3 fails.
"""

import json
import os
import pathlib
import sys
import time

from hybrid_imagenet import config
from studies.trial_runs import Cell
from tests.studies import support

began = time.monotonic()
print(os.getpid(), flush=True)
time.sleep(float(sys.argv[2]))
cell = Cell(pathlib.Path(sys.argv[1]), tuple(sys.argv[3:]), 1)
seed = config.resolve(cell.flags).run.seed
support.finish(cell, [0.5, 0.5 + seed / 100])
facts = {"cores": sorted(os.sched_getaffinity(0)), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}
# The facts come before the error.
print(json.dumps({**facts, "began": began, "ended": time.monotonic()}), flush=True)
sys.exit("error: seed 3 fails" if seed == 3 else 0)
