"""A rank without TensorFlow: polite (saves on SIGUSR1, code 75), fails (rank 1 with 3, the other waits) or good."""

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
if manner == "polite":
    signal.signal(signal.SIGUSR1, leave)
follow_launcher()
(pathlib.Path(folder) / str(os.getpid())).touch()
while len(list(pathlib.Path(folder).iterdir())) < 2:
    time.sleep(0.05)
time.sleep(1)
if manner == "fails" and launcher_rank() == 1:
    sys.exit(3)
time.sleep(0 if manner == "good" else 300)
