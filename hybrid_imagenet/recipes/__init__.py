"""Recipes: one module per published method, holding only what differs from the defaults."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published method: where it comes from, on what it ran, what it reached, and the flags that
    make it.
    """

    name: str
    summary: str
    source: str
    hardware: str
    published: str
    overrides: Mapping[str, Any]


def names() -> list[str]:
    """The names that --recipe takes, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


def load(name: str) -> Recipe:
    """Returns a recipe by name.

    Raises:
      UserError: for an unknown name, with the nearest known one.
    """
    if name not in names():
        raise UserError(
            f"--recipe={name}: choose one of {', '.join(names())}{did_you_mean(name, names())}"
        )
    recipe: Recipe = importlib.import_module(f"{__name__}.{name}").RECIPE
    return recipe


def table() -> str:
    """All recipes with what they do, where they come from, and what was reached on what, as plain
    text.
    """
    recipes = [load(name) for name in names()]
    width = max(len(recipe.name) for recipe in recipes)
    lines = []
    for recipe in recipes:
        lines += [
            f"{recipe.name:<{width}}  {recipe.summary}",
            f"{'':<{width}}  published: {recipe.published}; {recipe.hardware}",
            f"{'':<{width}}  source: {recipe.source}",
        ]
    return "\n".join(lines)
