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


def each(
    check: str, good: str, problems: Sequence[tuple[str, str]], remedy: str, level: str = WARN
) -> Finding:
    """Passes with `good` if there are no (host, problem) pairs."""
    if not problems:
        return Finding(PASS, check, good)
    return Finding(
        level, check, "; ".join(f"{host}: {problem}" for host, problem in problems), remedy
    )


def judge(hosts: Hosts, request: Request) -> list[Finding]:
    """All findings about hosts that answered, in the order in which they are read best."""
    return [finding for check in CHECKS for finding in check(hosts, request)]


def _versions(hosts: Hosts, request: Request) -> list[Finding]:
    names = sorted({name for facts in hosts.values() for name in facts["versions"]})
    remedy = "run launch/setup.sh of the same checkout on every host"
    findings = [
        same(f"version of {n}", {h: f["versions"].get(n) for h, f in hosts.items()}, remedy)
        for n in names
    ]
    findings.insert(
        0, same("version of Python", {h: f["python"] for h, f in hosts.items()}, remedy)
    )
    if "horovod" not in names:
        findings.append(
            Finding(WARN, "Horovod", "not installed: ranks connect by TensorFlow", remedy)
        )
    code = {h: f["code"] for h, f in hosts.items()}
    findings.append(
        same("program", code, "bring all hosts to the same commit, or use a shared file system")
    )
    return findings


def _names(hosts: Hosts, request: Request) -> list[Finding]:
    bad = [
        (h, f"cannot look up {', '.join(f['unresolved'])}")
        for h, f in hosts.items()
        if f["unresolved"]
    ]
    return [
        each(
            "host names",
            "known everywhere",
            bad,
            "add them to DNS or /etc/hosts on that host",
            FAIL,
        )
    ]


def _interfaces(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 and request.interface is None:
        return []
    up = {
        h: {n for n, i in f["interfaces"].items() if i["up"] and n != "lo"}
        for h, f in hosts.items()
    }
    common, name = set.intersection(*up.values()), request.interface
    if name is not None:
        missing = [
            (h, "missing or down")
            for h, f in hosts.items()
            if not f["interfaces"].get(name, {}).get("up")
        ]
        remedy = "name another, or bring it up: ip link"
        findings = [each(f"interface {name}", "up on all hosts", missing, remedy, FAIL)]
        common = set() if missing else {name}
    elif not common:
        lists = "; ".join(f"{h}: {', '.join(sorted(names))}" for h, names in up.items())
        return [
            Finding(
                WARN,
                "interface",
                f"none has the same name on all hosts ({lists})",
                "rename, or rely on IP",
            )
        ]
    else:
        hint = "" if len(common) == 1 else "name the fast one with --network_interfaces"
        findings = [
            Finding(
                PASS if not hint else WARN,
                "interface",
                f"on all hosts: {', '.join(sorted(common))}",
                hint,
            )
        ]
    for device in sorted(common):
        mtu = {h: f["interfaces"][device]["mtu"] for h, f in hosts.items()}
        findings.append(
            same(f"MTU of {device}", mtu, "set the same on hosts and switch: ip link set ... mtu")
        )
    return findings


def _rdma(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 or not any(f["rdma"] for f in hosts.values()):
        return []
    down = [
        (h, "no active port")
        for h, f in hosts.items()
        if not any(port["active"] for port in f["rdma"])
    ]
    locked = [
        (h, f"{f['locked_memory']} bytes") for h, f in hosts.items() if f["locked_memory"] != -1
    ]
    memlock = (
        "RDMA needs 'memlock unlimited' in /etc/security/limits.conf; in a pod, containerd's"
        " LimitMEMLOCK=infinity"
    )
    return [
        each(
            "RDMA",
            "active on all hosts",
            down,
            "look at ibstat and the switch; else NCCL uses TCP",
            FAIL,
        ),
        each("locked memory", "unlimited", locked, memlock),
    ]


def _gpus(hosts: Hosts, request: Request) -> list[Finding]:
    if not request.gpus:
        meant = [
            (h, "TensorFlow is built for GPUs")
            for h, f in hosts.items()
            if (f["build"] or {}).get("is_cuda_build")
        ]
        remedy = (
            "install the driver, or pass the GPUs to the container (docker run --gpus=all): compare"
            " nvidia-smi"
        )
        return [each("GPUs", "none on any host: ranks run on the CPU", meant, remedy)]
    few = [
        (h, f"{len(f['gpus'])} GPUs for {request.slots[h]} ranks")
        for h, f in hosts.items()
        if len(f["gpus"]) < request.slots[h]
    ]
    models = {
        h: ", ".join(sorted({g["name"] for g in f["gpus"]})) or None for h, f in hosts.items()
    }
    drivers = {
        h: ", ".join(sorted({g["driver_version"] for g in f["gpus"]})) or None
        for h, f in hosts.items()
    }
    unbuilt = [
        (h, "Horovod was built without NCCL")
        for h, f in hosts.items()
        if f["gpus"] and f["nccl"] is False
    ]
    return [
        each(
            "GPUs",
            "one for each rank",
            few,
            "lower the slots of that host; look at nvidia-smi there",
            FAIL,
        ),
        same("GPU model", models, "the slowest GPU holds up all: use hosts of one kind", WARN),
        same("GPU driver", drivers, "install the same driver on all hosts", WARN),
        _kernels(hosts),
        each("NCCL", "built in", unbuilt, "run launch/setup.sh --gpu there", FAIL),
    ]


def _kernels(hosts: Hosts) -> Finding:
    """TensorFlow's and cuDNN's kernels against the compute capability of each GPU."""
    bad, known = [], set()
    for host, facts in hosts.items():
        build = facts["build"] or {}
        if facts["gpus"] and build and not build.get("is_cuda_build"):
            bad.append(
                (host, "this TensorFlow is built for the CPU: run launch/setup.sh --gpu there")
            )
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
        return Finding(
            WARN,
            "GPU kernels",
            "nvidia-smi does not tell the compute capability",
            "install a newer driver",
        )
    good = f"TensorFlow and cuDNN have them for compute capability {', '.join(sorted(known))}"
    return each(
        "GPU kernels",
        good,
        bad,
        "docs/install.md tells which TensorFlow and cuDNN fit which GPU",
        FAIL,
    )


def _numbers(text: object) -> tuple[int, ...]:
    """The numbers of a version; none for [N/A] and the like."""
    parts = str(text).split(".")
    return tuple(int(part) for part in parts) if all(part.isdigit() for part in parts) else ()


def _data(hosts: Hosts, request: Request) -> list[Finding]:
    if request.data_dir is None:
        return []
    missing = [(h, f"no {request.data_dir}") for h, f in hosts.items() if not f["data"]["exists"]]
    check = each(
        "dataset",
        "present on all hosts",
        missing,
        "copy it there, or mount the shared file system",
        FAIL,
    )
    if missing:
        return [check]
    if not any(f["data"]["files"] for f in hosts.values()):
        remedy = (
            "name the directory of the shards, or run `hybrid-imagenet data check` on each host"
        )
        return [
            check,
            Finding(
                WARN,
                "data files",
                f"not compared: {request.data_dir} holds directories only",
                remedy,
            ),
        ]
    held = {
        h: f"{f['data']['files']} files, {f['data']['bytes']:,} bytes, digest {f['data']['digest']}"
        for h, f in hosts.items()
    }
    return [check, same("data files", held, "ranks would read different images: copy it again")]


def _host(hosts: Hosts, request: Request) -> list[Finding]:
    full = [
        (h, f"{f['run_free_gb']:.1f} GB free")
        for h, f in hosts.items()
        if (f["run_free_gb"] or 0) < 5
    ]
    small = [
        (h, f"{f['shared_memory_gb'] or 0:.2f} GB in /dev/shm")
        for h, f in hosts.items()
        if (f["shared_memory_gb"] or 0) < 0.25 * request.slots[h]
    ]
    crowded = [
        (h, f"{request.slots[h]} ranks on {f['cores']} cores")
        for h, f in hosts.items()
        if f["cores"] < request.slots[h]
    ]
    return [
        each("space for results", "5 GB or more", full, "make room, or choose another --run_dir"),
        each("shared memory", "enough", small, "containers: --shm-size=2g or more"),
        each(
            "cores",
            "one or more for each rank",
            crowded,
            "lower the slots of that host: ranks would wait in turn",
        ),
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
