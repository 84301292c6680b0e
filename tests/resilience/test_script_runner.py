"""Tests scripts that fail on one rank of `hybrid-imagenet run`."""

import subprocess
import sys

import pytest

from hybrid_imagenet.errors import EXIT_NUMERICS
from hybrid_imagenet.resilience import script_runner
from tests.support import processes, program

SCRIPT = "tests/resilience/failing_script.py"
LINES = {
    ("raises", "1"): (1, "failed: ValueError: no class 7"),
    ("raises", "0"): (1, "failed: ValueError: no class 7"),
    ("exits", "1"): (3, "exited with code 3 (sys.exit)"),
    ("says", "1"): (1, "exited with code 1 (sys.exit): no more data"),
    ("imports", "1"): (1, "failed: ModuleNotFoundError: No module named 'no_such_module'"),
}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Returns the exit code and standard error of each job, which run at the same time."""
    jobs = {}
    for case in LINES:
        words = ["-m", "hybrid_imagenet", "run", "-np", "2", SCRIPT, *case]
        folder = tmp_path_factory.mktemp("ranks")
        process = processes.python(
            *words, folder, env=program.environment(), start_new_session=True
        )
        jobs[case] = process, folder
    results = {}
    for case, (process, folder) in jobs.items():
        _, errors = process.communicate(timeout=100)
        assert not any(map(processes.alive, processes.numbers_in(folder, 2)))
        results[case] = process.returncode, errors, folder
    return results


@pytest.mark.parametrize("case", LINES)
def test_job_whose_script_fails_names_the_rank_and_the_next_command(case, outputs):
    code, errors, folder = outputs[case]
    expected_code, reason = LINES[case]
    manner, rank = case
    assert code == expected_code, errors
    *before, last = errors.splitlines()
    if code != EXIT_NUMERICS:
        # The message of a training that diverged says what to change first.
        assert last == f"next: hybrid-imagenet run -np 2 {SCRIPT} {manner} {rank} {folder}"
        *before, last = before
    assert last.startswith(f"error: rank {rank} on ")
    assert last.endswith(reason)
    if manner in ("raises", "imports"):
        first, header, frame = before[:3]
        assert f"error: {first}" == last
        assert header == "Traceback (most recent call last):"
        # The frames that run the script are not shown.
        assert SCRIPT in frame
    else:
        assert before == (["no more data"] if manner == "says" else [])


def test_main_runs_a_script_as_python_does(tmp_path):
    (tmp_path / "neighbor.py").write_text("VALUE = 5\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import pickle, sys, neighbor\n"
        "class Local: pass\n"
        "print(__name__, __file__, sys.argv[1:], neighbor.VALUE, '' in sys.path)\n"
        "print(type(pickle.loads(pickle.dumps(Local()))) is Local)\n"
    )
    words = [sys.executable, "-P", "-m", script_runner.__name__, "script.py", "--x", "--", "y"]
    run = {"cwd": tmp_path, "capture_output": True, "text": True, "env": program.environment()}
    done = subprocess.run(words, **run)
    assert done.stdout == f"__main__ {script} ['--x', '--', 'y'] 5 False\nTrue\n", done.stderr
