"""Lists the values to try and writes a trial's flags: the run in question, made shorter."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hybrid_imagenet.config import RunConfig, relative_step
from hybrid_imagenet.config.derived import base_batch
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.schedules import FIXED
from hybrid_imagenet.optimizers.registry import OPTIMIZERS

_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of --lr, or of the relative step of tuned LARS
_WARMUPS = (0.5, 1.0, 1.5)  # of --warmup_epochs


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Values that are tried.

    Attributes:
      flag: what sets the size of the steps: lr or lars_eta.
      value: of the flag.
      warmup_epochs: T of the whole run.
      relative_step: at its peak, where LARS runs.
    """

    flag: str
    value: float
    warmup_epochs: float
    relative_step: float | None = None


def candidates(
    config: RunConfig,
    rates: Sequence[float] = (),
    steps: Sequence[float] = (),
    warmups: Sequence[float] = (),
) -> list[Candidate]:
    """Every pair of a step size and a warmup.

    With LARS (lars, and the SGD phase of hybrid) the sizes are relative steps, by default a quarter to four times that
    of tuned LARS at the batch; else learning rates, by default a quarter to four times --lr. Warmups are by default
    half to one and a half T.

    Args:
      config: of the run.
      rates: learning rates to try instead, for a run without LARS.
      steps: relative steps to try instead, for a run with LARS.
      warmups: values of --warmup_epochs to try instead.

    Raises:
      UserError: for a configuration without a rate to set, or that changes batch or image size by epoch.
    """
    if config.batch_schedule or config.image_size_schedule:
        raise UserError("--batch_schedule and --image_size_schedule count epochs of a whole run: search without them")
    warmups = warmups or [config.warmup_epochs * factor for factor in _WARMUPS]
    fitting = dict.fromkeys(t for t in warmups if t <= config.epochs)
    if not fitting:
        raise UserError(f"--warmups: none lies within --epochs={config.epochs}; give shorter ones")
    if relative_step.peak(config.changed(warmup_epochs=0.0)) is not None:
        return _with_lars(config, rates, steps, tuple(fitting))
    return _without_lars(config, rates, steps, tuple(fitting))


def _with_lars(
    config: RunConfig, rates: Sequence[float], steps: Sequence[float], warmups: Sequence[float]
) -> list[Candidate]:
    if rates:
        raise UserError("--lrs: with LARS or LAMB the search goes over its relative step; give --relative_steps")
    steps = steps or [factor * relative_step.tuned(config, base_batch(config)) for factor in _FACTORS]
    found = []
    for step, warmup in itertools.product(dict.fromkeys(steps), warmups):
        here = config.changed(warmup_epochs=warmup)
        top = relative_step.peak(here)
        if top is None:
            raise UserError(
                f"--warmups={warmup:g}: LARS does not run after it in {config.epochs} epochs; give shorter ones"
            )
        if top.value == 0:
            eta = f" and --lars_eta={config.chosen['lars_eta']:g}" if "lars_eta" in config.chosen else ""
            raise UserError(f"--lr={config.lr:g}{eta} make no step: give positive values")
        found.append(Candidate(*relative_step.remedy(here, top, step), warmup, step))
    return found


def _without_lars(
    config: RunConfig, rates: Sequence[float], steps: Sequence[float], warmups: Sequence[float]
) -> list[Candidate]:
    if steps:
        raise UserError("--relative_steps: only LARS and LAMB have a relative step; give --lrs")
    if config.lr_schedule in FIXED or OPTIMIZERS[config.optimizer].rate != "lr":
        what = (
            f"--lr_schedule={config.lr_schedule}" if config.lr_schedule in FIXED else f"--optimizer={config.optimizer}"
        )
        raise UserError(f"{what} does not take its rate from --lr, so there is nothing to search: choose another")
    rates = rates or [config.lr * factor for factor in _FACTORS]
    return [Candidate("lr", *pair) for pair in itertools.product(dict.fromkeys(rates), warmups)]


def flags(config: RunConfig, candidate: Candidate, epochs: int) -> list[str]:
    """The flags that train a candidate for some epochs, under the schedule of the whole run, compressed.

    With the share s = epochs / --epochs, T and the milestones are multiplied by s and kappa becomes kappa^(1/s), so
    that the rate at a given fraction of the run stays; poly and cosine end with the run anyway. One validation, at the
    end.
    """
    share = epochs / config.epochs
    texts = [
        f"--{candidate.flag}={candidate.value!r}",
        f"--warmup_epochs={candidate.warmup_epochs * share!r}",
        f"--epochs={epochs}",
        f"--eval_offset_epochs={epochs}",
        f"--checkpoint_every_epochs={epochs}",
        "--keep_checkpoints=1",
        "--progress=plain",
    ]
    if config.lr_schedule == "exponential":
        texts.append(f"--lr_decay={config.chosen['lr_decay'] ** (1 / share)!r}")
    if config.lr_schedule == "step":
        texts.append("--lr_steps=" + ",".join(repr(epoch * share) for epoch in config.chosen["lr_steps"]))
    return texts
