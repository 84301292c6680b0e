"""Tests that the import of TensorFlow prints nothing, and hides nothing that Python prints."""

import os
import re

import pytest

from tests.support.processes import python

GREETING = """
import os, sys
os.write(2, b"native\\n")
print("python", file=sys.stderr)
"""
IMPORT = """
import os, sys
from hybrid_imagenet.cluster.quiet import import_tensorflow
try:
    import_tensorflow()
finally:
    print("after", file=sys.stderr, flush=True)
    os.write(2, b"native after\\n")
"""


def stderr_of(folder, **environ):
    """Returns the standard error of a process that imports `folder`/tensorflow.py quietly."""
    # The module must come before the real one.
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{IMPORT}"
    return python("-c", code, env=os.environ | environ).communicate()[1]


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({}, ""),
        ({"HYBRID_IMAGENET_JOB": "0" * 32}, "native\n"),
    ],
)
def test_import_tensorflow_drops_what_libraries_print_unless_somebody_reads_it(
    environ, first, tmp_path
):
    (tmp_path / "tensorflow.py").write_text(GREETING)
    assert stderr_of(tmp_path, **environ) == f"{first}python\nafter\nnative after\n"


def test_import_tensorflow_that_fails_shows_the_error(tmp_path):
    (tmp_path / "tensorflow.py").write_text(
        f"{GREETING}\nraise ImportError('a library is missing')"
    )
    text = stderr_of(tmp_path)
    assert re.match(r"python\nafter\nnative after\nTraceback", text)
    assert text.endswith("ImportError: a library is missing\n")


def test_import_of_the_installed_tensorflow_prints_nothing():
    code = "from hybrid_imagenet.cluster.quiet import import_tensorflow; import_tensorflow()"
    environ = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    assert python("-c", code, env=environ).communicate()[1] == ""
