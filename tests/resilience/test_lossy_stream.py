"""Processes whose output has no reader, or cannot be written."""

import os
import subprocess
import sys

import pytest

from tests.ranks import ROOT

WORK = """
import os, sys
from hybrid_imagenet.resilience import lossy_stream
lossy_stream.install(ignore_write_errors={ignore_write_errors})
for number in range(20000):
    print(number)
    print(number, file=sys.stderr)
os.write({proof}, b"done")
sys.exit(75)
"""


def work(folder, shell, *, ignore_write_errors=False, **options):
    """Runs a process that prints much and ends with code 75.

    Args:
      folder: where the process leaves a proof that it has reached its end.
      shell: a command line with {} for the process.
      ignore_write_errors: argument of `lossy_stream.install` in the process.
      **options: arguments of `subprocess.run`.

    Returns:
      the completed shell, and whether the process has reached its end.
    """
    proof = os.open(folder / "proof", os.O_CREAT | os.O_WRONLY)
    (folder / "work.py").write_text(
        WORK.format(ignore_write_errors=ignore_write_errors, proof=proof)
    )
    line = shell.format(f"{sys.executable} {folder / 'work.py'}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, env=environment, pass_fds=[proof], **options
    )
    os.close(proof)
    return done, (folder / "proof").read_text() == "done"


@pytest.mark.parametrize(
    "shell",
    [
        "{} 2>&1 | true; exit ${{PIPESTATUS[0]}}",
        "{} | head -n 1; exit ${{PIPESTATUS[0]}}",
        "{} >&- 2>&- <&-",
    ],
    ids=["no reader", "head", "closed"],
)
def test_a_process_continues_and_keeps_its_exit_code_when_its_output_has_no_reader(shell, tmp_path):
    done, has_finished = work(tmp_path, shell)
    assert (done.returncode, has_finished) == (75, True), done.stderr[-500:]


def test_a_reader_gets_the_complete_output(tmp_path):
    done, _ = work(tmp_path, "{}")
    assert done.stdout == done.stderr == b"".join(b"%d\n" % number for number in range(20000))


LANGUAGE_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("variables", "written"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, b"d\xf6g \\u2013\n"),
        ({"PYTHONIOENCODING": "ascii:strict"}, b"d\\xf6g \\u2013\n"),
        ({"PYTHONIOENCODING": "ascii:surrogateescape"}, b"d\\xf6g \\u2013\n"),
        (LANGUAGE_C, b"d\\xf6g \\u2013\n"),
        ({"PYTHONIOENCODING": "utf-8"}, "d\u00f6g \u2013\n".encode()),
    ],
)
def test_characters_outside_the_encoding_are_escaped(variables, written):
    line = (
        r"from hybrid_imagenet.resilience import lossy_stream as o; o.install(); print('d\u00f6g"
        r" \u2013')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, env=environment, check=True
    )
    assert done.stdout == written


@pytest.mark.parametrize("ignore_write_errors", [True, False], ids=["a log", "a result"])
def test_a_full_disk_ends_only_a_process_that_prints_its_results(ignore_write_errors, tmp_path):
    done, has_finished = work(tmp_path, "{} >/dev/full", ignore_write_errors=ignore_write_errors)
    assert (done.returncode == 75, has_finished) == (ignore_write_errors, ignore_write_errors)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--version >/dev/full", 1),
        ("plan >/dev/full", 1),
        ("train --print_config >/dev/full", 1),
        ("--version >/dev/full 2>&1", 0),
    ],
)
def test_a_command_that_cannot_write_its_output_ends_with_one_line_and_code_2(words, lines):
    line = f"{sys.executable} -m hybrid_imagenet {words}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    full = (
        "error: Cannot write to standard output: No space left on device. Redirect it to another"
        " place.\n"
    )
    assert (done.returncode, done.stderr) == (2, full * lines)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_on_standard_error_appears_before_the_process_ends(unbuffered):
    line = (
        "import os, sys; from hybrid_imagenet.resilience import lossy_stream;"
        " lossy_stream.install(); print('first', file=sys.stderr); os.write(2, b'second')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, env=environment, check=True
    )
    assert done.stderr == b"first\nsecond"
