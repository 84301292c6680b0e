"""A rank that says its process and waits: `rank.py polite` saves when it is asked to stop, `deaf` does not listen.

`rank.py refuse` leaves with 2 after one line of rank 0.
"""

import os
import signal
import sys
import time


def leave(number, frame):
    time.sleep(0.5)
    os.write(1, b"saved\n")
    sys.exit(75)


if sys.argv[1] == "refuse":
    if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
        print("error: bad", file=sys.stderr)
    sys.exit(2)
signal.signal(signal.SIGUSR1, leave if sys.argv[1] == "polite" else signal.SIG_IGN)
os.write(1, b"ready %d\n" % os.getpid())
for _ in range(300):
    time.sleep(0.1)
