"""Runs a rank without TensorFlow: MANNER FOLDER.

MANNER is how it ends:

- polite, interrupted: it saves on SIGUSR1 and ends with code 75.
- fails: rank 1 ends with code 3, and the other waits.
- killed: rank 1 kills itself, and the other waits.
- good: all ranks end with code 0.
"""

import os
import pathlib
import signal
import sys
import time

from hybrid_imagenet.resilience.launcher import follow_launcher, launcher_rank


def leave(number, frame):
    time.sleep(0.3)
    os.write(1, b"saved\n")
    sys.exit(75)


manner, folder = sys.argv[1:]
if manner in ("polite", "interrupted"):
    signal.signal(signal.SIGUSR1, leave)
follow_launcher()
(pathlib.Path(folder) / str(os.getpid())).touch()
while len(list(pathlib.Path(folder).iterdir())) < 2:
    time.sleep(0.05)
time.sleep(1)
if manner == "fails" and launcher_rank() == 1:
    sys.exit(3)
if manner == "killed" and launcher_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(0 if manner == "good" else 300)
