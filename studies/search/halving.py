"""Plans trials by successive halving: many short, then longer ones of the best (Jamieson, Talwalkar, AISTATS 2016)."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Rung:
    """One round of trials.

    Attributes:
      candidates: how many are tried.
      epochs: length of each trial.
    """

    candidates: int
    epochs: int


def rungs(candidates: int, budget: int) -> list[Rung]:
    """The rounds for some candidates: half of them (rounded up) go on, for twice as long, until two have met.

    Args:
      candidates: at least 2.
      budget: epochs of all trials together, which are not exceeded.

    Raises:
      ValueError: for fewer candidates, or a budget too small for one epoch in the first round.
    """
    if candidates < 2:
        raise ValueError("give at least two candidates")
    counts = [candidates]
    while counts[-1] > 2:
        counts.append(-(-counts[-1] // 2))
    unit = sum(count * 2**number for number, count in enumerate(counts))
    if budget < unit:
        raise ValueError(f"{candidates} candidates need {unit} epochs in {len(counts)} rounds, {budget} are too few")
    first = budget // unit
    return [Rung(count, first * 2**number) for number, count in enumerate(counts)]
