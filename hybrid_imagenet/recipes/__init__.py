"""Recipes: published methods, each with the flags that differ from the defaults.

The header of each module has the command, and the published hardware, time and accuracy. No recipe
has been confirmed on ImageNet with this program.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybrid_imagenet.errors import UserError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A published method.

    Attributes:
      name: Value of --recipe.
      summary: The method in a few words.
      source: Paper and sections.
      hardware: GPUs and network of the published run.
      published: Accuracy, time and speed of the published run.
      overrides: Values of the flags that differ from the defaults.
    """

    name: str
    summary: str
    source: str
    hardware: str
    published: str
    overrides: Mapping[str, Any]


def names() -> list[str]:
    """Returns the values of --recipe, sorted."""
    modules = pkgutil.iter_modules(__path__)
    return sorted(module.name for module in modules if not module.name.startswith("_"))


def is_list_requested(arguments: Sequence[str]) -> bool:
    """Returns whether a command line asks for all recipes: --recipe=list or --recipe list."""
    return "--recipe=list" in arguments or ("--recipe", "list") in itertools.pairwise(arguments)


def load(name: str) -> Recipe:
    """Returns the recipe with this name.

    Raises:
      UserError: If there is none; the message suggests the most similar name.
    """
    if name not in names():
        raise UserError(
            f"There is no recipe {name}{did_you_mean(name, names())}. Choose one of"
            f" {', '.join(names())}."
        )
    recipe: Recipe = importlib.import_module(f"{__name__}.{name}").RECIPE
    return recipe


def table(shown: Iterable[str] | None = None) -> str:
    """Returns recipes as text: method, published result, hardware, source.

    Args:
      shown: Names of recipes; None for all.
    """
    recipes = [load(name) for name in (names() if shown is None else shown)]
    width = max(len(recipe.name) for recipe in recipes)
    indent = " " * width
    lines = []
    for recipe in recipes:
        lines.append(f"{recipe.name:<{width}}  {recipe.summary}")
        lines.append(f"{indent}  published: {recipe.published}; {recipe.hardware}")
        lines.append(f"{indent}  source: {recipe.source}")
    return "\n".join(lines)
