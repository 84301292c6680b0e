"""Tries whether two ranks can add up a vector, and by which way NCCL sends it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable

from hybrid_imagenet.comm import nccl_log
from hybrid_imagenet.comm.nccl_log import Transport
from hybrid_imagenet.tools.doctor.diagnosis import FAIL, PASS, WARN, Facts, Finding, Hosts

SECONDS = 120
RIGHT = "the sum is right"  # what each rank of `one_sum` prints
_MODULE = "hybrid_imagenet.tools.doctor.one_sum"
_HOST_PROBLEM = (
    "the GPUs cannot reach each other's memory: look at NCCL_P2P_DISABLE, ACS and IOMMU of the host"
    " (lspci)"
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Two ranks: `hosts` as for `hybrid-imagenet run -H`; `where` says what is tried."""

    where: str
    hosts: str
    between: bool


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The exit code of a trial (None: it took too long) and what its processes printed."""

    code: int | None
    output: str


def examine(hosts: Hosts, through_nccl: bool, attempt: Callable[[Trial], Outcome]) -> list[Finding]:
    """Starts two ranks inside hosts and between the first two.

    Args:
      hosts: the facts of those that answered, at least one.
      through_nccl: take only hosts with GPUs, one of each kind, and judge the way of the data.
      attempt: starts two ranks of `one_sum` (`run`).
    """
    findings = []
    for trial in trials(hosts, through_nccl):
        began = time.monotonic()
        outcome = attempt(trial)
        findings.append(
            judge(trial, outcome, hosts if through_nccl else None, time.monotonic() - began)
        )
    return findings


def trials(hosts: Hosts, through_nccl: bool) -> list[Trial]:
    """Two ranks inside the first host, or inside each kind of host with GPUs, and two between the
    first two hosts.
    """
    able = [
        name
        for name, facts in hosts.items()
        if not through_nccl or (facts["gpus"] and facts["nccl"] is not False)
    ]
    inside = able[:1]
    if through_nccl:
        kinds = {tuple(gpu["name"] for gpu in hosts[name]["gpus"]): name for name in reversed(able)}
        inside = [name for name in able if name in kinds.values() and len(hosts[name]["gpus"]) > 1]
    found = [Trial(f"inside {name}", f"{name}:2", between=False) for name in inside]
    if len(able) >= 2:
        found.append(
            Trial(f"from {able[0]} to {able[1]}", f"{able[0]}:1,{able[1]}:1", between=True)
        )
    return found


def run(trial: Trial, interface: str | None = None, ssh_port: int | None = None) -> Outcome:
    """Starts the two ranks and waits for them, SECONDS at most."""
    command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2", "-H", trial.hosts]
    command += [f"--network_interfaces={interface}"] if interface else []
    command += [f"--ssh_port={ssh_port}"] if ssh_port else []
    environment = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
    process = subprocess.Popen(
        [*command, "--module", _MODULE],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        said = process.communicate(timeout=SECONDS)[0]
        return Outcome(process.returncode, said)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its ranks
        return Outcome(None, process.communicate()[0])


def judge(trial: Trial, outcome: Outcome, hosts: Hosts | None, seconds: float) -> Finding:
    """What a trial shows, with the remedy; `hosts` are the facts where the sum should have gone
    through NCCL.
    """
    check = f"{'two ranks' if hosts is None else 'NCCL'} {trial.where}"
    if outcome.code != 0 or outcome.output.count(RIGHT) != 2:
        reason = (
            f"no sum within {SECONDS} s" if outcome.code is None else f"exit code {outcome.code}"
        )
        by_hand = f"NCCL_DEBUG=INFO hybrid-imagenet run -np 2 -H {trial.hosts} --module {_MODULE}"
        return Finding(FAIL, check, f"{reason}: {_last(outcome)}", f"run it by hand: {by_hand}")
    if hosts is None:
        return Finding(PASS, check, f"they added up a vector, {seconds:.0f} s with their start")
    said = nccl_log.read(outcome.output)
    if not said.ways:
        return Finding(
            FAIL,
            check,
            "the sum did not go through NCCL",
            "run launch/setup.sh --gpu on these hosts",
        )
    tried = [hosts[word.partition(":")[0]] for word in trial.hosts.split(",")]
    level, remedy = _between(said, tried) if trial.between else _inside(said)
    return Finding(level, check, str(said), remedy)


def _inside(said: Transport) -> tuple[str, str]:
    if "NET" in said.kinds:
        return WARN, f"inside a host data should not cross the network: {_HOST_PROBLEM}"
    return (WARN, _HOST_PROBLEM) if "SHM" in said.kinds else (PASS, "")


def _between(said: Transport, facts: list[Facts]) -> tuple[str, str]:
    adapters = all(any(port["active"] for port in each["rdma"]) for each in facts)
    if adapters and any(way.startswith("NET/Socket") for way in said.ways):
        remedy = (
            "install libibverbs1 and ibverbs-providers, on EFA aws-ofi-nccl; NCCL_NET=IB makes it"
            " an error"
        )
        return WARN, f"RDMA adapters are not used: {remedy}"
    if any(way.startswith("NET/IB") for way in said.ways) and not said.gpudirect:
        return (
            WARN,
            (
                "data goes through the host's memory: modprobe nvidia-peermem on both, and see"
                " NCCL_NET_GDR_LEVEL"
            ),
        )
    return PASS, ""


def _last(outcome: Outcome) -> str:
    """What the output says last, an error before anything else."""
    lines = [line.strip() for line in outcome.output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:") or "NCCL WARN" in line]
    return (told or lines or [f"exit code {outcome.code}, without a word"])[-1][:300]
