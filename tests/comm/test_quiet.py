import os
import subprocess
import sys

from tests.ranks import ROOT


def run(outcome, **environ):
    done = subprocess.run(
        [sys.executable, "-m", "tests.comm.greeting", outcome],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )
    return done.stderr


def test_only_the_greeting_is_held_back():
    assert run("succeed") == "E0000 something that matters\nafter\n"


def test_an_error_inside_is_seen():
    assert run("fail") == "E0000 something that matters\nfailed inside\n"


def test_everything_can_be_seen():
    assert "oneDNN custom operations" in run("succeed", HYBRID_IMAGENET_TF_LOG="1")
