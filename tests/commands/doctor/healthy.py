"""Contains facts of two healthy hosts with two V100 each, and finds the effect of changes."""

import copy

from hybrid_imagenet.commands.doctor.diagnosis import Finding, JobRequirements, diagnose

GPU = {"index": "0", "name": "Tesla V100", "driver_version": "580.1", "compute_cap": "7.0"}

HEALTHY = {
    "python": "3.11.7",
    "versions": {"horovod": "0.28.1", "tensorflow": "2.21.0", "nvidia-cudnn-cu12": "9.10.2.21"},
    "build": {
        "is_cuda_build": True,
        "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
    },
    "code": "abc",
    "nccl": True,
    "cores": 40,
    "memory_gb": 256.0,
    "locked_memory": -1,
    "shared_memory_gb": 64.0,
    "interfaces": {
        "lo": {"up": True, "mtu": 65536},
        "eth0": {"up": True, "mtu": 9000},
    },
    "rdma": [
        {"device": "mlx5_0", "active": True, "link": "Ethernet", "rate": "40 Gb/sec (4X QDR)"}
    ],
    "gpus": [GPU, GPU | {"index": "1"}],
    "unresolved": [],
    "data": {"exists": True, "files": 3, "bytes": 30, "manifest": True, "digest": "d1"},
    "run_free_gb": 100.0,
}
REQUIREMENTS = JobRequirements({"a": 2, "b": 2}, "eth0", "/data", gpus=True)


def findings_after(change=None, requirements=REQUIREMENTS, changed_hosts="b") -> dict[str, Finding]:
    """Returns the findings by check, after a change of the facts of some hosts.

    Args:
      change: Function that changes the facts of a host; None for healthy hosts.
      requirements: The requirements of the job.
      changed_hosts: Names of the hosts whose facts are changed, one letter each.
    """
    facts = {name: copy.deepcopy(HEALTHY) for name in requirements.slots}
    if change is not None:
        for name in changed_hosts:
            change(facts[name])
    return {finding.check: finding for finding in diagnose(facts, requirements)}
