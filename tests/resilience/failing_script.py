"""Fails on one rank of two, without TensorFlow: MANNER RANK FOLDER.

MANNER is how the rank ends: it `raises` an error, calls `sys.exit` with 3 (`exits`) or a text
(`says`), or the import of a module fails (`imports`). Before that, an exit handler is registered
that waits as those of TensorFlow and MPI do. The other rank waits, too, and reports a checkpoint.
"""

import atexit
import importlib
import os
import pathlib
import sys
import time

from hybrid_imagenet.cluster import job_lines

manner, rank, folder = sys.argv[1:]
(pathlib.Path(folder) / str(os.getpid())).touch()
while len(list(pathlib.Path(folder).iterdir())) < 2:
    time.sleep(0.05)
if os.environ["OMPI_COMM_WORLD_RANK"] != rank:
    job_lines.notify_checkpoint()
    time.sleep(300)
time.sleep(1)
if manner == "raises":
    atexit.register(time.sleep, 300)
    raise ValueError("no class 7")
if manner == "exits":
    sys.exit(3)
if manner == "says":
    sys.exit("no more data")
importlib.import_module("no_such_module")
