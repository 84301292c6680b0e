"""Reads from NCCL's own messages (NCCL_DEBUG=INFO) how it sends data.

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
_MULTICAST = re.compile(r"NVLS multicast support is available")


@dataclasses.dataclass(frozen=True)
class Transport:
    """How NCCL sends data.

    Attributes:
      version: Version of NCCL; empty if it printed none.
      network: Network between hosts, such as IB, Socket or the name of a plug-in; empty if unknown.
      channels: Transports of the channels, such as P2P/CUMEM, SHM/direct or NET/IB/0/GDRDMA, each
        once, in the order of the messages.
      multicast: Whether NVLink's switches can reduce (NVLS).
    """

    version: str = ""
    network: str = ""
    channels: tuple[str, ...] = ()
    multicast: bool = False

    @property
    def channel_kinds(self) -> tuple[str, ...]:
        """Returns the first words of the channels: P2P, SHM, NET."""
        return tuple(dict.fromkeys(channel.partition("/")[0] for channel in self.channels))

    @property
    def gpudirect(self) -> bool:
        """Returns whether all channels over a network access the memory of GPUs directly."""
        network_channels = [channel for channel in self.channels if channel.startswith("NET/")]
        return bool(network_channels) and all("GDRDMA" in channel for channel in network_channels)

    def __str__(self) -> str:
        if not self.version and not self.channels:
            return "NCCL printed no messages"
        facts = [f"NCCL {self.version or 'of unknown version'}"]
        if self.network:
            facts.append(f"network {self.network}")
        if self.channels:
            facts.append(f"channels by {', '.join(self.channels)}")
        if self.multicast:
            facts.append("NVLS")
        return ", ".join(facts)


def parse_transport(text: str) -> Transport:
    """Returns how NCCL sends data, from the output of one or several ranks."""
    version = _VERSION.search(text)
    network = _NETWORK.search(text)
    return Transport(
        version=version[1] if version else "",
        network=network[1] if network else "",
        channels=tuple(dict.fromkeys(match[1] for match in _CHANNEL.finditer(text))),
        multicast=bool(_MULTICAST.search(text)),
    )
