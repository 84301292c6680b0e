"""Observes processes as the operating system sees them, and waits for them."""

import contextlib
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

from hybrid_imagenet.resilience.processes import children, descendants

__all__ = [
    "alive",
    "children",
    "descendants",
    "gone_within",
    "numbers_in",
    "python",
    "small_disk",
    "wait_for",
]


def python(*words: object, **options) -> subprocess.Popen[str]:
    """Starts Python with these arguments in the checkout.

    Standard output and standard error are pipes unless the options set something else.
    """
    settings = {
        "cwd": pathlib.Path(__file__).parents[2],
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    } | options
    return subprocess.Popen([sys.executable, *map(str, words)], **settings)


def alive(process: int) -> bool:
    """Returns whether a process runs, sleeps or is stopped, and is not a zombie."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until a condition holds; fails if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def numbers_in(folder: pathlib.Path, count: int) -> list[int]:
    """Waits until `count` processes have run, and returns their process IDs.

    Each process creates a file in the folder whose name is its ID.
    """
    wait_for(lambda: len(list(folder.iterdir())) >= count, 120)
    return [int(path.name) for path in folder.iterdir()]


def gone_within(processes, seconds: float) -> bool:
    """Waits until none of the processes is alive, and returns whether that was in time."""
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, megabytes: int, *options: str):
    """Mounts a small file system in memory; yields a function that changes its mount options.

    Yields None if this process may not mount a file system.
    """

    def mount(*words: str) -> bool:
        return subprocess.run(["mount", *words, str(folder)], capture_output=True).returncode == 0

    folder.mkdir()
    if not mount("-t", "tmpfs", "-o", ",".join([f"size={megabytes}m", *options]), "none"):
        yield None
        return
    try:
        yield lambda more: mount("-o", f"remount,{more}")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
