"""A rank that says its process and waits; it saves when it is asked to stop."""

import os
import signal
import sys
import time


def leave(number, frame):
    time.sleep(0.5)
    os.write(1, b"saved\n")
    sys.exit(75)


signal.signal(signal.SIGUSR1, leave)
os.write(1, b"ready %d\n" % os.getpid())
for _ in range(300):
    time.sleep(0.1)
