"""Tests reading the messages of NCCL, for two ranks, as users of NCCL have reported them."""

import pytest

from hybrid_imagenet.comm import nccl_log

INSIDE = """\
h1:101:101 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
NCCL version 2.21.5+cuda12.4
h1:101:120 [0] NCCL INFO NET/IB : No device found.
h1:101:120 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.1<0>
h1:101:120 [0] NCCL INFO Using network Socket
h1:101:120 [0] NCCL INFO NVLS multicast support is not available on dev 0
h1:101:120 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
h1:102:121 [1] NCCL INFO Channel 00/0 : 1[1] -> 0[0] via P2P/CUMEM/read
"""
BETWEEN = """\
[1,0]<stdout>:h1:101:120 [0] NCCL INFO NCCL version 2.18.1+cuda12.1
[1,0]<stdout>:h1:101:120 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/RoCE [RO]; OOB eth0:10.0.0.1<0>
[1,0]<stdout>:h1:101:120 [0] NCCL INFO Using network IB
[1,0]<stdout>:h1:101:120 [0] NCCL INFO Channel 00/0 : 1[1a000] -> 0[1a000] [receive] via NET/IB/0/GDRDMA
[1,0]<stdout>:h1:101:120 [0] NCCL INFO Channel 01/0 : 0[1a000] -> 1[1a000] [send] via NET/IB/1
"""  # noqa: E501
LATE = """\
h:1:1 [0] NCCL INFO Assigned NET plugin IB to comm
h:1:1 [0] NCCL INFO NVLS multicast support is available on dev 0
h:1:1 [0] NCCL INFO Channel 15/0 : 7[7] -> 4[4] via P2P/direct pointer comm 0x55 nRanks 08
"""


@pytest.mark.parametrize(
    ("text", "version", "network", "channels", "kinds", "gpudirect"),
    [
        (INSIDE, "2.21.5+cuda12.4", "Socket", ("P2P/CUMEM/read",), ("P2P",), False),
        (BETWEEN, "2.18.1+cuda12.1", "IB", ("NET/IB/0/GDRDMA", "NET/IB/1"), ("NET",), False),
        (BETWEEN.replace("NET/IB/1\n", "NET/IB/1/GDRDMA\n"), "2.18.1+cuda12.1", "IB",
         ("NET/IB/0/GDRDMA", "NET/IB/1/GDRDMA"), ("NET",), True),
        (LATE, "", "IB", ("P2P/direct",), ("P2P",), False),
        ("rank 0 of 2: the sum is right, on the CPU\n", "", "", (), (), False),
    ],
)  # fmt: skip
def test_parse_transport_returns_version_network_and_channels(
    text, version, network, channels, kinds, gpudirect
):
    transport = nccl_log.parse_transport(text)
    assert (transport.version, transport.network, transport.channels) == (
        version,
        network,
        channels,
    )
    assert (transport.channel_kinds, transport.gpudirect) == (kinds, gpudirect)


def test_transport_as_text_has_version_network_and_channels():
    assert (
        str(nccl_log.parse_transport(INSIDE))
        == "NCCL 2.21.5+cuda12.4, network Socket, channels by P2P/CUMEM/read"
    )
    assert str(nccl_log.parse_transport(LATE)).endswith(", NVLS")
