"""Judges the facts of all hosts: pure functions from facts to findings, each with the remedy."""

from __future__ import annotations

import collections
from collections.abc import Callable

from hybrid_imagenet.tools.doctor import gpu_checks
from hybrid_imagenet.tools.doctor.findings import FAIL, PASS, WARN, Facts, Finding, Hosts, Request, each, same


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
    findings = [each("host names", "known everywhere", bad, "add them to DNS or /etc/hosts on that host", FAIL)]
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
            each(f"interface {name}", "up on all hosts", missing, "name another, or bring it up: ip link", FAIL)
        ]
        if missing:
            return findings
        chosen = [name]
    elif not common:
        lists = "; ".join(f"{h}: {', '.join(f['interfaces'])}" for h, f in hosts.items())
        return [Finding(WARN, "interface", f"none has the same name on all hosts ({lists})", "rename, or rely on IP")]
    else:
        chosen = sorted(common)
        hint = "" if len(chosen) == 1 else "name the fast one with --network_interfaces"
        findings = [Finding(PASS if not hint else WARN, "interface", f"on all hosts: {', '.join(chosen)}", hint)]
    for device in chosen:
        mtu = {h: f["interfaces"][device]["mtu"] for h, f in hosts.items()}
        findings.append(same(f"MTU of {device}", mtu, "set the same on hosts and switch: ip link set ... mtu"))
        speed = {h: f["interfaces"][device]["mbit_s"] for h, f in hosts.items()}
        findings.append(same(f"Mbit/s of {device}", speed, "the slowest link holds up all: check cable and port", WARN))
    return findings


def _up(facts: Facts, name: str) -> bool:
    return bool(facts["interfaces"].get(name, {}).get("up"))


def _rdma(hosts: Hosts, request: Request) -> list[Finding]:
    if len(hosts) < 2 or not any(f["rdma"] for f in hosts.values()):
        return []
    down = [(h, "no active port") for h, f in hosts.items() if not any(port["active"] for port in f["rdma"])]
    rates = {h: ", ".join(sorted({str(p["rate"]) for p in f["rdma"] if p["active"]})) or None for h, f in hosts.items()}
    locked = [
        (h, f"{f['limits']['locked memory']} bytes") for h, f in hosts.items() if f["limits"]["locked memory"] != -1
    ]
    return [
        each("RDMA", "active on all hosts", down, "look at ibstat and the switch; else NCCL uses TCP", FAIL),
        same("RDMA rate", rates, "the slowest link holds up all", WARN),
        each(
            "locked memory", "unlimited", locked, "set 'memlock unlimited' in /etc/security/limits.conf: RDMA needs it"
        ),
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


def _storage(hosts: Hosts, request: Request) -> list[Finding]:
    findings = []
    if len(hosts) > 1:
        alone = [(h, "does not see the first host's files") for h, f in hosts.items() if f["sees_token"] is False]
        remedy = "not needed with one copy of data and program per host; results then lie on the first"
        findings.append(each("shared run directory", "seen by all hosts", alone, remedy))
    full = [(h, f"{f['run_free_gb']:.1f} GB free") for h, f in hosts.items() if (f["run_free_gb"] or 0) < 5]
    findings.append(each("space for results", "5 GB or more", full, "make room, or choose another --run_dir"))
    small = [
        (h, f"{f['shared_memory_gb'] or 0:.2f} GB in /dev/shm")
        for h, f in hosts.items()
        if (f["shared_memory_gb"] or 0) < 0.25 * request.slots[h]
    ]
    findings.append(each("shared memory", "enough", small, "containers: --shm-size=2g or more"))
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
        each("open files", "4096 or more", files, "ulimit -n 65536, or nofile in /etc/security/limits.conf"),
        each("processes and threads", "4096 or more", tasks, "ulimit -u, or nproc in /etc/security/limits.conf"),
        each("cores", "one or more for each rank", crowded, "lower the slots of that host: ranks would wait in turn"),
    ]


def _clocks(hosts: Hosts, request: Request) -> list[Finding]:
    off = [(h, f"{f['clock_offset']:+.1f} s") for h, f in hosts.items() if abs(f["clock_offset"]) > 1]
    return [each("clocks", "within 1 s of this host", off, "start chrony or systemd-timesyncd there")]


CHECKS: tuple[Callable[[Hosts, Request], list[Finding]], ...] = (
    _versions,
    _names,
    _interfaces,
    _rdma,
    gpu_checks.gpus,
    _data,
    _storage,
    _limits,
    _clocks,
)
