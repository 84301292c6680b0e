"""Which values are tried, and the flags of a trial: the run in question, made shorter."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from hybrid_imagenet.config import AUTO, Config
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.schedules import FIXED

_RATES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of --lr
_WARMUPS = (0.5, 1.0, 1.5)  # of --warmup_epochs


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Values that are tried: --lr, and --warmup_epochs (T) of the whole run."""

    lr: float
    warmup_epochs: float


def candidates(config: Config, rates: Sequence[float] = (), warmups: Sequence[float] = ()) -> list[Candidate]:
    """Every pair of a rate and a warmup; without any, a quarter to four times --lr and half to one and a half T.

    Raises:
      UserError: for a configuration whose rate is fixed, or that changes batch or image size by epoch.
    """
    fixed = config.lr_schedule in (*FIXED, "mlperf")
    if fixed or config.optimizer == "adabound":
        what = f"--lr_schedule={config.lr_schedule}" if fixed else "--optimizer=adabound"
        raise UserError(f"{what} does not take its rate from --lr, so there is nothing to search: choose another")
    if config.batch_schedule or config.image_size_schedule:
        raise UserError("--batch_schedule and --image_size_schedule count epochs of a whole run: search without them")
    if config.per_gpu_batch == AUTO:
        raise UserError("--per_gpu_batch=auto: the trials need one batch, give a number")
    rates = rates or [config.lr * factor for factor in _RATES]
    warmups = warmups or [config.warmup_epochs * factor for factor in _WARMUPS]
    fitting = dict.fromkeys(t for t in warmups if t <= config.epochs)
    if not fitting:
        raise UserError(f"--warmups: none lies within --epochs={config.epochs}; give shorter ones")
    return [Candidate(*pair) for pair in itertools.product(dict.fromkeys(rates), fitting)]


def flags(config: Config, candidate: Candidate, epochs: int) -> list[str]:
    """The flags that train a candidate for some epochs, under the schedule of the whole run, compressed.

    With the share s = epochs / --epochs, T and the milestones are multiplied by s and kappa becomes kappa^(1/s), so
    that the rate at a given fraction of the run stays; poly and cosine end with the run anyway. One validation, at the
    end.
    """
    share = epochs / config.epochs
    texts = [
        f"--lr={candidate.lr!r}",
        f"--warmup_epochs={candidate.warmup_epochs * share!r}",
        f"--epochs={epochs}",
        f"--eval_offset_epochs={epochs}",
        f"--checkpoint_every_epochs={epochs}",
        "--keep=1",
        "--progress=plain",
    ]
    if config.lr_schedule == "exponential":
        texts.append(f"--lr_decay={config.lr_decay ** (1 / share)!r}")
    if config.lr_schedule == "step":
        texts.append("--lr_steps=" + ",".join(repr(epoch * share) for epoch in config.lr_steps))
    return texts
