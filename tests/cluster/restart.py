"""Restarts itself with huge pages and prints the result: `restart.py HUGE_PAGES ARGUMENT...`."""

import os
import sys
from pathlib import Path

from hybrid_imagenet.cluster import environment

environment.HUGE_PAGES = Path(sys.argv[1])
before = os.getpid()
environment.restart_with_huge_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[2:], before == os.getpid(), flush=True)
