"""Clusters of the papers and ready-made links, with where each number comes from."""

from __future__ import annotations

import dataclasses
import re

from hybrid_imagenet.analysis import published
from hybrid_imagenet.analysis.published import GpuSpeed
from hybrid_imagenet.comm.cost_model import Link, Topology
from hybrid_imagenet.errors import UserError


@dataclasses.dataclass(frozen=True)
class Speed:
    """Seconds of computation per step of ResNet-50 on one GPU: `fixed` + `per_image` * batch.

    `source` says where the figures are from.
    """

    fixed: float
    per_image: float
    source: str

    def seconds(self, batch: int) -> float:
        """Computes the seconds of a step for a batch per GPU."""
        return self.fixed + self.per_image * batch


def line(*measured: GpuSpeed) -> Speed:
    """The line through two measured speeds at different batches; through one, the same speed at any
    batch.
    """
    first, last = measured[0], measured[-1]
    seconds = [speed.batch / speed.images_per_second for speed in (first, last)]
    if first == last:
        return Speed(0.0, seconds[0] / first.batch, first.described_source)
    slope = (seconds[1] - seconds[0]) / (last.batch - first.batch)
    sources = first.source if first.source == last.source else f"{first.source}; {last.source}"
    return Speed(seconds[0] - slope * first.batch, slope, sources)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A cluster as the planner sees it; `gpu` is a key of `GPUS`, `speeds` are published ones by
    precision.
    """

    title: str
    gpu: str
    hosts: int
    local_size: int
    inside: Link
    between: Link
    speeds: dict[str, Speed]
    batch: int
    jitter: float

    def topology(self, hosts: int) -> Topology:
        """The same cluster with another number of hosts."""
        return Topology(hosts, self.local_size, self.inside, self.between)


NVLINK = Link.of(100, 5)
PCIE = Link.of(10, 10)
# What NCCL reaches of a link's nominal bandwidth in one direction, 80 %, as its developers say for
# NVLink 4: 370 of 450 GB/s around a ring, and with the switches adding up (NVLS) 480 by the same
# measure (github.com/NVIDIA/nccl-tests/issues/212). Nominal: 150, 300 and 450 GB/s of NVLink 2 to
# 4, 32 of PCIe 4 x16.
INSIDE = {
    "nvlink": NVLINK,
    "nvlink2": Link.of(120, 5),
    "nvlink3": Link.of(240, 5),
    "nvlink4": Link.of(370, 5),
    "nvls": Link.of(480, 5),
    "pcie": PCIE,
    "pcie4": Link.of(25.6, 10),
}

# 90 % of the nominal bandwidth. The latency of a hop through library and network is that of cluster
# h1; on InfiniBand from HDR on it is fitted to 1,024 and 4,216 A100 (MLPerf 2.1). 2,528 and 3,584
# H100 took no part in it.
_HOP, _INFINIBAND_HOP = 34.0, 6.0
LINKS = {
    "eth1": Link.of(0.1125, _HOP),
    "eth10": Link.of(1.125, _HOP),
    "eth25": Link.of(2.8125, _HOP),
    "roce40": Link.of(4.5, _HOP),
    "roce100": Link.of(11.25, _HOP),
    "ib-edr": Link.of(11.25, _HOP),
    "2xib-edr": Link.of(22.5, _HOP),
    "ib-hdr": Link.of(22.5, _INFINIBAND_HOP),
    "ib-ndr": Link.of(45.0, _INFINIBAND_HOP),
    "ib-xdr": Link.of(90.0, _INFINIBAND_HOP),
    "8xib-hdr": Link.of(180.0, _INFINIBAND_HOP),
    "8xib-ndr": Link.of(360.0, _INFINIBAND_HOP),
    "8xib-xdr": Link.of(720.0, _INFINIBAND_HOP),
}

_V100 = {
    "fp16": line(
        *(
            GpuSpeed(
                "Lu et al., Table 3.2",
                "v100",
                "fp16",
                batch,
                published.LU_SINGLE_V100["fp16", batch],
            )
            for batch in (128, 256)
        )
    ),
    "fp32": Speed(0.0, 1 / published.LU_SINGLE_V100["fp32", 128], "Lu et al., Table 3.2"),
}
_P40 = {"fp32": Speed(0.0, 1 / published.LU_SINGLE_P40, "Lu et al., section 3.2.2")}
# Relative wait for the slowest rank, fitted to cluster h1.
JITTER = 0.012


def _mlperf(gpu: str) -> dict[str, Speed]:
    """MLPerf's speed of a GPU in FP16: on one or two hosts, and where 64 GPUs ran, the line through
    both.

    Communication of the 64 counts as computation there, so that jitter is 0.
    """
    return {
        "fp16": line(*(s for s in published.speeds(gpu, "fp16") if s.source.startswith("MLPerf")))
    }


CLUSTERS = {
    # Latency and jitter are fitted to the five efficiencies of Lu et al., Table 3.3 and section
    # 3.2.2.
    "h1": Cluster(
        "Lu et al., cluster 1: 3 x 8 V100, RoCE 40G with GPUDirect",
        "v100",
        3,
        8,
        NVLINK,
        LINKS["roce40"],
        _V100,
        256,
        JITTER,
    ),
    # 0.62 GB/s is fitted to 91.2 %: without GPUDirect the data goes through the host's memory.
    "h2": Cluster(
        "Lu et al., cluster 2: 6 x 4 P40, RoCE 40G without GPUDirect",
        "p40",
        6,
        4,
        PCIE,
        Link.of(0.62, _HOP),
        _P40,
        128,
        JITTER,
    ),
    # Table 6 of Mikami et al. has one node of 4 GPUs as its baseline. One latency for all hops,
    # fitted to its four efficiencies: within 3.5 points.
    "abci": Cluster(
        "Mikami et al. on ABCI: 4 V100 a node, 2 x InfiniBand EDR",
        "v100",
        1024,
        4,
        NVLINK,
        Link.of(22.5, 36.0),
        {"fp16": Speed(0.0, 4 / published.MIKAMI_FOUR_GPUS, "Mikami et al., Table 6")},
        32,
        0.0,
    ),
    # NCSA HAL's 2-GPU run: 90 epochs of 1,281,167 images in 74,211 s.
    "hal": Cluster(
        "NCSA HAL: 16 x 4 V100, InfiniBand EDR",
        "v100",
        16,
        4,
        NVLINK,
        LINKS["ib-edr"],
        {"fp16": Speed(0.0, 2 * 74211 / (90 * 1_281_167), "NCSA HAL, 2 GPUs")},
        208,
        JITTER,
    ),
    # Hosts as NVIDIA's data sheets of the DGX A100, H100 and H200 describe them: eight GPUs, and an
    # adapter for each. L40S hosts differ; four on PCIe 4 and one adapter are assumed.
    "h100": Cluster(
        "8 H100 a host, NVLink 4 with NVLS, 8 x InfiniBand NDR",
        "h100",
        8,
        8,
        INSIDE["nvls"],
        LINKS["8xib-ndr"],
        _mlperf("h100"),
        256,
        0.0,
    ),
    "h200": Cluster(
        "8 H200 a host, NVLink 4 with NVLS, 8 x InfiniBand NDR",
        "h200",
        8,
        8,
        INSIDE["nvls"],
        LINKS["8xib-ndr"],
        _mlperf("h200"),
        400,
        JITTER,
    ),
    "a100": Cluster(
        "8 A100 40 GB a host, NVLink 3, 8 x InfiniBand HDR",
        "a100",
        8,
        8,
        INSIDE["nvlink3"],
        LINKS["8xib-hdr"],
        _mlperf("a100"),
        204,
        JITTER,
    ),
    "a100-80": Cluster(
        "8 A100 80 GB a host, NVLink 3, 8 x InfiniBand HDR",
        "a100-80",
        8,
        8,
        INSIDE["nvlink3"],
        LINKS["8xib-hdr"],
        _mlperf("a100-80"),
        256,
        0.0,
    ),
    "l40s": Cluster(
        "4 L40S a host, PCIe 4, InfiniBand NDR",
        "l40s",
        8,
        4,
        INSIDE["pcie4"],
        LINKS["ib-ndr"],
        _mlperf("l40s"),
        200,
        JITTER,
    ),
}


def parse_link(flag: str, text: str) -> Link:
    """Reads a link: a name, or a bandwidth with or without a latency per hop, as in 25gbit or
    3.1GB/s:20us.

    Raises:
      UserError: naming the flag and the forms it takes.
    """
    known = INSIDE if flag == "inside" else LINKS
    if text in known:
        return known[text]
    number = r"(\d+\.?\d*|\.\d+)"
    match = re.fullmatch(f"{number}(gbit|gb/s)(?::{number}us)?", text.lower())
    if match is None or not float(match[1]):
        raise UserError(
            f"--{flag}={text}: choose one of {', '.join(known)}, or write a bandwidth such as"
            " 25gbit or 3.1GB/s:20us"
        )
    return Link.of(
        float(match[1]) * (1.0 if match[2] == "gb/s" else 0.9 / 8), float(match[3] or _HOP)
    )
