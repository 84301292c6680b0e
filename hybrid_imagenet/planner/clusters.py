"""Defines published clusters and common links, with the source of each number."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from hybrid_imagenet.analysis import published
from hybrid_imagenet.analysis.published import GpuSpeed
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.planner.cost_model import Link, Topology


@dataclasses.dataclass(frozen=True)
class ComputeTime:
    """Computation time of a ResNet-50 step on one GPU, linear in the batch.

    Attributes:
      fixed_seconds: Time per step that does not depend on the batch.
      seconds_per_image: Additional time per image of the batch.
      source: The publication or measurement that the two numbers are from.
    """

    fixed_seconds: float
    seconds_per_image: float
    source: str

    def step_seconds(self, per_gpu_batch: int) -> float:
        """Returns the seconds of one step."""
        return self.fixed_seconds + self.seconds_per_image * per_gpu_batch


def fit_compute_time(*measurements: GpuSpeed) -> ComputeTime:
    """Fits the computation time of a step to one or more measured speeds.

    With several measurements, the line goes through the first and the last. With one, all batches
    have the same images per second.

    Args:
      *measurements: Speeds of the same GPU at different batches.
    """
    first = measurements[0]
    last = measurements[-1]
    first_seconds = first.batch / first.images_per_second
    if first == last:
        return ComputeTime(0.0, first_seconds / first.batch, first.described_source)
    last_seconds = last.batch / last.images_per_second
    slope = (last_seconds - first_seconds) / (last.batch - first.batch)
    source = first.source
    if last.source != first.source:
        source = f"{first.source}; {last.source}"
    return ComputeTime(first_seconds - slope * first.batch, slope, source)


@dataclasses.dataclass(frozen=True)
class ClusterModel:
    """A cluster as the planner models it.

    Attributes:
      title: Description for a reader.
      gpu: A key of `published.GPUS`.
      hosts: Number of hosts.
      local_size: GPUs per host.
      inside: Link between the GPUs of a host.
      between: Link of a host to the others.
      compute_times: Published computation times by precision (`fp16`, `fp32`). The first one is the
        default precision.
      per_gpu_batch: Default number of images per GPU and step.
      jitter: Wait for the slowest rank, as a fraction of the computation time. 0 if
        `compute_times` include it.
    """

    title: str
    gpu: str
    hosts: int
    local_size: int
    inside: Link
    between: Link
    compute_times: Mapping[str, ComputeTime]
    per_gpu_batch: int
    jitter: float

    def topology(self, hosts: int) -> Topology:
        """Returns the topology of such a cluster with `hosts` hosts."""
        return Topology(hosts, self.local_size, self.inside, self.between)


_NVLINK = Link.of(100, 5)
_PCIE = Link.of(10, 10)
# NCCL reaches about 80 % of a link's nominal bandwidth in one direction. Its developers report 370
# of 450 GB/s around a ring for NVLink 4, and 480 by the same measure if the switches add up (NVLS):
# github.com/NVIDIA/nccl-tests/issues/212. Nominal bandwidths are 150, 300 and 450 GB/s for NVLink 2
# to 4, and 32 GB/s for PCIe 4 x16.
INTRA_HOST_LINKS = {
    "nvlink": _NVLINK,
    "nvlink2": Link.of(120, 5),
    "nvlink3": Link.of(240, 5),
    "nvlink4": Link.of(370, 5),
    "nvls": Link.of(480, 5),
    "pcie": _PCIE,
    "pcie4": Link.of(25.6, 10),
}

# Latency of a hop through library and network. The first one is fitted to cluster h1. The one of
# InfiniBand, from HDR on, is fitted to 1,024 and 4,216 A100 (MLPerf 2.1). 2,528 and 3,584 H100 were
# not used in the fit.
_HOP_MICROSECONDS = 34.0
_INFINIBAND_HOP_MICROSECONDS = 6.0
# Usable fraction of the nominal bandwidth of a network. The bandwidths in `HOST_LINKS` are already
# multiplied by it.
_USABLE_BANDWIDTH = 0.9
HOST_LINKS = {
    "eth1": Link.of(0.1125, _HOP_MICROSECONDS),
    "eth10": Link.of(1.125, _HOP_MICROSECONDS),
    "eth25": Link.of(2.8125, _HOP_MICROSECONDS),
    "roce40": Link.of(4.5, _HOP_MICROSECONDS),
    "roce100": Link.of(11.25, _HOP_MICROSECONDS),
    "ib-edr": Link.of(11.25, _HOP_MICROSECONDS),
    "2xib-edr": Link.of(22.5, _HOP_MICROSECONDS),
    "ib-hdr": Link.of(22.5, _INFINIBAND_HOP_MICROSECONDS),
    "ib-ndr": Link.of(45.0, _INFINIBAND_HOP_MICROSECONDS),
    "ib-xdr": Link.of(90.0, _INFINIBAND_HOP_MICROSECONDS),
    "8xib-hdr": Link.of(180.0, _INFINIBAND_HOP_MICROSECONDS),
    "8xib-ndr": Link.of(360.0, _INFINIBAND_HOP_MICROSECONDS),
    "8xib-xdr": Link.of(720.0, _INFINIBAND_HOP_MICROSECONDS),
}


def _mlperf_compute_times(gpu: str) -> dict[str, ComputeTime]:
    """Returns MLPerf's computation time of a GPU in FP16.

    The speeds are from one or two hosts. If MLPerf also has a run of 64 GPUs, the line goes through
    both. Such a line counts the communication of the 64 GPUs as computation, so the clusters that
    use it have a jitter of 0.
    """
    speeds = [speed for speed in published.speeds(gpu, "fp16") if speed.source.startswith("MLPerf")]
    return {"fp16": fit_compute_time(*speeds)}


_LU_V100_SPEEDS = {
    (speed.precision, speed.batch): speed for speed in published.speeds_in("Lu et al., Table 3.2")
}
_LU_V100_COMPUTE_TIMES = {
    "fp16": fit_compute_time(_LU_V100_SPEEDS["fp16", 128], _LU_V100_SPEEDS["fp16", 256]),
    "fp32": fit_compute_time(_LU_V100_SPEEDS["fp32", 128]),
}
_LU_P40_COMPUTE_TIMES = {"fp32": fit_compute_time(*published.speeds_in("Lu et al., section 3.2.2"))}
_MIKAMI_COMPUTE_TIMES = {"fp16": fit_compute_time(*published.speeds_in("Mikami et al., Table 6"))}
# Median speed in the records of the run on 2 GPUs, without validation (studies/records/hal.csv).
_HAL_COMPUTE_TIMES = {"fp16": ComputeTime(0.0, 2 / 1582, "NCSA HAL's records, 2 GPUs")}

JITTER = 0.012
"""Wait for the slowest rank as a fraction of the computation time, fitted to cluster h1."""

CLUSTERS = {
    # Latency and jitter are fitted to the five efficiencies of Lu et al., Table 3.3 and section
    # 3.2.2.
    "h1": ClusterModel(
        title="Lu et al., cluster 1: 3 x 8 V100, RoCE 40G with GPUDirect",
        gpu="v100",
        hosts=3,
        local_size=8,
        inside=_NVLINK,
        between=HOST_LINKS["roce40"],
        compute_times=_LU_V100_COMPUTE_TIMES,
        per_gpu_batch=256,
        jitter=JITTER,
    ),
    # 0.62 GB/s is fitted to an efficiency of 91.2 %. It is that low because without GPUDirect the
    # data passes through the host's memory.
    "h2": ClusterModel(
        title="Lu et al., cluster 2: 6 x 4 P40, RoCE 40G without GPUDirect",
        gpu="p40",
        hosts=6,
        local_size=4,
        inside=_PCIE,
        between=Link.of(0.62, _HOP_MICROSECONDS),
        compute_times=_LU_P40_COMPUTE_TIMES,
        per_gpu_batch=128,
        jitter=JITTER,
    ),
    # The baseline of Table 6 of Mikami et al. is one node of 4 GPUs, which includes the wait for
    # the slowest rank. One latency for all hops is fitted to the four efficiencies of the table,
    # and meets them within 3.5 points.
    "abci": ClusterModel(
        title="Mikami et al. on ABCI: 4 V100 a node, 2 x InfiniBand EDR",
        gpu="v100",
        hosts=1024,
        local_size=4,
        inside=_NVLINK,
        between=Link.of(22.5, 36.0),
        compute_times=_MIKAMI_COMPUTE_TIMES,
        per_gpu_batch=32,
        jitter=0.0,
    ),
    "hal": ClusterModel(
        title="NCSA HAL: 16 x 4 V100, InfiniBand EDR",
        gpu="v100",
        hosts=16,
        local_size=4,
        inside=_NVLINK,
        between=HOST_LINKS["ib-edr"],
        compute_times=_HAL_COMPUTE_TIMES,
        per_gpu_batch=208,
        jitter=JITTER,
    ),
    # The following hosts are as NVIDIA's data sheets describe the DGX A100, H100 and H200: eight
    # GPUs with one network adapter each.
    "h100": ClusterModel(
        title="8 H100 a host, NVLink 4 with NVLS, 8 x InfiniBand NDR",
        gpu="h100",
        hosts=8,
        local_size=8,
        inside=INTRA_HOST_LINKS["nvls"],
        between=HOST_LINKS["8xib-ndr"],
        compute_times=_mlperf_compute_times("h100"),
        per_gpu_batch=256,
        jitter=0.0,
    ),
    "h200": ClusterModel(
        title="8 H200 a host, NVLink 4 with NVLS, 8 x InfiniBand NDR",
        gpu="h200",
        hosts=8,
        local_size=8,
        inside=INTRA_HOST_LINKS["nvls"],
        between=HOST_LINKS["8xib-ndr"],
        compute_times=_mlperf_compute_times("h200"),
        per_gpu_batch=400,
        jitter=JITTER,
    ),
    "a100": ClusterModel(
        title="8 A100 40 GB a host, NVLink 3, 8 x InfiniBand HDR",
        gpu="a100",
        hosts=8,
        local_size=8,
        inside=INTRA_HOST_LINKS["nvlink3"],
        between=HOST_LINKS["8xib-hdr"],
        compute_times=_mlperf_compute_times("a100"),
        per_gpu_batch=204,
        jitter=JITTER,
    ),
    "a100-80": ClusterModel(
        title="8 A100 80 GB a host, NVLink 3, 8 x InfiniBand HDR",
        gpu="a100-80",
        hosts=8,
        local_size=8,
        inside=INTRA_HOST_LINKS["nvlink3"],
        between=HOST_LINKS["8xib-hdr"],
        compute_times=_mlperf_compute_times("a100-80"),
        per_gpu_batch=256,
        jitter=0.0,
    ),
    # Hosts with L40S differ from each other. Four GPUs on PCIe 4 and one adapter are an assumption.
    "l40s": ClusterModel(
        title="4 L40S a host, PCIe 4, InfiniBand NDR",
        gpu="l40s",
        hosts=8,
        local_size=4,
        inside=INTRA_HOST_LINKS["pcie4"],
        between=HOST_LINKS["ib-ndr"],
        compute_times=_mlperf_compute_times("l40s"),
        per_gpu_batch=200,
        jitter=JITTER,
    ),
}


def parse_link(flag: str, text: str, presets: Mapping[str, Link]) -> Link:
    """Parses a link: a name, or a bandwidth with an optional latency per hop.

    For example `ib-hdr`, `25gbit` or `3.1GB/s:20us`. A bandwidth in gbit is nominal, of which 90 %
    are usable; a bandwidth in GB/s is taken as it is.

    Args:
      flag: Name of the flag, for the error message.
      text: Its value.
      presets: Links by name.

    Raises:
      UserError: If the text is neither a name nor a bandwidth above 0.
    """
    if text in presets:
        return presets[text]
    number = r"(\d+\.?\d*|\.\d+)"
    match = re.fullmatch(f"{number}(gbit|gb/s)(?::{number}us)?", text.lower())
    if match is None or not float(match[1]):
        raise UserError(
            f"--{flag}={text} is not a known link. Choose one of {', '.join(presets)}, or write a"
            " bandwidth such as 25gbit or 3.1GB/s:20us."
        )
    gigabytes_per_second = float(match[1])
    if match[2] == "gbit":
        gigabytes_per_second *= _USABLE_BANDWIDTH / 8
    return Link.of(gigabytes_per_second, float(match[3] or _HOP_MICROSECONDS))
