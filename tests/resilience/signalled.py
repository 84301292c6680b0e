"""Sends itself signals: NAME... After each one it prints whether a stop is requested."""

import os
import signal
import sys
import time

from hybrid_imagenet.resilience.stop_signals import REQUESTS

REQUESTS.install()
REQUESTS.begin()
for name in sys.argv[1:]:
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.3)
    print(REQUESTS.stop, flush=True)
