"""Rules that involve several flags. Each check raises UserError with one line that names them."""

from __future__ import annotations

import typing

from hybrid_imagenet.errors import UserError

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


RULES = (_warmup_fits,)
