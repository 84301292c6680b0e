"""Clusters of the papers and ready-made links, with where each number comes from."""

from __future__ import annotations

import dataclasses
import re

from hybrid_imagenet.analysis.cost_model import Link, Topology
from hybrid_imagenet.analysis.published import GPU_SPEEDS
from hybrid_imagenet.errors import UserError


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of computation per step of ResNet-50 on one GPU: `fixed` + `per_image` * batch."""

    fixed: float
    per_image: float

    def seconds(self, batch: int) -> float:
        """Computes the seconds of a step for a batch per GPU."""
        return self.fixed + self.per_image * batch


def _through(batch: int, rate: float, other_batch: int, other_rate: float) -> Speed:
    """The line through two measured throughputs (images per second)."""
    first, second = batch / rate, other_batch / other_rate
    slope = (second - first) / (other_batch - batch)
    return Speed(first - slope * batch, slope)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster as the planner sees it; `title` says what it is, `gpu` what it computes with, `speeds` by precision."""

    title: str
    gpu: str
    hosts: int
    local_size: int
    inside: Link
    between: Link
    speeds: dict[str, Speed]
    batch: int
    jitter: float
    column_latency: float | None = None

    def topology(self, hosts: int) -> Topology:
        """The same cluster with another number of hosts."""
        return Topology(hosts, self.local_size, self.inside, self.between, self.column_latency)


NVLINK = Link.of(100, 5)
PCIE = Link.of(10, 10)
# What NCCL reaches of a link's nominal bandwidth in one direction, 80 %, as its developers say for NVLink 4: 370 of
# 450 GB/s around a ring, and with the switches adding up (NVLS) 480 by the same measure
# (github.com/NVIDIA/nccl-tests/issues/212). Nominal: 150, 300 and 450 GB/s of NVLink 2 to 4, 32 of PCIe 4 x16.
INSIDE = {
    "nvlink": NVLINK,
    "nvlink2": Link.of(120, 5),
    "nvlink3": Link.of(240, 5),
    "nvlink4": Link.of(370, 5),
    "nvls": Link.of(480, 5),
    "pcie": PCIE,
    "pcie4": Link.of(25.6, 10),
}

# 90 % of the nominal bandwidth; the latency of a hop through library and network is taken from cluster h1.
_HOP = 34.0
LINKS = {
    "eth1": Link.of(0.1125, _HOP),
    "eth10": Link.of(1.125, _HOP),
    "eth25": Link.of(2.8125, _HOP),
    "roce40": Link.of(4.5, _HOP),
    "roce100": Link.of(11.25, _HOP),
    "ib-edr": Link.of(11.25, _HOP),
    "2xib-edr": Link.of(22.5, _HOP),
    "ib-hdr": Link.of(22.5, _HOP),
    "ib-ndr": Link.of(45.0, _HOP),
    "ib-xdr": Link.of(90.0, _HOP),
    "8xib-hdr": Link.of(180.0, _HOP),
    "8xib-ndr": Link.of(360.0, _HOP),
    "8xib-xdr": Link.of(720.0, _HOP),
}

_V100 = {"fp16": _through(128, 1377, 256, 1542), "fp32": Speed(0.0, 1 / 758)}  # Lu et al., Table 3.2
_P40 = {"fp32": Speed(0.0, 1 / 295)}  # Lu et al., 3.2.2
_JITTER = 0.012  # of cluster h1


def _published(gpu: str) -> dict[str, Speed]:
    """The first published speed of a GPU in FP16, at any batch."""
    rate = next(s.images_per_second for s in GPU_SPEEDS if (s.gpu, s.precision) == (gpu, "fp16"))
    return {"fp16": Speed(0.0, 1 / rate)}


# The GPUs of today in hosts as NVIDIA's data sheets of the DGX A100, H100 and H200 describe them: eight, and an adapter
# for each. L40S hosts differ; four on PCIe 4 and one adapter are assumed.
_HOSTS = {
    # On 64 GPUs a step of 50 images takes 50 * 64 / 314,000 s, all of it counted as computation: the line of MLPerf's
    # 8 and 64 GPUs. 2,528 and 3,584 GPUs took no part in it.
    "h100": Cluster("8 H100 a host, NVLink 4 with NVLS, 8 x InfiniBand NDR", "H100 SXM", 8, 8, INSIDE["nvls"],
                    LINKS["8xib-ndr"], {"fp16": _through(400, 7150, 50, 314_000 / 64)}, 400, 0.0),
    "h200": Cluster("8 H200 a host, NVLink 4 with NVLS, 8 x InfiniBand NDR", "H200 SXM", 8, 8, INSIDE["nvls"],
                    LINKS["8xib-ndr"], _published("h200"), 400, _JITTER),
    "a100": Cluster("8 A100 40 GB a host, NVLink 3, 8 x InfiniBand HDR", "A100 SXM 40 GB", 8, 8, INSIDE["nvlink3"],
                    LINKS["8xib-hdr"], _published("a100"), 256, _JITTER),
    "a100-80": Cluster("8 A100 80 GB a host, NVLink 3, 8 x InfiniBand HDR", "A100 SXM 80 GB", 8, 8,
                       INSIDE["nvlink3"], LINKS["8xib-hdr"], _published("a100-80"), 256, _JITTER),
    "l40s": Cluster("4 L40S a host, PCIe 4, InfiniBand NDR", "L40S", 8, 4, INSIDE["pcie4"], LINKS["ib-ndr"],
                    _published("l40s"), 200, _JITTER),
}  # fmt: skip

CLUSTERS = {
    # Latency and jitter are fitted to the five efficiencies of Lu et al., Table 3.3 and section 3.2.2.
    "h1": Cluster("Lu et al., cluster 1: 3 x 8 V100, RoCE 40G with GPUDirect", "V100", 3, 8, NVLINK, LINKS["roce40"],
                  _V100, 256, _JITTER),
    # 0.62 GB/s is fitted to 91.2 %: without GPUDirect the data goes through the host's memory.
    "h2": Cluster("Lu et al., cluster 2: 6 x 4 P40, RoCE 40G without GPUDirect", "P40", 6, 4, PCIE, Link.of(0.62, _HOP),
                  _P40, 128, _JITTER),
    # Table 6 of Mikami et al. has one node of 4 GPUs as its yardstick. One latency for all hops, fitted to its four
    # efficiencies: within 3.5 points; `residuals.TWO_LATENCIES` comes closer with a second constant.
    "abci": Cluster("Mikami et al. on ABCI: 4 V100 a node, 2 x InfiniBand EDR", "V100", 1024, 4, NVLINK,
                    Link.of(22.5, 36.0), {"fp16": Speed(0.0, 4 / 2565)}, 32, 0.0),
    # NCSA HAL's 2-GPU run: 90 epochs of 1,281,167 images in 74,211 s.
    "hal": Cluster("NCSA HAL: 16 x 4 V100, InfiniBand EDR", "V100", 16, 4, NVLINK, LINKS["ib-edr"],
                   {"fp16": Speed(0.0, 2 * 74211 / (90 * 1_281_167))}, 208, _JITTER),
    **_HOSTS,
}  # fmt: skip


def parse_link(flag: str, text: str) -> Link:
    """Reads a link: a name, or a bandwidth with or without a latency per hop, as in 25gbit or 3.1GB/s:20us.

    Raises:
      UserError: naming the flag and the forms it takes.
    """
    known = INSIDE if flag == "inside" else LINKS
    if text in known:
        return known[text]
    match = re.fullmatch(r"([0-9.]+)(gbit|gb/s)(?::([0-9.]+)us)?", text.lower())
    try:
        if match is None:
            raise ValueError
        bandwidth = float(match[1]) * (1.0 if match[2] == "gb/s" else 0.9 / 8)
        if bandwidth <= 0:
            raise ValueError
        return Link.of(bandwidth, float(match[3] or _HOP))
    except ValueError:
        raise UserError(
            f"--{flag}={text}: choose one of {', '.join(known)}, or write a bandwidth such as 25gbit or 3.1GB/s:20us"
        ) from None
