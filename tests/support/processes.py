"""Processes of a run as the system sees them."""

import contextlib
import pathlib
import subprocess
import time

from hybrid_imagenet.resilience.processes import children, descendants

__all__ = ["alive", "children", "descendants", "gone_within", "ranks", "small_disk"]


def ranks(launcher: int) -> dict[int, int]:
    """Process number by the rank that Open MPI gave it."""
    found = {}
    for process in children(launcher):
        variables = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        found[int(next(v.partition(b"=")[2] for v in variables if v.startswith(b"OMPI_COMM_WORLD_RANK=")))] = process
    return found


def alive(process: int) -> bool:
    """Whether it runs, sleeps or is stopped; not a zombie."""
    try:
        state = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


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
    """Mounts a file system in memory; yields a function that changes its options, or None where mounting is refused."""

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
