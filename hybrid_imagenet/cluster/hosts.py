"""Finds the host of every rank, and its address, before the ranks are connected.

Horovod's own collectives work only after its start, but the groups of ranks that it must know at
its start depend on the hosts. So the ranks exchange their hosts through MPI (mpi4py).
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

_INTERFACES_VARIABLE = "NCCL_SOCKET_IFNAME"


def host_key() -> list[str]:
    """Returns the name of this host and its network namespace.

    Together they identify a host, because several containers may share a name or a kernel.
    """
    try:
        namespace = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - the link's text is not a path
    except OSError:
        namespace = ""
    return [socket.gethostname(), namespace]


def unique_host_names(keys: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns a unique name for the host of every rank.

    If several hosts share a name, they are numbered: `name#0`, `name#1`.

    Args:
      keys: `host_key` of every rank.

    Returns:
      The name of every rank's host, in the order of ranks.
    """
    host_of_rank = [tuple(key) for key in keys]
    hosts = list(dict.fromkeys(host_of_rank))
    unique_names = {}
    for host in hosts:
        name = host[0]
        namesakes = [other for other in hosts if other[0] == name]
        unique_names[host] = name if len(namesakes) == 1 else f"{name}#{namesakes.index(host)}"
    return tuple(unique_names[host] for host in host_of_rank)


def interfaces() -> dict[str, str]:
    """Returns the IPv4 addresses of this host's network interfaces by name, without loopback."""
    return {
        name: address
        for name, address in all_interfaces().items()
        if not address.startswith("127.")
    }


def all_interfaces() -> dict[str, str]:
    """Returns the IPv4 addresses of this host's network interfaces by name."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer: Any = fcntl.ioctl(probe.fileno(), get_address, request)
            except OSError:
                # The interface has no IPv4 address.
                continue
            addresses[name] = socket.inet_ntoa(answer[20:24])
    return addresses


def select_interfaces(addresses: Mapping[str, str]) -> dict[str, str]:
    """Returns the network interfaces that NCCL_SOCKET_IFNAME selects.

    The launchers set this variable too. It is read as NCCL reads it: prefixes of names, after `=`
    complete names, after `^` or `^=` names to exclude. Without it all interfaces are selected.

    Args:
      addresses: Addresses of interfaces by name.
    """
    selection = os.environ.get(_INTERFACES_VARIABLE, "")
    words = tuple(word for word in selection.lstrip("^=").split(",") if word)
    if not words:
        return dict(addresses)
    excludes = selection.startswith("^")
    matches_complete_names = selection.lstrip("^").startswith("=")
    selected = {}
    for name, address in addresses.items():
        is_named = name in words if matches_complete_names else name.startswith(words)
        if is_named != excludes:
            selected[name] = address
    return selected


def reachable_addresses(
    addresses: Sequence[Sequence[str]], keys: Sequence[Sequence[str]]
) -> list[str]:
    """Returns the address at which other hosts can reach each rank.

    It is the first address of its host that no other host has. An address that several hosts have,
    such as the address of Docker's bridge, cannot be reached from other hosts.

    Args:
      addresses: Addresses of every rank's host.
      keys: `host_key` of every rank.

    Raises:
      UserError: If a host has no such address.
    """
    hosts_by_address: dict[str, set[tuple[str, ...]]] = {}
    for host_addresses, key in zip(addresses, keys, strict=True):
        for address in host_addresses:
            hosts_by_address.setdefault(address, set()).add(tuple(key))
    reachable = []
    for host_addresses, key in zip(addresses, keys, strict=True):
        unique = [address for address in host_addresses if len(hosts_by_address[address]) == 1]
        if not unique:
            raise UserError(_unreachable_message(key[0]))
        reachable.append(unique[0])
    return reachable


def _unreachable_message(host: str) -> str:
    message = f"host {host} has no unique IPv4 address at which other hosts can reach it"
    selection = os.environ.get(_INTERFACES_VARIABLE, "")
    if not selection:
        return f"{message}. Check the network interfaces of this host."
    return (
        f"{message} on the interfaces of {_INTERFACES_VARIABLE}={selection}. Correct"
        " --network_interfaces."
    )


def gather_by_mpi(strings: Sequence[str], size: int) -> list[list[str]]:
    """Gathers strings of all ranks through MPI.

    All ranks must call it, after the import of Horovod. It starts MPI, which Horovod then uses and
    leaves running. MPI is ended when the process exits.

    Args:
      strings: Strings of this rank.
      size: Number of ranks.

    Returns:
      The strings of all ranks, in the order of ranks.

    Raises:
      UserError: If mpi4py is missing, or MPI connects a different number of ranks.
    """
    mpi4py = import_optional(
        "mpi4py",
        "Ranks that mpirun starts find each other through mpi4py, which is missing. Install it"
        " with: pip install 'mpi4py>=4'",
    )
    # Keep the error handler that MPI has without mpi4py. With the handler that mpi4py sets
    # otherwise, errors inside Horovod's communicators would be returned instead of ending the job.
    mpi4py.rc.errors = "default"
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    if not MPI.Is_initialized():
        _initialize_mpi(MPI)
    gathered = [list(other) for other in MPI.COMM_WORLD.allgather(list(strings))]
    check_connected_size(len(gathered), size)
    return gathered


def _initialize_mpi(mpi: Any) -> None:
    """Starts MPI without holding the interpreter's lock.

    mpi4py would hold the lock until all ranks have started, so no other thread of this process
    could report that a rank is missing.

    Args:
      mpi: The module mpi4py.MPI, which has loaded the MPI library.
    """
    library = None
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/libmpi.so" in line:
            library = line.split(maxsplit=5)[5]
            break
    if library is None:
        # The library has another name, so it cannot be called directly.
        mpi.Init_thread()
    else:
        provided_level = ctypes.byref(ctypes.c_int())
        ctypes.CDLL(library).MPI_Init_thread(None, None, mpi.THREAD_MULTIPLE, provided_level)
    atexit.register(_finalize_mpi, mpi)


def _finalize_mpi(mpi: Any) -> None:
    if not mpi.Is_finalized():
        mpi.Finalize()


def check_connected_size(connected: int, size: int) -> None:
    """Raises UserError if MPI does not connect all ranks that were started."""
    if connected != size:
        raise UserError(
            f"{size} ranks were started, but MPI connects {connected} of them. Start them with"
            " hybrid-imagenet run."
        )
