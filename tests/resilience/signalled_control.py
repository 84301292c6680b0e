"""A process that sends itself signals and tells what was asked for: COUNT NAME."""

import os
import signal
import sys
import time

from hybrid_imagenet.resilience.preemption import Control

control = Control()
control.install_signal_handlers()
for _ in range(int(sys.argv[1])):
    os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    time.sleep(0.1)
print(control.word().numpy().tolist())
