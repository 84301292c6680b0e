"""Finds out the host of every rank, and where it can be reached, before the ranks are connected.

Horovod's own collectives can tell only after its start, but the sets of ranks that it is to know from its start depend
on the hosts. So the ranks ask the launcher's means: MPI (through mpi4py) or the store of `horovodrun --gloo`.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.errors import UserError

_INTERFACES = "NCCL_SOCKET_IFNAME"
_STORE = ("HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT")
_TIMEOUT = 30.0  # seconds until all ranks must have reached the store
_PAUSE = 0.02  # seconds between looks at the store


def key() -> list[str]:
    """Returns what tells hosts apart: the name, and the network namespace, as hosts may share a kernel and a name."""
    try:
        namespace = os.readlink("/proc/self/ns/net")  # noqa: PTH115 - the link's text is not a path
    except OSError:
        namespace = ""
    return [socket.gethostname(), namespace]


def interfaces() -> dict[str, str]:
    """Returns the IPv4 address of each of this host's interfaces that has one, loopback left out."""
    import fcntl
    import struct

    get_address = 0x8915  # SIOCGIFADDR
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer: Any = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an IPv4 address
            found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def asked_for(found: Mapping[str, str]) -> dict[str, str]:
    """Returns the interfaces on which ranks are to meet: those of NCCL_SOCKET_IFNAME, which the launchers set too.

    As NCCL reads it: beginnings of names, after `=` whole names, after `^` beginnings of those that are not meant.
    """
    asked = os.environ.get(_INTERFACES, "")
    words = tuple(word for word in asked.lstrip("^=").split(",") if word)
    if not words:
        return dict(found)
    named = set(words) if asked.startswith("=") else {name for name in found if name.startswith(words)}
    return {name: address for name, address in found.items() if (name in named) != asked.startswith("^")}


def meeting_places(each: Sequence[Sequence[str]], keys: Sequence[Sequence[str]]) -> list[str]:
    """Returns the address at which other hosts reach each rank: the first one of its host that no other host has too.

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
    chosen = [next((address for address in found if len(owners[address]) == 1), "") for found in each]
    if "" in chosen:
        asked = os.environ.get(_INTERFACES, "")
        raise UserError(
            f"host {keys[chosen.index('')][0]} has no IPv4 address of its own at which other hosts can reach it"
            + (f" on the interfaces of {_INTERFACES}={asked}; correct --network_interfaces" if asked else "")
        )
    return chosen


def names(keys: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Returns the host of every rank under a unique name: host names, numbered where several hosts share one."""
    each = [tuple(key) for key in keys]
    order = list(dict.fromkeys(each))
    unique = {}
    for host in order:
        twins = [other for other in order if other[0] == host[0]]
        unique[host] = host[0] if len(twins) == 1 else f"{host[0]}#{twins.index(host)}"
    return tuple(unique[host] for host in each)


def gather(place: Placement, own: Sequence[str], name: str) -> list[list[str]] | None:
    """Gathers every rank's key without Horovod. All ranks call it once for each name, after the import of Horovod.

    Args:
      place: this rank's place.
      own: what this rank contributes.
      name: of this gathering, the same on all ranks; one that has several engines gathers several times.

    Returns:
      The keys in the order of ranks, or None if there is no way to gather them, as with MPI but without mpi4py.

    Raises:
      UserError: if not all ranks reach the store of Gloo in time.
    """
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        return _through_mpi(own) if importlib.util.find_spec("mpi4py") else None
    if all(variable in os.environ for variable in _STORE):
        return through_store(":".join(os.environ[variable] for variable in _STORE), place, own, name)
    return None


def _through_mpi(own: Sequence[str]) -> list[list[str]]:
    """Starts MPI, which Horovod then finds started and leaves running; mpi4py ends it with the process."""
    import mpi4py

    mpi4py.rc.errors = "default"  # as without mpi4py; else errors inside of Horovod's communicators would be returned
    from mpi4py import MPI

    return [list(other) for other in MPI.COMM_WORLD.allgather(list(own))]


def through_store(
    address: str, place: Placement, own: Sequence[str], name: str, timeout: float = _TIMEOUT
) -> list[list[str]]:
    """Gathers the keys: every rank puts its own into the launcher's store, then waits for the others'.

    Args:
      address: host and port of the store, with a colon between.
      place: this rank's place.
      own: this rank's key.
      name: of the gathering: the store keeps what ranks have put into it, so each has a place of its own there.
      timeout: seconds to wait.

    Raises:
      UserError: if a key is missing after that time.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    base = f"http://{address}/hybrid_imagenet_hosts_{name}"
    until = time.monotonic() + timeout
    found: list[list[str]] = []
    put = False
    while len(found) < place.size:
        try:
            if not put:
                body = json.dumps(list(own)).encode()
                request = urllib.request.Request(f"{base}/{place.rank}", data=body, method="PUT")
                opener.open(request, timeout=timeout).close()
                put = True
            with opener.open(f"{base}/{len(found)}", timeout=timeout) as reply:
                found.append(json.loads(reply.read()))
        except OSError as error:  # not there yet (404), or the store is too busy to answer
            if time.monotonic() > until:
                raise UserError(
                    f"rank {len(found)} did not reach the launcher at {address} within {timeout:g} s ({error})"
                ) from None
            time.sleep(_PAUSE)
    return found
