"""A rank with a guardian: `python -m tests.resilience.guarded_rank lives|rests SECONDS` prints its process number."""

import sys
import threading
import time

from hybrid_imagenet.resilience.reaper import Guardian


def live(guardian: Guardian) -> None:
    while True:
        guardian.alive()
        time.sleep(0.1)


if __name__ == "__main__":
    guardian = Guardian(1.5)
    guardian.alive()
    if sys.argv[1] == "rests":
        guardian.rest()
    else:
        threading.Thread(target=live, args=[guardian], daemon=True).start()
    print(guardian._process.pid, flush=True)
    time.sleep(float(sys.argv[2]))
