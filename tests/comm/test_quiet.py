import os
import subprocess
import sys

CODE = """
import os
from hybrid_imagenet.comm.quiet import without_greeting
with without_greeting():
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
    os.write(2, b"I0000 port.cc:153] oneDNN custom operations are on. You may see\\n")
    os.write(2, b"E0000 something that matters\\n")
    if FAIL:
        raise SystemExit("failed inside")
os.write(2, b"after\\n")
"""


def run(fail, **environ):
    done = subprocess.run(
        [sys.executable, "-c", f"FAIL = {fail}\n{CODE}"], env=os.environ | environ, capture_output=True, text=True
    )
    return done.stderr


def test_only_the_greeting_is_held_back():
    assert run(False) == "E0000 something that matters\nafter\n"


def test_an_error_inside_is_seen():
    assert run(True) == "E0000 something that matters\nfailed inside\n"


def test_everything_can_be_seen():
    assert "oneDNN custom operations" in run(False, HYBRID_IMAGENET_TF_LOG="1")
