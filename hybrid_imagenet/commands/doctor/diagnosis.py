"""Checks the facts of all hosts: pure functions from facts to findings, each with a remedy."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybrid_imagenet.analysis import published
from hybrid_imagenet.cluster import gpus

Facts = Mapping[str, Any]
# Facts by host name, in the order of the command line.
Hosts = Mapping[str, Facts]

PASS = "OK"
WARN = "WARN"
FAIL = "FAIL"

_MIN_FREE_GB_FOR_RESULTS = 5
_MIN_SHARED_MEMORY_GB_PER_RANK = 0.25
# RLIM_INFINITY, as the probe reports it.
_UNLIMITED = -1


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
      level: PASS, WARN or FAIL.
      check: What was checked.
      message: What was found.
      remedy: What to do; empty if nothing is wrong.
    """

    level: str
    check: str
    message: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class JobRequirements:
    """The needs of a job that hosts are checked against.

    Attributes:
      slots: Ranks on each host, by host name.
      interface: The network interface that the user named, or None.
      data_dir: Directory of the dataset, or None if it is not compared.
      gpus: Whether the ranks will run on GPUs, which is so if any host has one.
    """

    slots: Mapping[str, int]
    interface: str | None = None
    data_dir: str | None = None
    gpus: bool = False


def diagnose(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    """Returns all findings about the hosts that answered, in the order of the report."""
    findings = []
    for check in CHECKS:
        findings += check(hosts, requirements)
    return findings


def check_same(check: str, values: Mapping[str, Any], remedy: str, level: str = FAIL) -> Finding:
    """Passes if all hosts have the same value; otherwise lists the hosts of each value.

    Args:
      check: Name of the check.
      values: Values by host name.
      remedy: What to do if the values differ.
      level: Level of the finding if the values differ.
    """
    hosts_by_value: dict[str, list[str]] = collections.defaultdict(list)
    for host, value in values.items():
        hosts_by_value["none" if value is None else str(value)].append(host)
    if len(hosts_by_value) == 1:
        return Finding(PASS, check, next(iter(hosts_by_value)))
    groups = [f"{value} on {', '.join(names)}" for value, names in hosts_by_value.items()]
    return Finding(level, check, f"differs: {'; '.join(groups)}", remedy)


def check_each(
    check: str,
    passed: str,
    problems: Sequence[tuple[str, str]],
    remedy: str,
    level: str = WARN,
) -> Finding:
    """Passes if no host has a problem; otherwise lists them.

    Args:
      check: Name of the check.
      passed: Message if there are no problems.
      problems: (host, problem) pairs.
      remedy: What to do about the problems.
      level: Level of the finding if there are problems.
    """
    if not problems:
        return Finding(PASS, check, passed)
    message = "; ".join(f"{host}: {problem}" for host, problem in problems)
    return Finding(level, check, message, remedy)


def _check_versions(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    remedy = "run launch/setup.sh from the same checkout on every host"
    python_versions = {host: facts["python"] for host, facts in hosts.items()}
    findings = [check_same("version of Python", python_versions, remedy)]
    packages = sorted({name for facts in hosts.values() for name in facts["versions"]})
    for package in packages:
        versions = {host: facts["versions"].get(package) for host, facts in hosts.items()}
        findings.append(check_same(f"version of {package}", versions, remedy))
    if "horovod" not in packages:
        message = "not installed: TensorFlow connects the ranks"
        findings.append(Finding(WARN, "Horovod", message, remedy))
    digests = {host: facts["code"] for host, facts in hosts.items()}
    findings.append(
        check_same(
            "program", digests, "check out the same commit on all hosts, or share the directory"
        )
    )
    return findings


def _check_host_names(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    problems = []
    for host, facts in hosts.items():
        if facts["unresolved"]:
            problems.append((host, f"cannot look up {', '.join(facts['unresolved'])}"))
    remedy = "add them to DNS or /etc/hosts on that host"
    return [check_each("host names", "known everywhere", problems, remedy, FAIL)]


def _check_interfaces(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    if requirements.interface is not None:
        return _check_named_interface(hosts, requirements.interface)
    if len(hosts) < 2:
        return []
    up = {}
    for host, facts in hosts.items():
        interfaces = facts["interfaces"].items()
        up[host] = {name for name, state in interfaces if state["up"] and name != "lo"}
    common = sorted(set.intersection(*up.values()))
    if not common:
        lists = "; ".join(f"{host}: {', '.join(sorted(names))}" for host, names in up.items())
        message = f"none has the same name on all hosts ({lists})"
        return [Finding(WARN, "interface", message, "rename one, or rely on IP addresses")]
    message = f"on all hosts: {', '.join(common)}"
    if len(common) == 1:
        finding = Finding(PASS, "interface", message)
    else:
        remedy = "choose the fast one with --network_interfaces"
        finding = Finding(WARN, "interface", message, remedy)
    return [finding, *(_check_mtu(hosts, name) for name in common)]


def _check_named_interface(hosts: Hosts, interface: str) -> list[Finding]:
    problems = []
    for host, facts in hosts.items():
        if not facts["interfaces"].get(interface, {}).get("up"):
            problems.append((host, "missing or down"))
    remedy = "choose another, or bring it up with ip link"
    finding = check_each(f"interface {interface}", "up on all hosts", problems, remedy, FAIL)
    if problems:
        return [finding]
    return [finding, _check_mtu(hosts, interface)]


def _check_mtu(hosts: Hosts, interface: str) -> Finding:
    mtus = {host: facts["interfaces"][interface]["mtu"] for host, facts in hosts.items()}
    remedy = "set the same on all hosts and the switch: ip link set ... mtu"
    return check_same(f"MTU of {interface}", mtus, remedy)


def _check_rdma(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    has_rdma = any(facts["rdma"] for facts in hosts.values())
    if len(hosts) < 2 or not has_rdma:
        return []
    without_active_port = []
    with_memory_limit = []
    for host, facts in hosts.items():
        if not any(port["active"] for port in facts["rdma"]):
            without_active_port.append((host, "no active port"))
        if facts["locked_memory"] != _UNLIMITED:
            with_memory_limit.append((host, f"{facts['locked_memory']} bytes"))
    return [
        check_each(
            "RDMA",
            "active on all hosts",
            without_active_port,
            "check ibstat and the switch; until then NCCL uses TCP",
            FAIL,
        ),
        check_each(
            "locked memory",
            "unlimited",
            with_memory_limit,
            "RDMA needs 'memlock unlimited' in /etc/security/limits.conf; in a pod, containerd's"
            " LimitMEMLOCK=infinity",
        ),
    ]


def _check_gpus(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    if not requirements.gpus:
        return [_check_absence_of_gpus(hosts)]
    too_few = []
    without_nccl = []
    models = {}
    drivers = {}
    for host, facts in hosts.items():
        count, ranks = len(facts["gpus"]), requirements.slots[host]
        if count < ranks:
            too_few.append((host, f"{count} GPUs for {ranks} ranks"))
        if facts["gpus"] and facts["nccl"] is False:
            without_nccl.append((host, "Horovod was built without NCCL"))
        models[host] = _different_values(facts["gpus"], "name")
        drivers[host] = _different_values(facts["gpus"], "driver_version")
    return [
        check_each(
            "GPUs",
            "one for each rank",
            too_few,
            "reduce the slots of that host; check nvidia-smi there",
            FAIL,
        ),
        check_same(
            "GPU model", models, "use hosts of one kind: all wait for the slowest GPU", WARN
        ),
        check_same("GPU driver", drivers, "install the same driver on all hosts", WARN),
        _check_gpu_kernels(hosts),
        check_each("NCCL", "built in", without_nccl, "run launch/setup.sh --gpu there", FAIL),
    ]


def _check_absence_of_gpus(hosts: Hosts) -> Finding:
    """Warns if no host shows a GPU although TensorFlow was installed for GPUs."""
    problems = []
    for host, facts in hosts.items():
        if (facts["build"] or {}).get("is_cuda_build"):
            problems.append((host, "TensorFlow is built for GPUs"))
    remedy = (
        "install the driver, or pass the GPUs to the container (docker run --gpus=all); nvidia-smi"
        " must list them"
    )
    return check_each("GPUs", "none on any host: ranks run on the CPU", problems, remedy)


def _different_values(rows: Sequence[Mapping[str, str]], field: str) -> str | None:
    return ", ".join(sorted({row[field] for row in rows})) or None


def _check_gpu_kernels(hosts: Hosts) -> Finding:
    """Checks that TensorFlow and cuDNN have kernels for the compute capability of each GPU."""
    problems = []
    capabilities = set()
    for host, facts in hosts.items():
        build = facts["build"] or {}
        if facts["gpus"] and build and not build.get("is_cuda_build"):
            problems.append(
                (host, "this TensorFlow is built for the CPU: run launch/setup.sh --gpu there")
            )
            continue
        for gpu in facts["gpus"]:
            capability = _version_numbers(gpu.get("compute_cap"))
            if len(capability) != 2:
                continue
            major, minor = capability
            capabilities.add(f"{major}.{minor}")
            kernels = build.get("cuda_compute_capabilities", ())
            cudnn = _version_numbers(facts["versions"].get("nvidia-cudnn-cu12"))[:3] or None
            reason = gpus.unsupported_gpu_problem((major, minor), kernels, cudnn)
            if reason:
                problems.append((host, f"GPU {gpu['index']} ({gpu['name']}): {reason}"))
    if not capabilities and not problems:
        message = "nvidia-smi does not report the compute capability"
        return Finding(WARN, "GPU kernels", message, "install a newer driver")
    return check_each(
        "GPU kernels",
        f"TensorFlow and cuDNN have them for compute capability {', '.join(sorted(capabilities))}",
        problems,
        "see docs/install.md for the TensorFlow and cuDNN that fit this GPU",
        FAIL,
    )


def _version_numbers(text: object) -> tuple[int, ...]:
    """Returns the numbers of a version; none for [N/A] and the like."""
    words = str(text).split(".")
    if not all(word.isdigit() for word in words):
        return ()
    return tuple(int(word) for word in words)


def _check_data(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    data_dir = requirements.data_dir
    if data_dir is None:
        return []
    problems = []
    for host, facts in hosts.items():
        if not facts["data"]["exists"]:
            problems.append((host, f"no {data_dir}"))
    remedy = "copy it there, or mount the shared file system"
    presence = check_each("dataset", "present on all hosts", problems, remedy, FAIL)
    if problems:
        return [presence]
    if not any(facts["data"]["files"] for facts in hosts.values()):
        message = f"not compared: {data_dir} contains only directories"
        remedy = (
            "pass the directory of the shards, or run `hybrid-imagenet data check` on each host"
        )
        return [presence, Finding(WARN, "data files", message, remedy)]
    contents = {}
    for host, facts in hosts.items():
        data = facts["data"]
        contents[host] = f"{data['files']} files, {data['bytes']:,} bytes, digest {data['digest']}"
    remedy = "copy the dataset again, because ranks would read different images"
    return [presence, check_same("data files", contents, remedy)]


def _check_resources(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    """Checks disk space, shared memory and cores."""
    full_disks = []
    small_memories = []
    overloaded = []
    for host, facts in hosts.items():
        ranks = requirements.slots[host]
        free_gb = facts["run_free_gb"] or 0
        shared_memory_gb = facts["shared_memory_gb"] or 0
        if free_gb < _MIN_FREE_GB_FOR_RESULTS:
            full_disks.append((host, f"{free_gb:.1f} GB free"))
        if shared_memory_gb < _MIN_SHARED_MEMORY_GB_PER_RANK * ranks:
            small_memories.append((host, f"{shared_memory_gb:.2f} GB in /dev/shm"))
        if facts["cores"] < ranks:
            overloaded.append((host, f"{ranks} ranks on {facts['cores']} cores"))
    return [
        check_each(
            "space for results",
            f"{_MIN_FREE_GB_FOR_RESULTS} GB or more",
            full_disks,
            "free some space, or choose another --run_dir",
        ),
        check_each(
            "shared memory", "enough", small_memories, "start containers with --shm-size=2g or more"
        ),
        check_each(
            "cores",
            "one or more for each rank",
            overloaded,
            "reduce the slots of that host, because ranks would share a core",
        ),
    ]


def _check_decoding(hosts: Hosts, requirements: JobRequirements) -> list[Finding]:
    """Checks that the cores of each host decode images as fast as its GPUs train on them."""
    too_slow = []
    for host, facts in hosts.items():
        speed = sum(_training_speed(gpu) for gpu in facts["gpus"])
        full_size = published.decoding_cores(speed)
        resized = published.decoding_cores(speed, resized=True)
        if facts["cores"] < full_size:
            needed = f"{facts['cores']} cores of {full_size}, {resized} with --resize=256"
            too_slow.append((host, needed))
    if not requirements.gpus:
        return []
    return [
        check_each(
            "cores that decode",
            "enough for full-size photographs and the GPUs",
            too_slow,
            "make shards with hybrid-imagenet data prepare --resize=256, and measure the host with"
            " hybrid-imagenet bench input",
        )
    ]


def _training_speed(gpu: Mapping[str, Any]) -> float:
    """Returns the fastest known speed of ResNet-50 in FP16 on a GPU in images/s; 0 if unknown."""
    key = published.recognize_gpu(gpu["name"], gpu.get("memory.total") or "")
    if key is None:
        return 0.0
    speeds = published.speeds(key, "fp16", by_this_program=True) or published.speeds(key, "fp16")
    return max((speed.images_per_second for speed in speeds), default=0.0)


CHECKS: tuple[Callable[[Hosts, JobRequirements], list[Finding]], ...] = (
    _check_versions,
    _check_host_names,
    _check_interfaces,
    _check_rdma,
    _check_gpus,
    _check_data,
    _check_resources,
    _check_decoding,
)
