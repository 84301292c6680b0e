"""Processes of a run as the system sees them, and how tests wait for them."""

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
    """Starts Python with these words in the checkout; its output and errors are pipes unless the
    options say else.
    """
    settings = {
        "cwd": pathlib.Path(__file__).parents[2],
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    } | options
    return subprocess.Popen([sys.executable, *map(str, words)], **settings)


def alive(process: int) -> bool:
    """Whether it runs, sleeps or is stopped; not a zombie."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Waits until it holds; fails if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def numbers_in(folder: pathlib.Path, count: int) -> list[int]:
    """The numbers of `count` processes, each of which makes a file of that name in the folder once
    it runs.
    """
    wait_for(lambda: len(list(folder.iterdir())) >= count, 120)
    return [int(path.name) for path in folder.iterdir()]


def gone_within(processes, seconds: float) -> bool:
    """Waits until none of them is alive any more."""
    deadline = time.monotonic() + seconds
    while any(map(alive, processes)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, megabytes: int, *options: str):
    """Mounts a file system in memory; yields a function that changes its options, or None where
    mounting is refused.
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
