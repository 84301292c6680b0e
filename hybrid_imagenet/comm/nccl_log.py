"""Reads from NCCL's own messages (NCCL_DEBUG=INFO) by which way it sends data.

Lines have these forms, as users report them in NCCL's issues (252 of nccl-tests; 952, 1189 and 1584
of nccl):

    NCCL version 2.21.5+cuda12.4
    host:101:120 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
    host:101:120 [0] NCCL INFO Using network IB
    host:101:120 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
    host:101:120 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
    host:101:120 [0] NCCL INFO NVLS multicast support is available on dev 0
"""

from __future__ import annotations

import dataclasses
import re

_VERSION = re.compile(r"NCCL version ([\w.+]+)")
_NETWORK = re.compile(r"NCCL INFO (?:Using network|Assigned NET plugin) (\S+)")
_CHANNEL = re.compile(
    r"NCCL INFO Channel [\d/]+ ?: \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (\S+)"
)
_COLLECTIVE_NETWORK = re.compile(r"NVLS multicast support is available")


@dataclasses.dataclass(frozen=True)
class Transport:
    """What NCCL said.

    Attributes:
      version: of NCCL; empty if it said nothing.
      network: between hosts, such as IB, Socket or a plug-in's name; empty without a line on it.
      ways: of the channels, such as P2P/CUMEM, SHM/direct or NET/IB/0/GDRDMA, each once, in the
      order seen.
      multicast: NVLink's switches can reduce (NVLS).
    """

    version: str = ""
    network: str = ""
    ways: tuple[str, ...] = ()
    multicast: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        """The first words of the ways: P2P, SHM, NET."""
        return tuple(dict.fromkeys(way.partition("/")[0] for way in self.ways))

    @property
    def gpudirect(self) -> bool:
        """Whether all channels over a network read and write the memory of GPUs."""
        net = [way for way in self.ways if way.startswith("NET/")]
        return bool(net) and all("GDRDMA" in way for way in net)

    def __str__(self) -> str:
        if not self.version and not self.ways:
            return "NCCL said nothing"
        said = [f"NCCL {self.version or 'of unknown version'}"]
        said += [f"network {self.network}"] if self.network else []
        said += [f"channels by {', '.join(self.ways)}"] if self.ways else []
        return ", ".join(said + (["NVLS"] if self.multicast else []))


def read(text: str) -> Transport:
    """Returns what the output of one or several ranks says about NCCL's transport."""
    version = _VERSION.search(text)
    network = _NETWORK.search(text)
    return Transport(
        version=version[1] if version else "",
        network=network[1] if network else "",
        ways=tuple(dict.fromkeys(match[1] for match in _CHANNEL.finditer(text))),
        multicast=bool(_COLLECTIVE_NETWORK.search(text)),
    )
