"""Checks what Open MPI needs on this host before it starts ranks: it would print many raw lines, or
wait forever.
"""

from __future__ import annotations

import os
import resource
import socket
import tempfile

from hybrid_imagenet.comm import hosts
from hybrid_imagenet.errors import UserError

# Open MPI 4.1 shares segments of 4 MiB between processes as files in TMPDIR.
MIN_FILE_BYTES = 8 << 20


def check(interface: str = "") -> None:
    """Raises UserError if Open MPI cannot begin on this host.

    Args:
      interface: `--network_interfaces`, or "".
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
    if interface and interface.partition(":")[0] not in names:  # eth0:1 is a second address of eth0
        raise UserError(
            f"--network_interfaces={interface}: this host has no such network interface. Choose one"
            f" of {', '.join(names)}."
        )
    _check_temporary_directory()


def _check_temporary_directory() -> None:
    """Raises UserError if Open MPI cannot create its directory; unlike Python, it takes no other
    one then.
    """
    variable = next((name for name in ("TMPDIR", "TEMP", "TMP") if os.environ.get(name)), "")
    directory = os.environ[variable] if variable else "/tmp"
    try:
        os.makedirs(directory, exist_ok=True)  # noqa: PTH103 - as Open MPI does
        with tempfile.TemporaryDirectory(dir=directory):
            pass
    except OSError as error:
        what = f"{variable}={directory}" if variable else directory
        raise UserError(
            f"{what} cannot be written ({error.strerror}), but Open MPI keeps its files there. Set"
            " TMPDIR to a directory that can be written."
        ) from None
