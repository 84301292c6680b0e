"""Tries whether two ranks can sum a vector, and how NCCL transfers it."""

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

TIME_LIMIT_SECONDS = 120
# Each rank of `one_sum` prints this.
SUCCESS_TEXT = "the sum is right"
_MAX_MESSAGE_CHARACTERS = 300
_MODULE = "hybrid_imagenet.tools.doctor.one_sum"
_HOST_REMEDY = (
    "the GPUs cannot reach each other's memory: check NCCL_P2P_DISABLE, and ACS and IOMMU of the"
    " host (lspci)"
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """Two ranks that sum a vector.

    Attributes:
      where: "inside HOST" or "from HOST to HOST", for the report.
      hosts: value of `-H` of `hybrid-imagenet run`.
      between_hosts: whether the two ranks run on different hosts.
    """

    where: str
    hosts: str
    between_hosts: bool


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial.

    Attributes:
      exit_code: of the job; None if it took too long.
      output: what its processes printed.
    """

    exit_code: int | None
    output: str


def run_trials(
    hosts: Hosts, expect_nccl: bool, run: Callable[[Trial], TrialOutcome]
) -> list[Finding]:
    """Runs two ranks inside hosts, and then between the first two hosts.

    Args:
      hosts: the facts of the hosts that answered, at least one.
      expect_nccl: use only hosts with GPUs, one of each kind, and judge how NCCL transfers the
        data.
      run: runs one trial, see `run_trial`.
    """
    findings = []
    for trial in choose_trials(hosts, expect_nccl):
        started = time.monotonic()
        outcome = run(trial)
        seconds = time.monotonic() - started
        findings.append(judge_outcome(trial, outcome, hosts if expect_nccl else None, seconds))
    return findings


def choose_trials(hosts: Hosts, expect_nccl: bool) -> list[Trial]:
    """Returns trials inside hosts and, with at least two hosts, one between the first two.

    The trials inside hosts are one in the first host or, with `expect_nccl`, one in each kind of
    host that has several GPUs.
    """
    if expect_nccl:
        usable = [name for name, facts in hosts.items() if _can_use_nccl(facts)]
        inside = _one_host_of_each_kind(hosts, usable)
    else:
        usable = list(hosts)
        inside = usable[:1]
    trials = [Trial(f"inside {name}", f"{name}:2", between_hosts=False) for name in inside]
    if len(usable) >= 2:
        first, second = usable[:2]
        trials.append(
            Trial(f"from {first} to {second}", f"{first}:1,{second}:1", between_hosts=True)
        )
    return trials


def _can_use_nccl(facts: Facts) -> bool:
    # Without Horovod (None), TensorFlow uses the NCCL that it contains.
    return bool(facts["gpus"]) and facts["nccl"] is not False


def _one_host_of_each_kind(hosts: Hosts, names: list[str]) -> list[str]:
    """Returns the first host of each combination of GPUs, without those that have only one GPU."""
    chosen = []
    kinds = set()
    for name in names:
        kind = tuple(gpu["name"] for gpu in hosts[name]["gpus"])
        if len(kind) > 1 and kind not in kinds:
            kinds.add(kind)
            chosen.append(name)
    return chosen


def run_trial(
    trial: Trial, interface: str | None = None, ssh_port: int | None = None
) -> TrialOutcome:
    """Starts the two ranks, and waits for them for at most TIME_LIMIT_SECONDS."""
    command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2", "-H", trial.hosts]
    if interface:
        command.append(f"--network_interfaces={interface}")
    if ssh_port:
        command.append(f"--ssh_port={ssh_port}")
    command += ["--module", _MODULE]
    environment = os.environ | {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,GRAPH,ENV"}
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        output = process.communicate(timeout=TIME_LIMIT_SECONDS)[0]
        return TrialOutcome(process.returncode, output)
    except subprocess.TimeoutExpired:
        # The launcher ends its ranks when it gets this signal.
        process.terminate()
        return TrialOutcome(None, process.communicate()[0])


def judge_outcome(
    trial: Trial, outcome: TrialOutcome, hosts: Hosts | None, seconds: float
) -> Finding:
    """Returns the finding of a trial, with the remedy.

    Args:
      trial: what was tried.
      outcome: its result.
      hosts: facts by host name if NCCL should have been used, else None.
      seconds: how long the trial took.
    """
    check = f"{'two ranks' if hosts is None else 'NCCL'} {trial.where}"
    if outcome.exit_code != 0 or outcome.output.count(SUCCESS_TEXT) != 2:
        return _failure(check, trial, outcome)
    if hosts is None:
        return Finding(
            PASS, check, f"they summed a vector in {seconds:.0f} s, including their start"
        )
    transport = nccl_log.parse_transport(outcome.output)
    if not transport.channels:
        remedy = "run launch/setup.sh --gpu on these hosts"
        return Finding(FAIL, check, "the sum did not use NCCL", remedy)
    if trial.between_hosts:
        names = [word.partition(":")[0] for word in trial.hosts.split(",")]
        level, remedy = _judge_between_hosts(transport, [hosts[name] for name in names])
    else:
        level, remedy = _judge_inside_host(transport)
    return Finding(level, check, str(transport), remedy)


def _failure(check: str, trial: Trial, outcome: TrialOutcome) -> Finding:
    if outcome.exit_code is None:
        reason = f"no sum within {TIME_LIMIT_SECONDS} s"
    else:
        reason = f"exit code {outcome.exit_code}"
    command = f"NCCL_DEBUG=INFO hybrid-imagenet run -np 2 -H {trial.hosts} --module {_MODULE}"
    message = f"{reason}: {_last_message(outcome)}"
    return Finding(FAIL, check, message, f"run it by hand: {command}")


def _judge_inside_host(transport: Transport) -> tuple[str, str]:
    """Returns the level and the remedy."""
    if "NET" in transport.channel_kinds:
        return WARN, f"inside a host data should not cross the network: {_HOST_REMEDY}"
    if "SHM" in transport.channel_kinds:
        return WARN, _HOST_REMEDY
    return PASS, ""


def _judge_between_hosts(transport: Transport, facts_of_hosts: list[Facts]) -> tuple[str, str]:
    """Returns the level and the remedy."""
    has_adapters = all(any(port["active"] for port in facts["rdma"]) for facts in facts_of_hosts)
    if has_adapters and any(way.startswith("NET/Socket") for way in transport.channels):
        return WARN, (
            "RDMA adapters are not used: install libibverbs1 and ibverbs-providers, or on EFA"
            " aws-ofi-nccl; NCCL_NET=IB makes it an error"
        )
    uses_infiniband = any(way.startswith("NET/IB") for way in transport.channels)
    if uses_infiniband and not transport.gpudirect:
        return WARN, (
            "data passes through the host's memory: run modprobe nvidia-peermem on both hosts, and"
            " see NCCL_NET_GDR_LEVEL"
        )
    return PASS, ""


def _last_message(outcome: TrialOutcome) -> str:
    """Returns the last error in the output, or else its last line."""
    lines = [line.strip() for line in outcome.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or "NCCL WARN" in line]
    messages = errors or lines or [f"exit code {outcome.exit_code}, without any output"]
    return messages[-1][:_MAX_MESSAGE_CHARACTERS]
