"""Runs a rank with a watchdog but without MPI: FOLDER RANK SIZE LIMIT [HANGING_RANK ...] [busy].

RANK is a number, or `launched` if a launcher sets it. In that case each rank is on its own host.
"""

import json
import pathlib
import random
import sys
import time

from hybrid_imagenet.resilience.launcher import follow_launcher, launcher_rank
from hybrid_imagenet.resilience.watchdog import Watchdog

folder = pathlib.Path(sys.argv[1])
size = int(sys.argv[3])
limit = float(sys.argv[4].rpartition("=")[2])
launched = sys.argv[2] == "launched"
rank = launcher_rank() if launched else int(sys.argv[2])


class FileCommunicator:
    """Implements the methods of a communicator that the watchdog needs, with files."""

    def __init__(self):
        self.rank = rank
        self.size = size
        self.calls = 0
        self.hosts = tuple(f"lab{r + 1}" for r in range(size)) if launched else ("here",) * size

    def allgather_object(self, value):
        self.calls += 1
        path_of_rank = folder / f"{self.calls}-{rank}"
        path_of_rank.with_suffix(".part").write_text(json.dumps(value))
        path_of_rank.with_suffix(".part").rename(path_of_rank)
        paths = [folder / f"{self.calls}-{r}" for r in range(size)]
        while not all(path.exists() for path in paths):
            time.sleep(0.01)
        # All ranks have read the files of the call before the last one.
        if self.calls > 2:
            (folder / f"{self.calls - 2}-{rank}").unlink()
        return [json.loads(path.read_text()) for path in paths]

    def broadcast_object(self, value):
        return self.allgather_object(value)[0]


def step_that_hangs():
    time.sleep(600)


follow_launcher()
communicator = FileCommunicator()
dog = Watchdog(communicator, limit)
dog.start()
generator = random.Random(rank)
for step in range(1, 10**6):
    # Busy ranks have steps of different lengths, some of them long.
    time.sleep(generator.choice((0.01, 0.05, 0.1, limit / 8)) if "busy" in sys.argv else 0.05)
    communicator.allgather_object(None)
    if step == 10 and str(rank) in sys.argv[5:]:
        step_that_hangs()
    dog.record_progress(step)
    if step == 5 and not launched:
        print("training", flush=True)
    if launched and step % 5 == 0:
        (folder / f"training-{rank}").touch()
