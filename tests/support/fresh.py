"""Calls programs or imports modules in a new process, and returns which packages that loads."""

import contextlib
import importlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence

from tests.ranks import ROOT

FRAMEWORKS = {"tensorflow", "keras", "horovod", "torch"}


def run(*calls: tuple[str, Sequence[str] | None]) -> tuple[list, set[str], str]:
    """Makes the calls one after the other in one new process.

    Args:
      calls: Names of modules, each with the arguments of its `main`, or None to import it only.

    Returns:
      The exit codes, the packages that are loaded at the end, and what was written to standard
      error.
    """
    command = [sys.executable, "-m", __name__, json.dumps(calls)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    codes, loaded = json.loads(result.stdout)
    return codes, set(loaded), result.stderr


def loaded_by(*modules: str) -> set[str]:
    """Returns the frameworks that importing these modules loads."""
    return run(*((name, None) for name in modules))[1] & FRAMEWORKS


if __name__ == "__main__":
    results = []
    with contextlib.redirect_stdout(io.StringIO()):
        for name, arguments in json.loads(sys.argv[1]):
            module = importlib.import_module(name)
            results.append(None if arguments is None else module.main(arguments))
    print(json.dumps([results, sorted({name.partition(".")[0] for name in sys.modules})]))
