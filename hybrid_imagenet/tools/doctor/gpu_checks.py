"""Judges the facts about GPUs: whether TensorFlow can use them, how they are joined, and how healthy they are."""

from __future__ import annotations

import collections
import re

from hybrid_imagenet.comm import gpus as setup
from hybrid_imagenet.tools.doctor.findings import FAIL, PASS, WARN, Facts, Finding, Hosts, Request, each, same

# NVIDIA, "CUDA Compatibility", table 1: the oldest driver for any toolkit of a major version.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


def gpus(hosts: Hosts, request: Request) -> list[Finding]:
    """All findings about GPUs."""
    findings = [_visible(hosts, request)]
    if not request.gpus:
        return [*filter(_bad, findings), Finding(PASS, "GPUs", "none on any host: ranks run on the CPU")]
    few = [
        (h, f"{len(f['gpus'])} GPUs for {request.slots[h]} ranks")
        for h, f in hosts.items()
        if len(f["gpus"]) < request.slots[h]
    ]
    findings += [each("GPUs", "one for each rank", few, "lower the slots of that host, or look at nvidia-smi", FAIL)]
    models = {h: ", ".join(sorted({g["name"] for g in f["gpus"]})) or None for h, f in hosts.items()}
    findings.append(same("GPU model", models, "the slowest GPU holds up all: use hosts of one kind", WARN))
    drivers = {h: ", ".join(sorted({g["driver_version"] for g in f["gpus"]})) or None for h, f in hosts.items()}
    findings.append(same("GPU driver", drivers, "install the same driver on all hosts", WARN))
    findings += [_kernels(hosts), _driver_age(hosts)]
    unbuilt = [(h, "Horovod was built without NCCL") for h, f in hosts.items() if f["gpus"] and not f["nccl"]]
    findings.append(each("NCCL", "built in", unbuilt, "run launch/setup.sh --gpu there", FAIL))
    return [*findings, *_health(hosts), *_paths(hosts)]


def _bad(finding: Finding) -> bool:
    return finding.level != PASS


def _visible(hosts: Hosts, request: Request) -> Finding:
    """GPUs that are on the bus but that nvidia-smi does not list. A container may be given a part of them."""
    hidden = [
        (h, f"{len(f['gpu_bus'])} on the PCI bus, {len(f['gpus'])} in nvidia-smi")
        for h, f in hosts.items()
        if len(f["gpus"]) < min(len(f["gpu_bus"]), request.slots[h])
    ]
    remedy = "install the driver, or pass the GPUs to the container (docker run --gpus=all); dmesg says what failed"
    return each("GPUs in sight", "all that are needed", hidden, remedy)


def _kernels(hosts: Hosts) -> Finding:
    """TensorFlow's and cuDNN's kernels against the compute capability of each GPU."""
    bad, known = [], set()
    for host, facts in hosts.items():
        build = facts["build"] or {}
        if facts["gpus"] and build and not build.get("is_cuda_build"):
            bad.append((host, "this TensorFlow is built for the CPU: run launch/setup.sh --gpu there"))
            continue
        for gpu in facts["gpus"]:
            capability = _numbers(gpu.get("compute_cap"))
            if len(capability) != 2:
                continue
            known.add(f"{capability[0]}.{capability[1]}")
            kernels = build.get("cuda_compute_capabilities", ())
            cudnn = _numbers(facts["versions"].get("nvidia-cudnn-cu12"))[:3] or None
            reason = setup.refusal((capability[0], capability[1]), kernels, cudnn)
            if reason:
                bad.append((host, f"GPU {gpu['index']} ({gpu['name']}): {reason}"))
    if not known and not bad:
        return Finding(WARN, "GPU kernels", "nvidia-smi does not tell the compute capability", "install a newer driver")
    good = f"TensorFlow and cuDNN have them for compute capability {', '.join(sorted(known))}"
    return each("GPU kernels", good, bad, "docs/install.md tells which TensorFlow and cuDNN fit which GPU", FAIL)


def _driver_age(hosts: Hosts) -> Finding:
    old = []
    for host, facts in hosts.items():
        toolkit = str((facts["build"] or {}).get("cuda_version", ""))
        oldest = _OLDEST_DRIVER.get(toolkit.partition(".")[0])
        for version in sorted({gpu["driver_version"] for gpu in facts["gpus"]}):
            if oldest and (numbers := _numbers(version)) and numbers[0] < oldest:
                old.append((host, f"{version} is too old for CUDA {toolkit}"))
    return each("driver and CUDA", "new enough", old, "install a newer driver: 525 or later for CUDA 12", FAIL)


def _numbers(text: object) -> tuple[int, ...]:
    """The numbers of a version; none for [N/A] and the like."""
    parts = str(text).split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _health(hosts: Hosts) -> list[Finding]:
    ecc, errors, clocks = [], [], []
    for host, facts in hosts.items():
        for gpu in facts["gpus"]:
            where = (host, gpu["index"])
            if gpu["ecc.mode.current"] == "Disabled":
                ecc.append((host, f"off on GPU {where[1]}"))
            if gpu["ecc.errors.uncorrected.volatile.total"] not in ("0", "[N/A]", "N/A", ""):
                errors.append((host, f"{gpu['ecc.errors.uncorrected.volatile.total']} on GPU {where[1]}"))
            # Bits that slow a GPU down for good or ill: 0x1 is idle, 0x2 a limit that the user has set.
            reason = gpu["clocks_throttle_reasons.active"]
            if reason.startswith("0x") and int(reason, 16) & ~0x3:
                clocks.append((host, f"GPU {where[1]} is slowed down (reasons {reason})"))
    return [
        each("ECC", "on", ecc, "nvidia-smi -e 1, then restart the host; consumer cards have none"),
        each("ECC errors", "none uncorrected", errors, "take the host out and have the GPU replaced", FAIL),
        each("GPU clocks", "not slowed down", clocks, "look at nvidia-smi -q -d PERFORMANCE: power, heat or a cap"),
    ]


def _paths(hosts: Hosts) -> list[Finding]:
    """How data gets from a GPU to the others and to the cores that feed it."""
    verbs = []
    for host, facts in hosts.items():
        reason = setup.verbs_missing(bool(facts["rdma"]), facts["verbs"]["devices"], facts["verbs"]["library"])
        if facts["gpus"] and reason:
            verbs.append((host, reason))
    peer = [
        (h, "nvidia-peermem is not loaded")
        for h, f in hosts.items()
        if f["gpus"] and f["rdma"] and not f["peer_memory"]
    ]
    topology = [
        (h, "GPUs are joined across CPU sockets (SYS)") for h, f in hosts.items() if _across_sockets(f["gpu_topology"])
    ]
    return [
        each("RDMA libraries", "present or not needed", verbs, "else NCCL uses TCP; NCCL_NET=IB makes that an error"),
        each(
            "GPUDirect RDMA", "possible or not needed", peer, "modprobe nvidia-peermem; else data goes through the host"
        ),
        each("GPU topology", "within one socket", topology, "expect a slower exchange inside the host"),
        _numa(hosts),
    ]


def _across_sockets(topology: str) -> bool:
    """Whether `nvidia-smi topo -m` joins two GPUs by SYS; its legend and the columns of adapters do not count."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in topology.splitlines()]
    rows = [words[1:] for words in lines if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words]
    return any("SYS" in words[: len(rows)] for words in rows)


def _numa(hosts: Hosts) -> Finding:
    """Ranks are bound to the cores of their GPU's node: it must be told, and have cores for this process."""
    bad, good = [], []
    for host, facts in hosts.items():
        nodes = facts["numa_cores"]
        if not facts["gpus"] or len(nodes) < 2:
            continue
        gpus_of = collections.defaultdict(list)
        for gpu in facts["gpus"]:
            gpus_of[gpu.get("numa_node")].append(gpu["index"])
        text = "; ".join(f"{_list('GPU', found)} on node {node}" for node, found in gpus_of.items() if _told(node))
        good.append(f"{host}: {text}")
        unknown = [index for node, found in gpus_of.items() if not _told(node) for index in found]
        if unknown:
            bad.append((host, f"the node of {_list('GPU', unknown)} is unknown: ranks are not bound"))
        for node, found in gpus_of.items():
            if _told(node) and not nodes.get(str(node)):
                bad.append((host, f"none of the cores of node {node} is open to {_list('GPU', found)}"))
        bad += [(host, text) for text in _far_adapters(facts)]
    remedy = "set NUMA affinity in the BIOS or virtual machine, and open all cores to the container"
    return each("NUMA", "; ".join(good) or "one node", bad, remedy)


def _far_adapters(facts: Facts) -> list[str]:
    """RDMA adapters that all lie on other nodes than some GPU."""
    near = {a["numa_node"] for a in facts["rdma"] if a["active"] and _told(a.get("numa_node"))}
    far = sorted({g["numa_node"] for g in facts["gpus"] if _told(g.get("numa_node"))} - near)
    return [f"no active RDMA adapter on node {node}: its GPUs send through another" for node in far] if near else []


def _told(node: object) -> bool:
    return isinstance(node, int) and node >= 0


def _list(word: str, indices: list[str]) -> str:
    return f"{word}{'s' if len(indices) > 1 else ''} {', '.join(indices)}"
