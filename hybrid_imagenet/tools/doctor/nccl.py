"""Tries NCCL with two ranks and judges by which way it sent the data."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable

from hybrid_imagenet.comm import nccl_log
from hybrid_imagenet.comm.nccl_log import Transport
from hybrid_imagenet.tools.doctor.findings import FAIL, PASS, WARN, Facts, Finding, Hosts

SECONDS = 120
_HOST_PROBLEM = "the GPUs cannot reach each other's memory: look at NCCL_P2P_DISABLE, ACS and IOMMU of the host (lspci)"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Two ranks: `hosts` as for `hybrid-imagenet run -H`; `where` says what is tried."""

    where: str
    hosts: str
    between: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The exit code of a trial (None: it took too long) and what its ranks printed."""

    code: int | None
    output: str


def trials(hosts: Hosts) -> list[Trial]:
    """Two ranks inside each kind of host, and two on the first two hosts that have GPUs."""
    able = [name for name, facts in hosts.items() if facts["gpus"] and facts["nccl"]]
    found, seen = [], set()
    for name in able:
        kind = tuple(gpu["name"] for gpu in hosts[name]["gpus"])
        if len(kind) >= 2 and kind not in seen:
            seen.add(kind)
            found.append(Trial(f"inside {name}", f"{name}:2", between=False))
    if len(able) >= 2:
        found.append(Trial(f"from {able[0]} to {able[1]}", f"{able[0]}:1,{able[1]}:1", between=True))
    return found


def run(trial: Trial, interface: str | None = None, ssh_port: int | None = None) -> Outcome:
    """Starts the two ranks and waits for them, SECONDS at most."""
    command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2", "-H", trial.hosts]
    command += [f"--network_interfaces={interface}"] if interface else []
    command += [f"--ssh_port={ssh_port}"] if ssh_port else []
    command += ["--module", "hybrid_imagenet.tools.doctor.one_sum"]
    environment = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    try:
        said = process.communicate(timeout=SECONDS)[0]
        return Outcome(process.returncode, said)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        return Outcome(None, process.communicate()[0])


def examine(hosts: Hosts, attempt: Callable[[Trial], Outcome]) -> list[Finding]:
    """Runs all trials; one finding for each."""
    return [judge(trial, attempt(trial), hosts) for trial in trials(hosts)]


def judge(trial: Trial, outcome: Outcome, hosts: Hosts) -> Finding:
    """What a trial shows, with the remedy."""
    check = f"NCCL {trial.where}"
    if outcome.code != 0:
        lines = [line.strip() for line in outcome.output.splitlines() if line.strip()]
        warned = [line for line in lines if "NCCL WARN" in line or line.startswith("error:")]
        reason = f"no sum within {SECONDS} s" if outcome.code is None else f"exit code {outcome.code}"
        last = (warned or lines or ["it said nothing"])[-1][:300]
        return Finding(FAIL, check, f"{reason}: {last}", f"run it by hand: {by_hand(trial)}")
    said = nccl_log.read(outcome.output)
    if not said.ways:
        return Finding(FAIL, check, "the sum did not go through NCCL", "run launch/setup.sh --gpu on these hosts")
    tried = [hosts[word.partition(":")[0]] for word in trial.hosts.split(",")]
    level, remedy = _between(said, tried) if trial.between else _inside(said)
    return Finding(level, check, str(said), remedy)


def _inside(said: Transport) -> tuple[str, str]:
    if "NET" in said.kinds:
        return WARN, f"inside a host data should not cross the network: {_HOST_PROBLEM}"
    return (WARN, _HOST_PROBLEM) if "SHM" in said.kinds else (PASS, "")


def _between(said: Transport, facts: list[Facts]) -> tuple[str, str]:
    adapters = all(any(port["active"] for port in each["rdma"]) for each in facts)
    if any(way.startswith("NET/Socket") for way in said.ways):
        if adapters:
            return WARN, "RDMA adapters are there but not used: see RDMA libraries above; NCCL_NET=IB makes it an error"
        return PASS, ""
    if any(way.startswith("NET/IB") for way in said.ways) and not said.gpudirect:
        return WARN, "data goes through the host's memory: modprobe nvidia-peermem on both, and see NCCL_NET_GDR_LEVEL"
    return PASS, ""


def by_hand(trial: Trial) -> str:
    """The command of a trial, for the user."""
    module = "hybrid_imagenet.tools.doctor.one_sum"
    return f"NCCL_DEBUG=INFO hybrid-imagenet run -np 2 -H {trial.hosts} --module {module}"
