"""Tests processes whose output has no reader, or cannot be written."""

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
      folder: Folder in which the process leaves a proof that it has reached its end.
      shell: A command line with {} for the process.
      ignore_write_errors: Argument of `lossy_stream.install` in the process.
      **options: Arguments of `subprocess.run`.

    Returns:
      The completed shell, and whether the process has reached its end.
    """
    proof = os.open(folder / "proof", os.O_CREAT | os.O_WRONLY)
    (folder / "work.py").write_text(
        WORK.format(ignore_write_errors=ignore_write_errors, proof=proof)
    )
    line = shell.format(f"{sys.executable} {folder / 'work.py'}")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, env=environment, pass_fds=[proof], **options
    )
    os.close(proof)
    return result, (folder / "proof").read_text() == "done"


@pytest.mark.parametrize(
    "shell",
    [
        "{} 2>&1 | true; exit ${{PIPESTATUS[0]}}",
        "{} | head -n 1; exit ${{PIPESTATUS[0]}}",
        "{} >&- 2>&- <&-",
    ],
    ids=["no reader", "head", "closed"],
)
def test_process_whose_output_has_no_reader_continues_and_keeps_its_exit_code(shell, tmp_path):
    result, has_finished = work(tmp_path, shell)
    assert (result.returncode, has_finished) == (75, True), result.stderr[-500:]


def test_process_whose_output_is_read_writes_all_of_it(tmp_path):
    result, _ = work(tmp_path, "{}")
    assert result.stdout == result.stderr == b"".join(b"%d\n" % number for number in range(20000))


LANGUAGE_C = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, b"d\xf6g \\u2013\n"),
        ({"PYTHONIOENCODING": "ascii:strict"}, b"d\\xf6g \\u2013\n"),
        ({"PYTHONIOENCODING": "ascii:surrogateescape"}, b"d\\xf6g \\u2013\n"),
        (LANGUAGE_C, b"d\\xf6g \\u2013\n"),
        ({"PYTHONIOENCODING": "utf-8"}, "d\u00f6g \u2013\n".encode()),
    ],
)
def test_output_outside_the_encoding_is_escaped(variables, expected):
    line = (
        r"from hybrid_imagenet.resilience import lossy_stream as o; o.install(); print('d\u00f6g"
        r" \u2013')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    result = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, env=environment, check=True
    )
    assert result.stdout == expected


@pytest.mark.parametrize("ignore_write_errors", [True, False], ids=["a log", "a result"])
def test_full_disk_ends_a_process_only_if_write_errors_are_not_ignored(
    ignore_write_errors, tmp_path
):
    result, has_finished = work(tmp_path, "{} >/dev/full", ignore_write_errors=ignore_write_errors)
    assert (result.returncode == 75, has_finished) == (ignore_write_errors, ignore_write_errors)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("--version >/dev/full", 1),
        ("plan >/dev/full", 1),
        ("train --print_config >/dev/full", 1),
        ("run -np 2 --dry_run -- --flagfile=digits >/dev/full", 1),
        ("--version >/dev/full 2>&1", 0),
    ],
)
def test_command_that_cannot_write_its_output_prints_one_line_and_exits_with_2(words, lines):
    line = f"{sys.executable} -m hybrid_imagenet {words}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    full = (
        "error: Cannot write to standard output: No space left on device. Redirect it to another"
        " place.\n"
    )
    assert (result.returncode, result.stderr) == (2, full * lines)


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_line_on_standard_error_is_written_before_the_process_ends(unbuffered):
    line = (
        "import os, sys; from hybrid_imagenet.resilience import lossy_stream;"
        " lossy_stream.install(); print('first', file=sys.stderr); os.write(2, b'second')"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    result = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, env=environment, check=True
    )
    assert result.stderr == b"first\nsecond"
