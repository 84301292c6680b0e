"""Tries whether two ranks can sum a vector."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable

from hybrid_imagenet.commands.doctor.diagnosis import FAIL, PASS, Facts, Finding, Hosts

TIME_LIMIT_SECONDS = 120
# Each rank of `one_sum` prints this.
SUCCESS_TEXT = "the sum is right"
_MAX_MESSAGE_CHARACTERS = 300
_MODULE = "hybrid_imagenet.commands.doctor.one_sum"


@dataclasses.dataclass(frozen=True)
class Trial:
    """Two ranks that sum a vector.

    Attributes:
      where: "inside HOST" or "from HOST to HOST", for the report.
      hosts: Value of `-H` of `hybrid-imagenet run`.
    """

    where: str
    hosts: str


@dataclasses.dataclass(frozen=True)
class TrialOutcome:
    """The result of a trial.

    Attributes:
      exit_code: Exit code of the job; None if it took too long.
      output: What its processes printed.
    """

    exit_code: int | None
    output: str


def run_trials(
    hosts: Hosts, expect_nccl: bool, run: Callable[[Trial], TrialOutcome]
) -> list[Finding]:
    """Runs two ranks inside hosts, and then between the first two hosts.

    Args:
      hosts: The facts of the hosts that answered, at least one.
      expect_nccl: Use only hosts with GPUs, one of each kind.
      run: Runs one trial, see `run_trial`.
    """
    findings = []
    for trial in choose_trials(hosts, expect_nccl):
        started = time.monotonic()
        outcome = run(trial)
        seconds = time.monotonic() - started
        findings.append(check_outcome(trial, outcome, expect_nccl, seconds))
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
    trials = [Trial(f"inside {name}", f"{name}:2") for name in inside]
    if len(usable) >= 2:
        first, second = usable[:2]
        trials.append(Trial(f"from {first} to {second}", f"{first}:1,{second}:1"))
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
    # NCCL then prints the cause of a failure.
    environment = os.environ | {"NCCL_DEBUG": "WARN"}
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


def check_outcome(
    trial: Trial, outcome: TrialOutcome, expect_nccl: bool, seconds: float
) -> Finding:
    """Returns the finding of a trial, with the remedy.

    Args:
      trial: What was tried.
      outcome: Its result.
      expect_nccl: Whether NCCL should have summed the vector.
      seconds: How long the trial took.
    """
    check = f"{'NCCL' if expect_nccl else 'two ranks'} {trial.where}"
    if outcome.exit_code != 0 or outcome.output.count(SUCCESS_TEXT) != 2:
        return _failure(check, trial, outcome)
    return Finding(PASS, check, f"they summed a vector in {seconds:.0f} s, including their start")


def _failure(check: str, trial: Trial, outcome: TrialOutcome) -> Finding:
    if outcome.exit_code is None:
        reason = f"no sum within {TIME_LIMIT_SECONDS} s"
    else:
        reason = f"exit code {outcome.exit_code}"
    command = f"NCCL_DEBUG=INFO hybrid-imagenet run -np 2 -H {trial.hosts} --module {_MODULE}"
    message = f"{reason}: {_last_message(outcome)}"
    return Finding(FAIL, check, message, f"run it by hand: {command}")


def _last_message(outcome: TrialOutcome) -> str:
    """Returns the last error in the output, or else its last line."""
    lines = [line.strip() for line in outcome.output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:") or "NCCL WARN" in line]
    messages = errors or lines or [f"exit code {outcome.exit_code}, without any output"]
    return messages[-1][:_MAX_MESSAGE_CHARACTERS]
