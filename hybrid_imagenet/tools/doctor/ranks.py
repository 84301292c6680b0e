"""Tries whether TensorFlow can be imported, and whether two ranks can add up a vector."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from hybrid_imagenet.tools.doctor.findings import FAIL, PASS, Finding
from hybrid_imagenet.tools.doctor.nccl import SECONDS, Outcome, Trial, by_hand

RIGHT = "the sum is right"  # what each rank of `one_sum` prints
_IMPORT = "import tensorflow; print(tensorflow.__version__)"


def examine(
    names: Sequence[str], imported: Callable[[], Outcome], attempt: Callable[[Trial], Outcome]
) -> list[Finding]:
    """Imports TensorFlow here; then two ranks on the first host, and one on each of the first two.

    Args:
      names: of hosts that answered, at least one.
      imported: imports TensorFlow (`import_tensorflow`).
      attempt: starts two ranks of `one_sum` (`nccl.run`).

    Returns:
      The findings; those about ranks only where TensorFlow could be imported.
    """
    started = time.monotonic()
    outcome = imported()
    spent = time.monotonic() - started
    if outcome.code != 0:
        remedy = "run launch/setup.sh; then look at: python -c 'import tensorflow'"
        return [Finding(FAIL, "TensorFlow", f"cannot be imported: {_last(outcome)}", remedy)]
    findings = [Finding(PASS, "TensorFlow", f"{_last(outcome)}, imported in {spent:.0f} s")]
    trials = [Trial(f"on {names[0]}", f"{names[0]}:2", between=False)]
    if len(names) > 1:
        trials.append(Trial(f"from {names[0]} to {names[1]}", f"{names[0]}:1,{names[1]}:1", between=True))
    for trial in trials:
        started = time.monotonic()
        findings.append(_judge(trial, attempt(trial), time.monotonic() - started))
    return findings


def import_tensorflow() -> Outcome:
    """Imports TensorFlow in a process of its own, which may crash or hang; no GPU is taken."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _IMPORT]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return Outcome(None, f"it took longer than {SECONDS} s")
    return Outcome(done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr)


def _judge(trial: Trial, outcome: Outcome, spent: float) -> Finding:
    check = f"two ranks {trial.where}"
    right = outcome.output.count(RIGHT)
    if outcome.code == 0 and right == 2:
        return Finding(PASS, check, f"they added up a vector, {spent:.0f} s with their start")
    reason = f"no sum within {SECONDS} s" if outcome.code is None else f"exit code {outcome.code}"
    return Finding(FAIL, check, f"{reason}: {_last(outcome)}", f"run it by hand: {by_hand(trial)}")


def _last(outcome: Outcome) -> str:
    """What the output says last, an error before anything else."""
    lines = [line.strip() for line in outcome.output.splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("error:")]
    return (told or lines or [f"exit code {outcome.code}, without a word"])[-1][:300]
