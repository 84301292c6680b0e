"""Rules that involve several flags. Each check raises UserError with one line that names them."""

from __future__ import annotations

import typing

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import torus

if typing.TYPE_CHECKING:
    from hybrid_imagenet.config import Config


def check(config: Config) -> None:
    """Applies every rule to a complete configuration."""
    for rule in RULES:
        rule(config)


def _warmup_fits(config: Config) -> None:
    if config.optimizer == "hybrid" and config.warmup_epochs > config.epochs:
        raise UserError(
            f"--warmup_epochs={config.warmup_epochs:g} is longer than --epochs={config.epochs}: "
            "lower the first or raise the second"
        )


def _allreduce_fits(config: Config) -> None:
    if config.compression == "bf16" and config.allreduce not in ("ring", "auto"):
        raise UserError(
            f"--compression=bf16 has its own exchange: leave out --allreduce={config.allreduce} or use fp16"
        )
    if config.autotune and config.allreduce != "ring":
        raise UserError(f"--autotune works with --allreduce=ring only, not {config.allreduce}")
    if config.torus_grid is not None:
        try:
            torus.parse_grid(config.torus_grid)
        except ValueError as error:
            raise UserError(f"--torus_grid: {error}") from None


RULES = (
    _warmup_fits,
    _allreduce_fits,
)
