"""Tests that the messages of TensorFlow's start are dropped, and others are not."""

import os

from tests.support.processes import python

LINES = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
    "I0000 00:00:1 7 port.cc:153] oneDNN custom operations are on. You may see",
    "E0000 something that matters",
)


def stderr_of(end, **environ):
    """Returns the standard error of a process that writes LINES in `filter_stderr`, then `end`."""
    code = (
        "import os\n"
        "from hybrid_imagenet.comm.quiet import TENSORFLOW_GREETINGS, filter_stderr\n"
        "with filter_stderr(TENSORFLOW_GREETINGS):\n"
        f"    os.write(2, {os.linesep.join((*LINES, '')).encode()!r})\n"
        f"    {end}\n"
        "os.write(2, b'after')\n"
    )
    return python("-c", code, env=os.environ | environ).communicate()[1]


def test_filter_stderr_drops_only_the_greeting_of_tensorflow():
    assert stderr_of("pass") == f"{LINES[2]}\nafter"
    assert stderr_of("pass", HYBRID_IMAGENET_TF_LOG="1") == "\n".join((*LINES, "after"))


def test_filter_stderr_of_a_process_that_aborts_keeps_other_lines():
    assert stderr_of("os.abort()") == f"{LINES[2]}\n"
