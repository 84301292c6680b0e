"""Says in one line that the program was started without its environment; needs the standard library only."""

from __future__ import annotations

import pathlib
import sys


def message(error: ModuleNotFoundError) -> str:
    """Returns what is missing, in which Python, and how to start the program."""
    root = pathlib.Path(__file__).parent.parent
    where = f"cd {root}, " if (root / "launch" / "env.sh").exists() else ""
    setup = "" if (root / ".venv" / "bin" / "activate").exists() else "launch/setup.sh, "
    return (
        f"error: {sys.executable} has no module {error.name}: this Python is not the environment of the program; first "
        f"{where}{setup}. launch/env.sh"
    )
