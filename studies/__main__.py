"""`python -m studies NAME`, from a checkout."""

import os
import sys

from studies.command import main

try:
    code = main(sys.argv[1:])
    sys.stdout.flush()
except BrokenPipeError:  # the reader of the list, such as `head`, has seen enough
    os._exit(0)
sys.exit(code)
