"""Judges the statements of a study by the results of its arms over the seeds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from studies import bootstrap, hypotheses, trial_runs
from studies.base import MARGIN, Arm, Claim, Study
from studies.statistics import Estimate, estimate, oscillation, welch
from studies.trial_runs import Result

SEEN, REVERSED, INCONCLUSIVE, OPEN = "seen", "the opposite", "inconclusive", "not comparable"
TRAINED = 0.75
"""Training top-1 to which updates are counted."""
_OUTCOMES = (SEEN, REVERSED, INCONCLUSIVE, OPEN)


@dataclasses.dataclass(frozen=True)
class ArmResults:
    """An arm with the results of its cells by seed."""

    arm: Arm
    by_seed: Mapping[int, Result]
    target: float

    @property
    def finished(self) -> dict[int, Result]:
        """The cells that ran to their end."""
        return {
            seed: result
            for seed, result in self.by_seed.items()
            if result.status == trial_runs.FINISHED
        }

    @property
    def ended(self) -> dict[int, Result]:
        """The cells that are not run again: finished or diverged."""
        ends = (trial_runs.FINISHED, trial_runs.DIVERGED)
        return {seed: result for seed, result in self.by_seed.items() if result.status in ends}

    def values(self, metric: str) -> dict[int, float]:
        """A number for each finished seed that has it: one of the metrics of `value`."""
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
        return [
            (epoch, found)
            for epoch, values in sorted(by_epoch.items())
            if (found := estimate(values)) is not None
        ]


def crossing(records: Iterable[Mapping[str, Any]], metric: str, target: float) -> float | None:
    """Returns the fractional epoch at which `metric` first reached `target`, or None.

    Between two records the metric is interpolated linearly.

    A record that is the first with the metric and reaches the target already counts with its own
    epoch.

    Args:
      records: See `criteria.first_reaching`.
      metric: For example `val_top1`.
      target: A fraction.
    """
    known = [
        (float(record["epoch"]), float(record[metric]))
        for record in records
        if record.get(metric) is not None
    ]
    at = next((number for number, (_, value) in enumerate(known) if value >= target), None)
    if not at:
        return None if at is None else known[0][0]
    (epoch, value), (end, reached) = known[at - 1 : at + 1]
    return epoch + (end - epoch) * (target - value) / (reached - value)


def value(result: Result, metric: str, target: float) -> float | None:
    """`top1`, `best`, `epochs` to the target, `updates` or `oscillation` of one run.

    None where it is not known. Epochs are interpolated between validations. Updates are those to
    `TRAINED` of the training images, which every epoch tells without a validation, for a batch that
    stays the same. The oscillation is that of validation top-1 in the second half of the run, after
    the steep rise.
    """
    if metric == "updates":
        epochs, last = crossing(result.epochs, "train_top1", TRAINED), result.epochs[-1]
        return None if epochs is None else epochs * float(last["step"]) / float(last["epoch"])
    if metric == "epochs":
        return crossing(result.epochs, "val_top1", target)
    if metric == "oscillation":
        curve = [
            record["val_top1"] for record in result.epochs if record.get("val_top1") is not None
        ]
        return oscillation(curve[len(curve) // 2 :])
    number = result.summary.get({"top1": "val_top1", "best": "best_val_top1"}[metric])
    return None if number is None else float(number)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The runs' verdict on a claim.

    Pairs hold what two runs of a seed share: initial weights and training images. Where that is
    little, Welch's interval over all runs is the narrower one; both are shown.

    Attributes:
      claim: The statement.
      outcome: One of the constants above.
      difference: How much better the first arm is than the second, in the metric's unit, over the
        seeds that both finished; None without any.
      p: Probability p of the statement, corrected for the number of statements; None where nothing
        can be compared.
      seeds: How many would decide, if further runs differ as these do; None where no number below
        10,000 would, where there is nothing to go by, or where the statement is decided.
      limit: The difference is "at least" or "at most" this much, since one arm missed the target in
        some runs; else "".
      resampled: Interval of the difference in accuracy over runs and images; None without results
        by image.
      welch: The difference of the means without pairs, with Welch's interval; None for epochs, or
        with too few runs.
      effect: The paper's difference in final top-1; None where it prints none.
    """

    claim: Claim
    outcome: str
    difference: Estimate | None
    p: float | None = None
    seeds: int | None = None
    limit: str = ""
    resampled: tuple[float, float] | None = None
    welch: Estimate | None = None
    effect: float | None = None

    @property
    def against_paper(self) -> str:
        """Whether the effect is the paper's.

        It is smaller or larger than printed, as printed (within `MARGIN`), or open.
        """
        if self.effect is None:
            return ""
        off = self.difference and dataclasses.replace(
            self.difference, mean=self.difference.mean - self.effect
        )
        if hypotheses.p_within(off, MARGIN) <= hypotheses.LEVEL:
            return "as printed"
        if hypotheses.p_below(off) <= hypotheses.LEVEL / 2:
            return "smaller than printed"
        return "larger than printed" if hypotheses.p_above(off) <= hypotheses.LEVEL / 2 else "open"


def _effect(claim: Claim, first: ArmResults, second: ArmResults) -> float | None:
    """The paper's difference in final top-1 between the arms of its statement."""
    a, b = first.arm.top1, second.arm.top1
    return (
        a - b
        if claim.metric == "top1" and claim.by_paper and a is not None and b is not None
        else None
    )


def verdicts(study: Study, arms: Sequence[ArmResults]) -> list[Verdict]:
    """Judges each claim of a study by the differences between runs of equal seed.

    Equal seeds mean equal initial weights and an equal order of images. `above` is seen where a
    one-sided test finds the first arm better, `equal` where two one-sided tests find the difference
    within the claim's margin; each with Holm's correction over all claims of the study. The
    opposite (the second is better, or the two differ by more than the margin) is tested in the same
    way. Everything else is inconclusive.
    """
    by_name = {results.arm.name: results for results in arms}
    pairs = [(claim, by_name[claim.first], by_name[claim.second]) for claim in study.claims]
    compared = [_differences(*pair) for pair in pairs]
    shown = hypotheses.holm(
        [_p(claim, *found) for claim, found in zip(study.claims, compared, strict=True)]
    )
    against = hypotheses.holm(
        [_p_against(claim, *found) for claim, found in zip(study.claims, compared, strict=True)]
    )
    verdicts = []
    for pair, (difference, limit), p, p_against in zip(
        pairs, compared, shown, against, strict=True
    ):
        claim = pair[0]
        outcome = INCONCLUSIVE
        if difference is None:
            outcome = OPEN
        elif p <= hypotheses.LEVEL:
            outcome = SEEN
        elif p_against <= hypotheses.LEVEL:
            outcome = REVERSED
        seeds = (
            _seeds_needed(claim, difference, len(study.claims))
            if outcome == INCONCLUSIVE and not limit
            else None
        )
        resampled = _resampled(*pair[1:]) if claim.metric == "top1" else None
        unpaired = None
        if claim.metric != "epochs":
            first, second = (list(arm.values(claim.metric).values()) for arm in pair[1:])
            unpaired = welch(first, second)
        known = None if difference is None else p
        verdicts.append(
            Verdict(
                claim, outcome, difference, known, seeds, limit, resampled, unpaired, _effect(*pair)
            )
        )
    return verdicts


def _differences(
    claim: Claim, first: ArmResults, second: ArmResults
) -> tuple[Estimate | None, str]:
    """Returns the differences by seed, and what they are a limit of.

    Differences are positive where the first arm is better. A run that missed the target took at
    least all of its epochs, so that the difference is a limit; where both arms missed it, nothing
    is known.
    """
    if claim.metric != "epochs":
        a, b = first.values(claim.metric), second.values(claim.metric)
        return estimate([a[seed] - b[seed] for seed in sorted(set(a) & set(b))]), ""
    a, b = first.values("epochs"), second.values("epochs")
    seeds = sorted(set(first.finished) & set(second.finished))
    first_missed, second_missed = any(s not in a for s in seeds), any(s not in b for s in seeds)
    if first_missed and second_missed:
        return None, ""
    found = [_epochs(second, b, seed) - _epochs(first, a, seed) for seed in seeds]
    return estimate(found), "at least" if second_missed else "at most" if first_missed else ""


def _epochs(arm: ArmResults, reached: Mapping[int, float], seed: int) -> float:
    """Epochs to the target, or those of the whole run."""
    return reached.get(seed, float(arm.finished[seed].epochs[-1]["epoch"]))


def _p(claim: Claim, difference: Estimate | None, limit: str) -> float:
    """Returns the p value of the claim; 1 where a limit of the difference cannot show it."""
    if claim.relation == "equal":
        return 1.0 if limit else hypotheses.p_within(difference, claim.margin)
    return 1.0 if limit == "at most" else hypotheses.p_above(difference)


def _p_against(claim: Claim, difference: Estimate | None, limit: str) -> float:
    """Returns the p value of the opposite of the claim."""
    if claim.relation == "equal":
        return 1.0 if limit else hypotheses.p_outside(difference, claim.margin)
    return 1.0 if limit == "at least" else hypotheses.p_below(difference)


def _seeds_needed(claim: Claim, difference: Estimate | None, statements: int) -> int | None:
    """Returns how many seeds decide a claim.

    Its level is the one that Holm's most cautious step leaves to it.
    """
    if difference is None or not difference.deviation:
        return None
    mean, spread, level = abs(difference.mean), difference.deviation, hypotheses.LEVEL / statements
    if claim.relation != "equal":
        return hypotheses.seeds_needed(
            lambda seeds: hypotheses.power_above(mean, spread, seeds, level)
        )
    if mean < claim.margin:
        return hypotheses.seeds_needed(
            lambda seeds: hypotheses.power_within(mean, spread, seeds, claim.margin, level)
        )
    return hypotheses.seeds_needed(
        lambda seeds: hypotheses.power_above(mean - claim.margin, spread, seeds, level / 2)
    )


def _resampled(first: ArmResults, second: ArmResults) -> tuple[float, float] | None:
    """Returns the bootstrap interval, or None unless all common runs have results by image."""
    seeds = sorted(set(first.finished) & set(second.finished))
    rows = [arm.finished[seed].right for arm in (first, second) for seed in seeds]
    known = [row for row in rows if row is not None]
    if not known or len(known) < len(rows) or len({len(row) for row in known}) > 1:
        return None
    return bootstrap.interval(np.stack(known[: len(seeds)]), np.stack(known[len(seeds) :]))


def sentence(found: Sequence[Verdict]) -> str:
    """Writes in one sentence whether the paper's result appeared.

    It follows from the verdicts on the paper's own statements. If the paper makes none, the
    sentence counts the outcomes of ours.
    """
    papers = [verdict for verdict in found if verdict.claim.by_paper]
    if not found:
        return "There is no statement to test."
    if not papers:
        return f"No paper makes a statement about this. Of {_counted(found)}."
    count = collections.Counter(verdict.outcome for verdict in papers)
    if count[SEEN] == len(papers):
        start = "The paper's result appeared"
    elif count[SEEN]:
        start = "The paper's result appeared in part"
    elif count[REVERSED]:
        start = "The paper's result did not appear"
    else:
        start = "These runs decide nothing"
    return f"{start}: of {_counted(papers)}."


def _counted(found: Sequence[Verdict]) -> str:
    """Writes how many statements there are, and how many have each outcome."""
    count = collections.Counter(verdict.outcome for verdict in found)
    parts = [f"{count[outcome]} {outcome}" for outcome in _OUTCOMES if count[outcome]]
    return f"{len(found)} {'statement' if len(found) == 1 else 'statements'}, {', '.join(parts)}"


def facts(arms: Sequence[ArmResults]) -> dict[str, Any]:
    """Reads versions and data from the records of the first run that names them."""
    return next(
        (run.facts for results in arms for run in results.by_seed.values() if run.facts), {}
    )
