"""Judges the statements of a paper by the results of a study's arms over the seeds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet.analysis import criteria
from hybrid_imagenet.tools.study import trial_runs
from hybrid_imagenet.tools.study.base import Arm, Claim, Study
from hybrid_imagenet.tools.study.statistics import Estimate, estimate
from hybrid_imagenet.tools.study.trial_runs import Result

SEEN, TENDENCY, MISSED = "seen", "means only", "reached by the first only"
UNSEEN, REVERSED, OPEN = "not seen", "the opposite", "not comparable"
_OUTCOMES = (SEEN, TENDENCY, MISSED, UNSEEN, REVERSED, OPEN)


@dataclasses.dataclass(frozen=True)
class ArmResults:
    """An arm with the results of its cells by seed."""

    arm: Arm
    by_seed: Mapping[int, Result]
    target: float

    @property
    def finished(self) -> dict[int, Result]:
        """The cells that ran to their end."""
        return {seed: result for seed, result in self.by_seed.items() if result.status == trial_runs.FINISHED}

    def values(self, metric: str) -> dict[int, float]:
        """A number for each finished seed that has it: `top1`, `best` or `epochs` (to the target)."""
        found = {seed: value(result, metric, self.target) for seed, result in self.finished.items()}
        return {seed: number for seed, number in found.items() if number is not None}

    def estimate(self, metric: str) -> Estimate | None:
        """Mean and interval of a metric over the finished seeds that have it."""
        return estimate(list(self.values(metric).values()))

    def curve(self, key: str) -> list[tuple[int, Estimate]]:
        """A key of the epochs' records by epoch, over the finished seeds."""
        by_epoch: dict[int, list[float]] = {}
        for result in self.finished.values():
            for record in result.epochs:
                if record.get(key) is not None:
                    by_epoch.setdefault(int(record["epoch"]), []).append(float(record[key]))
        return [(epoch, found) for epoch, values in sorted(by_epoch.items()) if (found := estimate(values)) is not None]


def value(result: Result, metric: str, target: float) -> float | None:
    """One metric of one run; the epochs to a target are None where it was not reached."""
    if metric == "epochs":
        hit = criteria.first_reaching(result.epochs, "val_top1", target)
        return None if hit is None else float(hit.epoch)
    number = result.summary.get({"top1": "val_top1", "best": "best_val_top1"}[metric])
    return None if number is None else float(number)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The runs' verdict on a claim.

    Attributes:
      claim: of the paper.
      outcome: one of the constants above.
      difference: how much better the first arm is than the second, in the metric's unit, over the seeds that both
        finished; None without any.
    """

    claim: Claim
    outcome: str
    difference: Estimate | None


def verdict(claim: Claim, first: ArmResults, second: ArmResults) -> Verdict:
    """Judges a claim by the interval of the differences between equal seeds.

    Equal seeds mean equal initial weights and an equal order of images, so differences are taken seed by seed. `above`
    is seen if the interval lies above 0, the opposite if it lies below; in between the means decide. `equal` is seen if
    the interval holds 0. Where only one of the two reached the target in all of its runs, that decides about epochs.
    """
    a, b = first.values(claim.metric), second.values(claim.metric)
    missed = tuple(len(values) < len(arm.finished) for values, arm in ((a, first), (b, second)))
    sign = -1.0 if claim.metric == "epochs" else 1.0
    found = estimate([sign * (a[seed] - b[seed]) for seed in sorted(set(a) & set(b))])
    if first.finished and second.finished and claim.relation == "above" and missed[0] != missed[1]:
        return Verdict(claim, MISSED if missed[1] else UNSEEN, None)
    if found is None or any(missed):
        return Verdict(claim, OPEN, found)
    if claim.relation == "equal":
        outcome = OPEN if found.half_width is None else SEEN if found.low <= 0 <= found.high else UNSEEN
    elif found.mean > 0:
        outcome = SEEN if found.low > 0 else TENDENCY
    else:
        outcome = REVERSED if found.high < 0 else UNSEEN
    return Verdict(claim, outcome, found)


def verdicts(study: Study, arms: Sequence[ArmResults]) -> list[Verdict]:
    """A verdict on each claim of a study."""
    by_name = {results.arm.name: results for results in arms}
    return [verdict(claim, by_name[claim.first], by_name[claim.second]) for claim in study.claims]


def sentence(study: Study, found: Sequence[Verdict]) -> str:
    """Writes in one sentence whether the paper's order appeared, from the verdicts."""
    if not found:
        return "The paper gives no numbers to compare with."
    count = collections.Counter(verdict.outcome for verdict in found)
    statements = "statement" if len(found) == 1 else "statements"
    parts = [f"{count[outcome]} {outcome}" for outcome in _OUTCOMES if count[outcome]]
    if count[SEEN] == len(found):
        start = "The paper's result appeared"
    elif count[SEEN] + count[TENDENCY] + count[MISSED] == len(found):
        start = "The paper's result appeared in the means"
    elif count[SEEN] + count[TENDENCY] + count[MISSED]:
        start = "The paper's result appeared in part"
    else:
        start = "The paper's result did not appear"
    return f"{start}: of {len(found)} {statements}, {', '.join(parts)}."


def facts(arms: Sequence[ArmResults]) -> dict[str, Any]:
    """Reads versions and data from the records of the first run that names them."""
    for results in arms:
        for result in results.by_seed.values():
            if result.facts:
                return result.facts
    return {}
