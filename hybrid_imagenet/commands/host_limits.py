"""Checks what Open MPI needs on this host, before it starts ranks.

Without these checks, Open MPI would print many lines about its internals, or wait forever.
"""

from __future__ import annotations

import os
import pathlib
import resource
import socket
import tempfile

from hybrid_imagenet.cluster import hosts
from hybrid_imagenet.errors import UserError

# Open MPI 4.1 shares segments of 4 MiB between processes as files in TMPDIR.
MIN_FILE_BYTES = 8 << 20


def check(interface: str = "") -> None:
    """Checks the file size limit, the network interfaces and the temporary directory.

    Args:
      interface: `--network_interfaces`, or "".

    Raises:
      UserError: If Open MPI cannot start ranks on this host.
    """
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < MIN_FILE_BYTES:
        raise UserError(
            f"This shell limits files to {limit >> 10} KiB, but Open MPI shares memory between"
            " ranks in files of 4 MiB, and checkpoints are larger. Run ulimit -f unlimited first."
        )
    if not hosts.all_interfaces():
        raise UserError(
            "This host has no network interface with an address, not even loopback, which ranks"
            " need to find each other. Run ip link set lo up, or start the container with a"
            " network."
        )
    names = sorted(name for _, name in socket.if_nameindex())
    # eth0:1 is a second address of eth0.
    if interface and interface.partition(":")[0] not in names:
        raise UserError(
            f"--network_interfaces={interface} does not exist on this host. Choose one of"
            f" {', '.join(names)}."
        )
    _check_temporary_directory()


def has_shared_memory(ranks: int) -> bool:
    """Returns whether these ranks can exchange messages through /dev/shm alone.

    Open MPI creates a file for each rank there. If it cannot, the ranks need TCP.
    """
    directory = "/dev/shm"
    try:
        status = os.statvfs(directory)
    except OSError:
        return False
    free_bytes = status.f_bavail * status.f_frsize
    return os.access(directory, os.W_OK) and free_bytes >= ranks * MIN_FILE_BYTES


def _check_temporary_directory() -> None:
    """Raises UserError if Open MPI cannot create its directory.

    Unlike Python, Open MPI does not try another directory then.
    """
    directory = setting = "/tmp"
    for variable in ("TMPDIR", "TEMP", "TMP"):
        if os.environ.get(variable):
            directory = os.environ[variable]
            setting = f"{variable}={directory}"
            break
    try:
        # Open MPI creates it, too.
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"{setting} cannot be written ({error.strerror}), but Open MPI keeps its files there."
            " Set TMPDIR to a directory that can be written."
        ) from None
