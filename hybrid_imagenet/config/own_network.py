"""Finds the function that --model=MODULE:FUNCTION names, without importing its module, which may need TensorFlow."""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

from hybrid_imagenet.errors import UserError, did_you_mean


def locate(target: str) -> Path | None:
    """Returns the file of the module in MODULE:FUNCTION; None where its source cannot be read.

    Raises:
      UserError: if there is no such module or file, or its top level defines no such function.
    """
    module, _, function = target.partition(":")
    try:
        spec = _found(module)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        raise UserError(
            f"--model={target}: there is no module {module}; give MODULE:FUNCTION of a module in this directory or in "
            "PYTHONPATH"
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(spec.origin).read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"--model={target}: {spec.origin} cannot be read ({error})") from None
    names = set(_names(tree.body))
    if not names & {function.partition(".")[0], "*", "__getattr__"}:
        near = did_you_mean(function, names)
        raise UserError(f"--model={target}: {spec.origin} defines no {function or 'function'}{near}")
    return Path(spec.origin)


def _found(module: str) -> importlib.machinery.ModuleSpec | None:
    """Finds a module; packages above it are not imported, as `importlib.util.find_spec` would do."""
    first, *rest = module.split(".")
    spec, name = importlib.util.find_spec(first), first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements define at the top level of a module; "*" for those of another module."""
    for node in statements:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name))
        else:  # such as `if` and `try`
            for part in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(node, part, [])
                yield from _names([s for n in inner for s in (n.body if isinstance(n, ast.ExceptHandler) else [n])])
