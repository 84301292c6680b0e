"""Judges the facts of all hosts: pure functions from facts to findings, each with the remedy."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_imagenet.comm import gpus as setup

Facts = Mapping[str, Any]
Hosts = Mapping[str, Facts]  # by name, in the order of the command line

PASS, WARN, FAIL = "pass", "warn", "fail"
# NVIDIA, "CUDA Compatibility", table 1: the oldest driver for any toolkit of a major version.
_OLDEST_DRIVER = {"11": 450, "12": 525, "13": 580}


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. `remedy` is empty where nothing is wrong."""

    level: str
    check: str
    message: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Request:
    """The user's settings that hosts are checked against."""

    slots: Mapping[str, int]
    interface: str | None = None
    data_dir: str | None = None
    gpus: bool = False  # whether ranks are meant to run on GPUs: some host has one


def same(check: str, values: Mapping[str, Any], remedy: str, level: str = FAIL) -> Finding:
    """Passes if all hosts have one value; else names each value's hosts."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for host, value in values.items():
        groups["none" if value is None else str(value)].append(host)
    if len(groups) == 1:
        return Finding(PASS, check, next(iter(groups)))
    text = "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
    return Finding(level, check, f"differs: {text}", remedy)


def each(check: str, good: str, problems: Sequence[tuple[str, str]], remedy: str, level: str = WARN) -> Finding:
    """Passes with `good` if there are no (host, problem) pairs."""
    if not problems:
        return Finding(PASS, check, good)
    return Finding(level, check, "; ".join(f"{host}: {problem}" for host, problem in problems), remedy)


def judge(hosts: Hosts, request: Request) -> list[Finding]:
    """All findings about hosts that answered, in the order in which they are read best."""
    return [finding for check in CHECKS for finding in check(hosts, request)]


def _versions(hosts: Hosts, request: Request) -> list[Finding]:
    names = sorted({name for facts in hosts.values() for name in facts["versions"]})
    remedy = "run launch/setup.sh of the same checkout on every host"
    findings = [same(f"version of {n}", {h: f["versions"].get(n) for h, f in hosts.items()}, remedy) for n in names]
    findings.insert(0, same("version of Python", {h: f["python"] for h, f in hosts.items()}, remedy))
    if "horovod" not in names:
        findings.append(Finding(FAIL, "Horovod", "not installed", remedy))
    code = {h: f["code"] for h, f in hosts.items()}
    findings.append(same("program", code, "bring all hosts to the same commit, or use a shared file system"))
    return findings


def _names(hosts: Hosts, request: Request) -> list[Finding]:
    bad = [(h, f"cannot look up {', '.join(f['unresolved'])}") for h, f in hosts.items() if f["unresolved"]]
    return [each("host names", "known everywhere", bad, "add them to DNS or /etc/hosts on that host", FAIL)]


def _interfaces(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 and request.interface is None:
        return []
    up = {h: {n for n, i in f["interfaces"].items() if i["up"] and n != "lo"} for h, f in hosts.items()}
    common, name = set.intersection(*up.values()), request.interface
    if name is not None:
        missing = [(h, "missing or down") for h, f in hosts.items() if not f["interfaces"].get(name, {}).get("up")]
        remedy = "name another, or bring it up: ip link"
        findings = [each(f"interface {name}", "up on all hosts", missing, remedy, FAIL)]
        common = set() if missing else {name}
    elif not common:
        lists = "; ".join(f"{h}: {', '.join(sorted(names))}" for h, names in up.items())
        return [Finding(WARN, "interface", f"none has the same name on all hosts ({lists})", "rename, or rely on IP")]
    else:
        hint = "" if len(common) == 1 else "name the fast one with --network_interfaces"
        findings = [
            Finding(PASS if not hint else WARN, "interface", f"on all hosts: {', '.join(sorted(common))}", hint)
        ]
    for device in sorted(common):
        mtu = {h: f["interfaces"][device]["mtu"] for h, f in hosts.items()}
        findings.append(same(f"MTU of {device}", mtu, "set the same on hosts and switch: ip link set ... mtu"))
        speed = {h: f["interfaces"][device]["mbit_s"] for h, f in hosts.items()}
        findings.append(same(f"Mbit/s of {device}", speed, "the slowest link holds up all: check cable and port", WARN))
    return findings


def _rdma(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 or not any(f["rdma"] for f in hosts.values()):
        return []
    down = [(h, "no active port") for h, f in hosts.items() if not any(port["active"] for port in f["rdma"])]
    locked = [(h, f"{f['locked_memory']} bytes") for h, f in hosts.items() if f["locked_memory"] != -1]
    memlock = "set 'memlock unlimited' in /etc/security/limits.conf: RDMA needs it"
    return [
        each("RDMA", "active on all hosts", down, "look at ibstat and the switch; else NCCL uses TCP", FAIL),
        each("locked memory", "unlimited", locked, memlock),
    ]


def _gpus(hosts: Hosts, request: Request) -> list[Finding]:
    hidden = [
        (h, f"{len(f['gpu_bus'])} on the PCI bus, {len(f['gpus'])} in nvidia-smi")
        for h, f in hosts.items()
        if len(f["gpus"]) < min(len(f["gpu_bus"]), request.slots[h])  # a container may be given a part of them
    ]
    remedy = "install the driver, or pass the GPUs to the container (docker run --gpus=all); dmesg says what failed"
    seen = each("GPUs in sight", "all that are needed", hidden, remedy)
    if not request.gpus:
        none = Finding(PASS, "GPUs", "none on any host: ranks run on the CPU")
        return [none] if seen.level == PASS else [seen, none]
    few = [
        (h, f"{len(f['gpus'])} GPUs for {request.slots[h]} ranks")
        for h, f in hosts.items()
        if len(f["gpus"]) < request.slots[h]
    ]
    models = {h: ", ".join(sorted({g["name"] for g in f["gpus"]})) or None for h, f in hosts.items()}
    drivers = {h: ", ".join(sorted({g["driver_version"] for g in f["gpus"]})) or None for h, f in hosts.items()}
    unbuilt = [(h, "Horovod was built without NCCL") for h, f in hosts.items() if f["gpus"] and not f["nccl"]]
    return [
        seen,
        each("GPUs", "one for each rank", few, "lower the slots of that host, or look at nvidia-smi", FAIL),
        same("GPU model", models, "the slowest GPU holds up all: use hosts of one kind", WARN),
        same("GPU driver", drivers, "install the same driver on all hosts", WARN),
        _kernels(hosts),
        _driver_age(hosts),
        each("NCCL", "built in", unbuilt, "run launch/setup.sh --gpu there", FAIL),
        *_health(hosts),
        *_paths(hosts),
    ]


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
    errors, clocks = [], []
    for host, facts in hosts.items():
        for gpu in facts["gpus"]:
            if gpu["ecc.errors.uncorrected.volatile.total"] not in ("0", "[N/A]", "N/A", ""):
                errors.append((host, f"{gpu['ecc.errors.uncorrected.volatile.total']} on GPU {gpu['index']}"))
            # Bits that slow a GPU down for good or ill: 0x1 is idle, 0x2 a limit that the user has set.
            reason = gpu["clocks_throttle_reasons.active"]
            if reason.startswith("0x") and int(reason, 16) & ~0x3:
                clocks.append((host, f"GPU {gpu['index']} is slowed down (reasons {reason})"))
    return [
        each("ECC errors", "none uncorrected", errors, "take the host out and have the GPU replaced", FAIL),
        each("GPU clocks", "not slowed down", clocks, "look at nvidia-smi -q -d PERFORMANCE: power, heat or a cap"),
    ]


def _paths(hosts: Hosts) -> list[Finding]:
    """How data gets from a GPU to the network."""
    verbs = []
    for host, facts in hosts.items():
        reason = setup.verbs_missing(bool(facts["rdma"]), facts["verbs"]["devices"], facts["verbs"]["library"])
        reason = reason or setup.plugin_missing(facts["verbs"]["efa"], facts["verbs"]["plugin"])
        if facts["gpus"] and reason:
            verbs.append((host, reason))
    peer = [
        (h, "nvidia-peermem is not loaded")
        for h, f in hosts.items()
        if f["gpus"] and f["rdma"] and not f["peer_memory"]
    ]
    loaded = "modprobe nvidia-peermem; else data goes through the host"
    return [
        each("RDMA libraries", "present or not needed", verbs, "else NCCL uses TCP; NCCL_NET=IB makes that an error"),
        each("GPUDirect RDMA", "possible or not needed", peer, loaded),
    ]


def _data(hosts: Hosts, request: Request) -> list[Finding]:
    if request.data_dir is None:
        return []
    missing = [(h, f"no {request.data_dir}") for h, f in hosts.items() if not f["data"]["exists"]]
    check = each("data set", "present on all hosts", missing, "copy it there, or mount the shared file system", FAIL)
    if missing:
        return [check]
    held = {
        h: f"{f['data']['files']} files, {f['data']['bytes']:,} bytes, digest {f['data']['digest']}"
        for h, f in hosts.items()
    }
    return [check, same("data files", held, "ranks would read different images: copy it again")]


def _host(hosts: Hosts, request: Request) -> list[Finding]:
    full = [(h, f"{f['run_free_gb']:.1f} GB free") for h, f in hosts.items() if (f["run_free_gb"] or 0) < 5]
    small = [
        (h, f"{f['shared_memory_gb'] or 0:.2f} GB in /dev/shm")
        for h, f in hosts.items()
        if (f["shared_memory_gb"] or 0) < 0.25 * request.slots[h]
    ]
    files = [(h, str(f["open_files"])) for h, f in hosts.items() if 0 <= f["open_files"] < 4096]
    crowded = [
        (h, f"{request.slots[h]} ranks on {f['cores']} cores")
        for h, f in hosts.items()
        if f["cores"] < request.slots[h]
    ]
    return [
        each("space for results", "5 GB or more", full, "make room, or choose another --run_dir"),
        each("shared memory", "enough", small, "containers: --shm-size=2g or more"),
        each("open files", "4096 or more", files, "ulimit -n 65536, or nofile in /etc/security/limits.conf"),
        each("cores", "one or more for each rank", crowded, "lower the slots of that host: ranks would wait in turn"),
    ]


CHECKS: tuple[Callable[[Hosts, Request], list[Finding]], ...] = (
    _versions,
    _names,
    _interfaces,
    _rdma,
    _gpus,
    _data,
    _host,
)
