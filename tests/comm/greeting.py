"""Writes what TensorFlow writes when it starts: `python -m tests.comm.greeting succeed|fail`."""

import os
import sys

from hybrid_imagenet.comm.quiet import without_greeting

if __name__ == "__main__":
    with without_greeting():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"I0000 port.cc:153] oneDNN custom operations are on. You may see\n")
        os.write(2, b"E0000 something that matters\n")
        if sys.argv[1] == "fail":
            raise SystemExit("failed inside")
    os.write(2, b"after\n")
