"""Answers what one asks of a run first: did it go well, and what held it back."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.analysis import forecast
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.files import read_json
from hybrid_imagenet.numerics import mlperf
from hybrid_imagenet.runlog.summary import duration
from hybrid_imagenet.tools.report.load import Run

GOOD, BAD, OPEN = "good", "bad", "open"
_NOTICED = 0.03  # of the time: less is not called a cause
_NEIGHBOURS = 3
_LOOKED_AT = 200  # directories beside a run


@dataclasses.dataclass(frozen=True)
class Answers:
    """What there is to say first about a run.

    Attributes:
      verdict: `good`, `bad`, or `open` without a target that was asked for, or before the end.
      outcome: how it went, against its target.
      compared: against the reference or the last runs; empty without any.
      held_back: what took time besides computation, the largest first; shares of the run's time.
    """

    verdict: str
    outcome: str
    compared: str
    held_back: list[str]


def answers(run: Run, *, alone: bool = True) -> Answers:
    """Judges a run from its records and, if it is alone in the report, the finished runs in the same directory."""
    verdict, outcome = _outcome(run)
    compared = _against_reference(run) if run.imagenet else _against_neighbours(run) if alone else ""
    return Answers(verdict, outcome, compared, _held_back(run))


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
        return OPEN, f"Nothing has been validated after {done:g}{of} epochs."
    best_words = f"the best top-1 is {percent(best)}, in epoch {summary.get('best_epoch') or '?'}"
    ended = "" if done == planned else f" after {done:g}{of} epochs"
    if not run.ended:
        ended += ", stopped" if run.finished else ", not finished"
    asked = run.targets if run.target_asked or run.imagenet else []
    if not asked:
        return OPEN, f"No target was asked for: {best_words}{ended}."
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
    return BAD if run.ended and not lost else OPEN, text[0].upper() + text[1:]


def _expected(run: Run, target: float) -> str:
    """When a run that is still going on may reach its target."""
    epochs, values = run.series("val_top1")
    if run.finished or not epochs or not run.epochs_planned:
        return ""
    found = forecast.forecast(epochs, values, target, float(run.epochs_planned))
    if found is None or found.epochs is None:
        return ""
    last = f"{found.high:.0f}" if found.high is not None else "later"
    return f" It may come in epoch {found.epochs:.0f} ({found.low:.0f} to {last})."


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


def _against_neighbours(run: Run) -> str:
    others = neighbours(run)
    best, speed = run.summary.get("best_val_top1"), run.summary.get("steady_images_per_second")
    if not others or best is None:
        return ""
    theirs = [other["best_val_top1"] for other in others]
    rates = [other["steady_images_per_second"] for other in others if other.get("steady_images_per_second")]
    count = "last run" if len(others) == 1 else f"last {len(others)} runs"
    text = f"The {count} beside it with this network and these images had a best top-1 of {_range(theirs, percent)}"
    if speed and rates:
        text += f", at {_range(rates, '{:,.0f}'.format)} images/s; this one ran at {speed:,.0f}"
    return text + "."


def neighbours(run: Run) -> list[dict[str, Any]]:
    """Summaries of finished runs in the same directory, on the same images with the same network, the newest first."""
    found = []
    for path in sorted(run.path.parent.glob("*/summary.json"))[:_LOOKED_AT]:
        if path.parent == run.path:
            continue
        try:
            summary, config = read_json(path), read_json(path.with_name("config.json"))
        except UserError:
            continue
        flags = config.get("flags", {})
        alike = all(flags.get(key) == run.flags.get(key) for key in ("dataset", "data_dir", "model", "image_size"))
        if alike and summary.get("best_val_top1") is not None:
            found.append((config.get("started") or 0.0, summary))
    found.sort(key=lambda pair: -pair[0])
    return [summary for _, summary in found[:_NEIGHBOURS]]


def _range(values: Sequence[float], form: Any) -> str:
    low, high = form(min(values)), form(max(values))
    return str(low) if low == high else f"{low} to {high}"


_WORDS = {
    "input": "waiting for input",
    "exposed communication": "communication that computation did not hide",
    "slowest rank": "waiting for the slowest rank",
    "evaluation": "evaluation",
    "checkpoints": "waiting for checkpoints",
}


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
