"""Finds out the host of every rank, and where it can be reached, before the ranks are connected.

Horovod's own collectives can tell only after its start, but the sets of ranks that it is to know
from its start depend on the hosts. So the ranks ask each other through MPI (mpi4py).
"""

from __future__ import annotations

import atexit
import ctypes
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet.errors import UserError, import_optional

_INTERFACES = "NCCL_SOCKET_IFNAME"


def host_key() -> list[str]:
    """Returns what tells hosts apart: the name, and the network namespace, as hosts may share a
    kernel and a name.
    """
    try:
        namespace = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - the link's text is not a path
    except OSError:
        namespace = ""
    return [socket.gethostname(), namespace]


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each of this host's interfaces that has one, loopback left
    out.
    """
    return {
        name: address
        for name, address in all_interfaces().items()
        if not address.startswith("127.")
    }


def all_interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each of this host's interfaces that has one."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer: Any = fcntl.ioctl(
                    probe.fileno(), get_address, struct.pack("256s", name.encode()[:15])
                )
            except OSError:
                continue  # an interface without an IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return found


def asked_for(found: Mapping[str, str]) -> dict[str, str]:
    """Returns the interfaces on which ranks are to meet: those of NCCL_SOCKET_IFNAME, which the
    launchers set too.

    As NCCL reads it: beginnings of names, after `=` whole names, after `^` or `^=` those that are
    not meant.
    """
    asked = os.environ.get(_INTERFACES, "")
    words = tuple(word for word in asked.lstrip("^=").split(",") if word)
    if not words:
        return dict(found)
    named = (
        set(words)
        if asked.lstrip("^").startswith("=")
        else {name for name in found if name.startswith(words)}
    )
    return {
        name: address for name, address in found.items() if (name in named) != asked.startswith("^")
    }


def meeting_places(each: Sequence[Sequence[str]], keys: Sequence[Sequence[str]]) -> list[str]:
    """Returns the address at which other hosts reach each rank: the first one of its host that no
    other host has too.

    Others, as that of Docker's bridge, lead nowhere from outside.

    Args:
      each: the addresses of every rank's host.
      keys: every rank's `key`.

    Raises:
      UserError: for a host without one.
    """
    owners: dict[str, set[tuple[str, ...]]] = {}
    for found, host in zip(each, keys, strict=True):
        for address in found:
            owners.setdefault(address, set()).add(tuple(host))
    chosen = [
        next((address for address in found if len(owners[address]) == 1), "") for found in each
    ]
    if "" in chosen:
        asked = os.environ.get(_INTERFACES, "")
        raise UserError(
            f"host {keys[chosen.index('')][0]} has no IPv4 address of its own at which other hosts"
            " can reach it"
            + (
                f" on the interfaces of {_INTERFACES}={asked}; correct --network_interfaces"
                if asked
                else ""
            )
        )
    return chosen


def unique_host_names(keys: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns the host of every rank under a unique name: host names, numbered where several hosts
    share one.
    """
    each = [tuple(key) for key in keys]
    order = list(dict.fromkeys(each))
    unique = {}
    for host in order:
        twins = [other for other in order if other[0] == host[0]]
        unique[host] = host[0] if len(twins) == 1 else f"{host[0]}#{twins.index(host)}"
    return tuple(unique[host] for host in each)


def gather(own: Sequence[str], size: int) -> list[list[str]]:
    """Gathers what every rank contributes, through MPI. All ranks call it, after the import of
    Horovod.

    MPI is started here; Horovod finds it started and leaves it running. It is ended when the
    process ends.

    Returns:
      The contributions of all `size` ranks, in their order.

    Raises:
      UserError: without mpi4py, or if MPI connects other ranks.
    """
    mpi4py = import_optional(
        "mpi4py", "ranks find each other through mpi4py, which is missing: pip install mpi4py"
    )
    # as without mpi4py; else errors inside of Horovod's communicators would be returned
    mpi4py.rc.errors = "default"
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        _start(MPI)
    found = [list(other) for other in MPI.COMM_WORLD.allgather(list(own))]
    check_size(len(found), size)
    return found


def _start(mpi: Any) -> None:
    """Starts MPI without the interpreter's lock.

    mpi4py would keep it until all ranks have come, and no thread of this one could tell that one is
    missing.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next((line.split(maxsplit=5)[5] for line in maps if "/libmpi.so" in line), None)
    if library is None:  # it has another name
        mpi.Init_thread()
    else:
        ctypes.CDLL(library).MPI_Init_thread(
            None, None, mpi.THREAD_MULTIPLE, ctypes.byref(ctypes.c_int())
        )
    atexit.register(lambda: mpi.Is_finalized() or mpi.Finalize())


def check_size(connected: int, size: int) -> None:
    """Raises UserError if not all ranks that were started are connected."""
    if connected != size:
        raise UserError(
            f"{size} ranks were started, but MPI connects {connected} of them: start them with"
            " hybrid-imagenet run"
        )
