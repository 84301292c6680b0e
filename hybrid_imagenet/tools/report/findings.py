"""Answers what one asks of a run first: did it go well, and what held it back."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
from typing import Any

from hybrid_imagenet.analysis import forecast
from hybrid_imagenet.numerics import mlperf
from hybrid_imagenet.numerics.relative_step import TOLERATED_FACTOR
from hybrid_imagenet.runlog import state
from hybrid_imagenet.runlog.summary import duration
from hybrid_imagenet.tools.report.load import Run

GOOD, BAD, OPEN = "good", "bad", "open"
_INPUT_BOUND = 0.1  # of the time
_WORSE = 1.1  # times the least validation loss
_FLAT = 0.002  # top-1 of the last third above the best before
_ENOUGH = 6  # epochs to speak of a trend
_NOTICED = 0.03  # of the time: less is not called a cause


@dataclasses.dataclass(frozen=True)
class Answers:
    """What there is to say first about a run.

    Attributes:
      verdict: `good`, `bad`, or `open` before the end. Without a target that was asked for, a run is good that shows no
        overfitting and did not wait for input.
      outcome: how it went, against its target.
      compared: a run on ImageNet against MLPerf's reference; else empty.
      held_back: a hand-over that lost accuracy, then what took time besides computation, the largest first; shares of
        the run's time.
    """

    verdict: str
    outcome: str
    compared: str
    held_back: list[str]


def answers(run: Run) -> Answers:
    """Judges a run from its records."""
    verdict, outcome = _outcome(run)
    compared = _against_reference(run) if run.imagenet else ""
    return Answers(verdict, outcome, compared, [*_lost_at_handover(run), *_held_back(run)])


def percent(fraction: float) -> str:
    """A fraction as 75.6 %, with as many digits as it takes and no more than two."""
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + " %"


def _outcome(run: Run) -> tuple[str, str]:
    summary = run.summary
    done, planned = summary.get("epochs") or 0, run.epochs_planned
    of = f" of {planned:g}" if planned else ""
    if run.diverged is not None:
        loss = run.diverged.get("train_loss")
        told = f"the loss was {loss:.4g}" if loss is not None else "the loss was not finite"
        return BAD, f"It diverged at step {run.diverged.get('step')}, after {done:g}{of} epochs: {told}."
    best = summary.get("best_val_top1")
    if best is None:
        done_words = f"{done:g}{of} epochs" if done else f"{summary.get('steps') or 0} steps"
        return OPEN, f"Nothing has been validated after {done_words}, {run.state}."
    best_words = f"the best top-1 is {percent(best)}, in epoch {summary.get('best_epoch') or '?'}"
    ended = "" if done == planned else f" after {done:g}{of} epochs"
    ended += "" if run.state == state.FINISHED else f", {run.state}"
    asked = run.targets if run.target_asked or run.imagenet else []
    if not asked:
        signs = [text for text in (overfitting(run), _input_bound(run)) if text]
        verdict = BAD if signs else GOOD if run.state == state.FINISHED else OPEN
        said = [*signs, *filter(None, [_plateau(run)])] or ["No overfitting, and input kept up."]
        return verdict, " ".join([f"{best_words[0].upper()}{best_words[1:]}{ended}.", *said])
    goals = {goal["target"]: goal for goal in summary.get("targets", []) if goal["metric"] == "val_top1"}
    reached = [goals[t] for t in asked if t in goals and goals[t].get("epochs") is not None]
    missed = [t for t in asked if t not in goals or goals[t].get("epochs") is None]
    words = [
        f"Target {percent(goal['target'])} top-1 reached in epoch {goal['epochs']:g}{of}, after "
        f"{duration(goal['seconds'])}"
        for goal in reached
    ]
    words += [
        f"target {percent(target)} top-1 not reached, {100 * (target - best):.2f} points off" for target in missed
    ]
    text = "; ".join([*words, best_words]) + ended + "." + (_expected(run, missed[0]) if missed else "")
    if not missed:
        return GOOD, text
    lost = summary.get("lost_epochs")
    text += f" Records of {len(lost)} epochs are missing." if lost else ""
    return BAD if run.state == state.FINISHED and not lost else OPEN, text[0].upper() + text[1:]


def _expected(run: Run, target: float) -> str:
    """When a run that has not ended may reach its target."""
    epochs, values = run.series("val_top1")
    if run.state in (state.FINISHED, state.STOPPED) or not epochs or not run.epochs_planned:
        return ""
    found = forecast.forecast(epochs, values, target, float(run.epochs_planned))
    if found is None or found.epochs is None:
        return ""
    last = f"{found.high:.0f}" if found.high is not None else "later"
    return f" It may come in epoch {found.epochs:.0f} ({found.low:.0f} to {last})."


def overfitting(run: Run) -> str:
    """Tells whether the validation loss rose in the end while the training loss fell; empty if not."""
    epochs, losses = run.series("val_loss")
    _, training = run.series("train_loss")
    if len(losses) < _ENOUGH or len(training) != len(losses):
        return ""
    least = min(losses)
    at = losses.index(least)
    if losses[-1] < _WORSE * least or training[-1] >= training[at]:
        return ""
    where = f"was least in epoch {epochs[at]:g} ({least:.3g})"
    return f"Overfitting: the validation loss {where} and ended at {losses[-1]:.3g}."


def _plateau(run: Run) -> str:
    _, values = run.series("val_top1")
    early = values[: -(len(values) // 3) or None]
    if len(values) < _ENOUGH or max(values) - max(early) > _FLAT:
        return ""
    return (
        f"Plateau: the last third of the epochs raised the best top-1 by {100 * (max(values) - max(early)):.2f} points."
    )


def _input_bound(run: Run) -> str:
    share = shares(run)[0].get("input", 0.0)
    return f"Input-bound: {100 * share:.0f} % of the time went into waiting for input." if share >= _INPUT_BOUND else ""


def _against_reference(run: Run) -> str:
    """A run on ImageNet beside MLPerf's reference convergence at its batch."""
    batch = global_batch(run)
    epochs, values = run.series("val_top1")
    if not epochs:
        return ""
    horizon = float(run.epochs_planned or epochs[-1])
    gate = forecast.gate(batch, forecast.forecast(epochs, values, mlperf.TARGET, horizon))
    if gate is None:
        return f"MLPerf's reference has no point near batch {batch:,}."
    ahead = "" if gate.ahead_epochs is None else f" by {abs(gate.ahead_epochs):.1f} epochs"
    return (
        f"MLPerf's reference needs {gate.reference_epochs:.1f} epochs to 75.9 % at batch {batch:,}; "
        f"this run is {gate.verdict}{ahead}."
    )


def global_batch(run: Run) -> int:
    """Images per update at the start of a run; 0 if its flags do not tell."""
    images, accumulation = run.flags.get("per_gpu_batch") or 0, run.flags.get("gradient_accumulation_steps") or 1
    return int(images * accumulation * run.summary["world_size"] * (run.flags.get("virtual_gpus") or 1))


_WORDS = {
    "input": "waiting for input",
    "exposed communication": "communication that computation did not hide",
    "slowest rank": "waiting for the slowest rank",
    "evaluation": "evaluation",
    "checkpoints": "waiting for checkpoints",
}


def jump(run: Run) -> tuple[dict[str, Any], dict[str, Any], float] | None:
    """The records before and after AdaBound's warmup, and how many times larger updates are after it.

    The size is the median over layers of |update| / |weights|. None where it does not grow `TOLERATED_FACTOR` times,
    or is not known.
    """
    for before, after in itertools.pairwise(run.epochs):
        if (before.get("phase"), after.get("phase")) != (0, 1):
            continue
        first, second = (
            statistics.median([v for v in (record.get("relative_updates") or {}).values() if v is not None] or [0.0])
            for record in (before, after)
        )
        if first > 0 and second >= TOLERATED_FACTOR * first:
            return before, after, second / first
    return None


def _lost_at_handover(run: Run) -> list[str]:
    found = jump(run)
    if found is None:
        return []
    before, after, times = found
    line = f"After the warmup, in epoch {after['epoch']:g}, updates were {times:.2g} times as large beside the weights"
    if fell(before, after):
        line += f", and training accuracy fell from {percent(before['train_top1'])} to {percent(after['train_top1'])}"
    return [f"{line}."]


def fell(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether training accuracy is known in both records and lower in the second."""
    old, new = before.get("train_top1"), after.get("train_top1")
    return old is not None and new is not None and new < old


def _held_back(run: Run) -> list[str]:
    causes, whole = shares(run)
    if not whole:
        return ["No times are known before the first epoch has ended."]
    lines = []
    for cause, share in sorted(causes.items(), key=lambda pair: -pair[1]):
        if share >= _NOTICED:
            who = f" ({slowest(run)})" if cause == "slowest rank" and slowest(run) else ""
            seconds = duration(share * whole)
            lines.append(f"{100 * share:.0f} % of the time ({seconds}): {_WORDS.get(cause, cause)}{who}")
    if not lines:
        lines.append(f"Nothing that was measured took {100 * _NOTICED:.0f} % of the time or more.")
    if run.summary["world_size"] > 1 and "exposed communication" not in causes:
        lines.append("Communication was not measured.")
    return lines


def shares(run: Run) -> tuple[dict[str, float], float]:
    """The part of the run's time that each cause took, and the time; start and compilation are one of the causes."""
    parts = run.summary.get("time_by_cause") or {}
    whole = run.summary.get("wall_seconds") or 0.0
    if whole <= 0 or not parts:
        return {}, 0.0
    causes = {name: parts[name] / whole for name in _WORDS if name in parts}
    trained = [r["train_seconds"] for r in run.epochs if r.get("train_seconds")]
    if len(trained) > 2:  # the first epoch holds what compilation takes
        more = trained[0] - statistics.median(trained[1:])
        causes["the first epoch beyond the others (compilation)"] = max(more, 0.0) / whole
    return causes, whole


def slowest(run: Run) -> str:
    """The rank that the others waited for in most epochs, with its host."""
    ranks = [int(r["slowest_rank"]) for r in run.epochs if r.get("slowest_rank") is not None]
    if not ranks:
        return ""
    rank, times = collections.Counter(ranks).most_common(1)[0]
    hosts = run.environment.get("hosts") or []
    host = f" on {hosts[rank]}" if rank < len(hosts) and len(set(hosts)) > 1 else ""
    return f"rank {rank}{host} in {times} of {len(ranks)} epochs"
