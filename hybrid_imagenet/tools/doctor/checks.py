"""Judges the facts of all hosts: pure functions from facts to findings, each with the remedy."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def judge(hosts: Hosts, request: Request) -> list[Finding]:
    """All findings about hosts that answered, in the order in which they are read best."""
    return [finding for check in CHECKS for finding in check(hosts, request)]


def _same(check: str, values: Mapping[str, Any], remedy: str, level: str = FAIL) -> Finding:
    """Passes if all hosts have one value; else names each value's hosts."""
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for host, value in values.items():
        groups["none" if value is None else str(value)].append(host)
    if len(groups) == 1:
        return Finding(PASS, check, next(iter(groups)))
    text = "; ".join(f"{value} on {', '.join(names)}" for value, names in groups.items())
    return Finding(level, check, f"differs: {text}", remedy)


def _each(check: str, good: str, problems: Sequence[tuple[str, str]], remedy: str, level: str = WARN) -> Finding:
    """Passes with `good` if there are no (host, problem) pairs."""
    if not problems:
        return Finding(PASS, check, good)
    return Finding(level, check, "; ".join(f"{host}: {problem}" for host, problem in problems), remedy)


def _versions(hosts: Hosts, request: Request) -> list[Finding]:
    names = sorted({name for facts in hosts.values() for name in facts["versions"]})
    remedy = "run launch/setup.sh of the same checkout on every host"
    findings = [_same(f"version of {n}", {h: f["versions"].get(n) for h, f in hosts.items()}, remedy) for n in names]
    findings.insert(0, _same("version of Python", {h: f["python"] for h, f in hosts.items()}, remedy))
    if "horovod" not in names:
        findings.append(Finding(FAIL, "Horovod", "not installed", remedy))
    code = {h: f["code"] for h, f in hosts.items()}
    findings.append(_same("program", code, "bring all hosts to the same commit, or use a shared file system"))
    return findings


def _names(hosts: Hosts, request: Request) -> list[Finding]:
    bad = [(h, f"cannot look up {', '.join(f['unresolved'])}") for h, f in hosts.items() if f["unresolved"]]
    findings = [_each("host names", "known everywhere", bad, "add them to DNS or /etc/hosts on that host", FAIL)]
    own = collections.Counter(f["host"] for f in hosts.values())
    twice = [name for name, count in own.items() if count > 1]
    if twice:
        findings.append(
            Finding(FAIL, "host names", f"{twice[0]} is the name of several hosts", "give each host a name of its own")
        )
    return findings


def _interfaces(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 and request.interface is None:
        return []
    common = set.intersection(
        *({n for n, i in f["interfaces"].items() if i["up"] and n != "lo"} for f in hosts.values())
    )
    name = request.interface
    if name is not None:
        missing = [(h, "missing or down") for h, f in hosts.items() if name not in common and not _up(f, name)]
        findings = [
            _each(f"interface {name}", "up on all hosts", missing, "name another, or bring it up: ip link", FAIL)
        ]
        if missing:
            return findings
        chosen = [name]
    elif not common:
        lists = "; ".join(f"{h}: {', '.join(f['interfaces'])}" for h, f in hosts.items())
        return [Finding(WARN, "interface", f"none has the same name on all hosts ({lists})", "rename, or rely on IP")]
    else:
        chosen = sorted(common)
        hint = "" if len(chosen) == 1 else "name the fast one with --interface"
        findings = [Finding(PASS if not hint else WARN, "interface", f"on all hosts: {', '.join(chosen)}", hint)]
    for device in chosen:
        mtu = {h: f["interfaces"][device]["mtu"] for h, f in hosts.items()}
        findings.append(_same(f"MTU of {device}", mtu, "set the same on hosts and switch: ip link set ... mtu"))
        speed = {h: f["interfaces"][device]["mbit_s"] for h, f in hosts.items()}
        findings.append(
            _same(f"Mbit/s of {device}", speed, "the slowest link holds up all: check cable and port", WARN)
        )
    return findings


def _up(facts: Facts, name: str) -> bool:
    return bool(facts["interfaces"].get(name, {}).get("up"))


def _gpus(hosts: Hosts, request: Request) -> list[Finding]:
    if not request.gpus:
        return [Finding(PASS, "GPUs", "none on any host: ranks run on the CPU")]
    few = [
        (h, f"{len(f['gpus'])} GPUs for {request.slots[h]} ranks")
        for h, f in hosts.items()
        if len(f["gpus"]) < request.slots[h]
    ]
    findings = [_each("GPUs", "one for each rank", few, "lower the slots of that host, or look at nvidia-smi", FAIL)]
    models = {h: ", ".join(sorted({g["name"] for g in f["gpus"]})) or None for h, f in hosts.items()}
    findings.append(_same("GPU model", models, "the slowest GPU holds up all: use hosts of one kind", WARN))
    drivers = {h: ", ".join(sorted({g["driver_version"] for g in f["gpus"]})) or None for h, f in hosts.items()}
    findings.append(_same("GPU driver", drivers, "install the same driver on all hosts", WARN))
    unbuilt = [(h, "Horovod was built without NCCL") for h, f in hosts.items() if f["gpus"] and not f["nccl"]]
    findings.append(_each("NCCL", "built in", unbuilt, "run launch/setup.sh --gpu there", FAIL))
    findings.extend(_gpu_health(hosts))
    return findings


def _gpu_health(hosts: Hosts) -> list[Finding]:
    ecc, errors, clocks = [], [], []
    for host, facts in hosts.items():
        for gpu in facts["gpus"]:
            where = (host, gpu["index"])
            if gpu["ecc.mode.current"] == "Disabled":
                ecc.append((host, f"off on GPU {where[1]}"))
            if gpu["ecc.errors.uncorrected.volatile.total"] not in ("0", "[N/A]", "N/A"):
                errors.append((host, f"{gpu['ecc.errors.uncorrected.volatile.total']} on GPU {where[1]}"))
            # Bits that slow a GPU down for good or ill: 0x1 is idle, 0x2 a limit that the user has set.
            reason = gpu["clocks_throttle_reasons.active"]
            if reason.startswith("0x") and int(reason, 16) & ~0x3:
                clocks.append((host, f"GPU {where[1]} is slowed down (reasons {reason})"))
    peer = [
        (h, "nvidia-peermem is not loaded")
        for h, f in hosts.items()
        if f["gpus"] and f["rdma"] and not f["peer_memory"]
    ]
    topology = [
        (h, "GPUs are joined across CPU sockets (SYS)") for h, f in hosts.items() if " SYS " in f"{f['gpu_topology']} "
    ]
    return [
        _each("ECC", "on", ecc, "nvidia-smi -e 1, then restart the host; consumer cards have none"),
        _each("ECC errors", "none uncorrected", errors, "take the host out and have the GPU replaced", FAIL),
        _each("GPU clocks", "not slowed down", clocks, "look at nvidia-smi -q -d PERFORMANCE: power, heat or a cap"),
        _each(
            "GPUDirect RDMA", "possible or not needed", peer, "modprobe nvidia-peermem; else data goes through the host"
        ),
        _each("GPU topology", "within one socket", topology, "expect a slower exchange inside the host"),
    ]


def _rdma(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 or not any(f["rdma"] for f in hosts.values()):
        return []
    down = [(h, "no active port") for h, f in hosts.items() if not any(port["active"] for port in f["rdma"])]
    rates = {h: ", ".join(sorted({str(p["rate"]) for p in f["rdma"] if p["active"]})) or None for h, f in hosts.items()}
    locked = [
        (h, f"{f['limits']['locked memory']} bytes") for h, f in hosts.items() if f["limits"]["locked memory"] != -1
    ]
    return [
        _each("RDMA", "active on all hosts", down, "look at ibstat and the switch; else NCCL uses TCP", FAIL),
        _same("RDMA rate", rates, "the slowest link holds up all", WARN),
        _each(
            "locked memory", "unlimited", locked, "set 'memlock unlimited' in /etc/security/limits.conf: RDMA needs it"
        ),
    ]


def _data(hosts: Hosts, request: Request) -> list[Finding]:
    if request.data_dir is None:
        return []
    missing = [(h, f"no {request.data_dir}") for h, f in hosts.items() if not f["data"]["exists"]]
    check = _each("data set", "present on all hosts", missing, "copy it there, or mount the shared file system", FAIL)
    if missing:
        return [check]
    held = {
        h: f"{f['data']['files']} files, {f['data']['bytes']:,} bytes, digest {f['data']['digest']}"
        for h, f in hosts.items()
    }
    return [check, _same("data files", held, "ranks would read different images: copy it again")]


def _storage(hosts: Hosts, request: Request) -> list[Finding]:
    findings = []
    if len(hosts) > 1:
        alone = [(h, "does not see the first host's files") for h, f in hosts.items() if f["sees_token"] is False]
        remedy = "not needed with one copy of data and program per host; results then lie on the first"
        findings.append(_each("shared run directory", "seen by all hosts", alone, remedy))
    full = [(h, f"{f['run_free_gb']:.1f} GB free") for h, f in hosts.items() if (f["run_free_gb"] or 0) < 5]
    findings.append(_each("space for results", "5 GB or more", full, "make room, or choose another --run_dir"))
    small = [
        (h, f"{f['shared_memory_gb'] or 0:.2f} GB in /dev/shm")
        for h, f in hosts.items()
        if (f["shared_memory_gb"] or 0) < 0.25 * request.slots[h]
    ]
    findings.append(_each("shared memory", "enough", small, "containers: --shm-size=2g or more"))
    return findings


def _limits(hosts: Hosts, request: Request) -> list[Finding]:
    files = [(h, str(f["limits"]["open files"])) for h, f in hosts.items() if 0 <= f["limits"]["open files"] < 4096]
    tasks = [(h, str(f["limits"]["processes"])) for h, f in hosts.items() if 0 <= f["limits"]["processes"] < 4096]
    crowded = [
        (h, f"{request.slots[h]} ranks on {f['cores']} cores")
        for h, f in hosts.items()
        if f["cores"] < request.slots[h]
    ]
    return [
        _each("open files", "4096 or more", files, "ulimit -n 65536, or nofile in /etc/security/limits.conf"),
        _each("processes and threads", "4096 or more", tasks, "ulimit -u, or nproc in /etc/security/limits.conf"),
        _each("cores", "one or more for each rank", crowded, "lower the slots of that host: ranks would wait in turn"),
    ]


def _clocks(hosts: Hosts, request: Request) -> list[Finding]:
    off = [(h, f"{f['clock_offset']:+.1f} s") for h, f in hosts.items() if abs(f["clock_offset"]) > 1]
    return [_each("clocks", "within 1 s of this host", off, "start chrony or systemd-timesyncd there")]


CHECKS: tuple[Callable[[Hosts, Request], list[Finding]], ...] = (
    _versions,
    _names,
    _interfaces,
    _rdma,
    _gpus,
    _data,
    _storage,
    _limits,
    _clocks,
)
