"""Reads which arguments a class or function takes, from its source: nothing is imported, so this needs no TensorFlow.

A constructor thereby declares its flags. The annotation gives type and bounds, the docstring the help:

    momentum: Annotated[float, "0 to 0.9999"] = 0.9
    eps_rule: Literal["add", "floor"] = "add"
    cycle_time_ms: Annotated[float, ">= 0.1", "ms"] = 1.0      # the last text is the unit
    weight_decay: Annotated[float, "basic"] = 0.0              # --help shows it without =all
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import textwrap
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from hybrid_imagenet.config.options import Option, ValueType, value_type

_NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
_BOUNDS = re.compile(rf"(?P<sign>>=|>|<=) (?P<bound>{_NUMBER})|(?P<low>{_NUMBER}) to (?P<high>{_NUMBER})")
_PURE = "hybrid_imagenet.numerics"  # may be imported for the types that it names
_TYPES = {
    "Annotated": Annotated,
    "Literal": Literal,
    "bool": bool,
    "float": float,
    "int": int,
    "str": str,
    "tuple": tuple,
}


@dataclasses.dataclass(frozen=True)
class Argument:
    """An argument with a default that a flag can set.

    Attributes:
      name: as the class or function calls it.
      kind: type of the value.
      default: its default.
      option: help, bounds, choices and unit.
    """

    name: str
    kind: ValueType
    default: Any
    option: Option


@functools.cache
def read(target: str) -> Mapping[str, Argument]:
    """The arguments with defaults of `package.module:Name`: of a function, a constructor, or the fields of a dataclass.

    Raises:
      LookupError: if the module or the name does not exist.
      TypeError: for an annotation that cannot be read, or a type that no flag can hold.
    """
    module, _, name = target.partition(":")
    source = _Source(module)
    node = source.definitions.get(name)
    if node is None:
        raise LookupError(f"{module} defines no {name}")
    rows = _fields(node) if isinstance(node, ast.ClassDef) else _parameters(node)
    words = _described(node)
    if isinstance(node, ast.ClassDef):
        constructor = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        if constructor is not None:
            rows, words = _parameters(constructor), words | _described(constructor)
    found = {}
    for argument, annotation, value in rows:
        kind, option = declaration(source.evaluated(annotation), words.get(argument, ""))
        found[argument] = Argument(argument, kind, ast.literal_eval(value), option)
    return found


class _Source:
    """A module's classes and functions, and the names that its annotations use."""

    def __init__(self, module: str) -> None:
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise LookupError(f"there is no module {module}")
        tree = ast.parse(pathlib.Path(spec.origin).read_text(encoding="utf-8"))
        self.definitions = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        self._names: dict[str, Any] = dict(_TYPES)
        for node in tree.body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_PURE):
                pure = importlib.import_module(typing.cast(str, node.module))
                self._names |= {alias.asname or alias.name: getattr(pure, alias.name, None) for alias in node.names}
            elif isinstance(node, ast.Assign) and _is_alias(node):
                self._names[typing.cast(ast.Name, node.targets[0]).id] = self.evaluated(node.value)

    def evaluated(self, annotation: ast.expr) -> Any:
        code = compile(ast.Expression(annotation), "<annotation>", "eval")
        try:
            return eval(code, {"__builtins__": {}}, self._names)  # an annotation of this package
        except NameError as error:
            raise TypeError(f"{ast.unparse(annotation)}: {error}") from None


def _is_alias(node: ast.Assign) -> bool:
    """Whether an assignment names a type, as in `Handover = Literal["reset", "rescale"]`."""
    value = node.value
    return (
        isinstance(value, ast.Subscript)
        and isinstance(value.value, ast.Name)
        and value.value.id in ("Annotated", "Literal")
        and isinstance(node.targets[0], ast.Name)
    )


Row = tuple[str, ast.expr, ast.expr]  # name, annotation, default


def _parameters(node: ast.FunctionDef) -> list[Row]:
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    pairs: list[tuple[ast.arg, ast.expr | None]] = [
        *zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True),
        *zip(spec.kwonlyargs, spec.kw_defaults, strict=True),
    ]
    return [(arg.arg, arg.annotation, value) for arg, value in pairs if value is not None and arg.annotation]


def _fields(node: ast.ClassDef) -> list[Row]:
    found = [n for n in node.body if isinstance(n, ast.AnnAssign)]
    return [(n.target.id, n.annotation, n.value) for n in found if n.value and isinstance(n.target, ast.Name)]


def declaration(annotation: Any, words: str) -> tuple[ValueType, Option]:
    """Type and option of an annotation: a plain type, `Literal` for choices, or `Annotated` with bounds and unit.

    Raises:
      TypeError: for a type that no flag can hold.
    """
    notes: tuple[str, ...] = ()
    if typing.get_origin(annotation) is Annotated:
        annotation, *rest = typing.get_args(annotation)
        notes = tuple(rest)
    choices: tuple[str, ...] = ()
    if typing.get_origin(annotation) is Literal:
        choices = typing.get_args(annotation)
        annotation = str
    bounds: dict[str, Any] = {}
    unit = ""
    for note in notes:
        match = _BOUNDS.fullmatch(note)
        if note == "basic":
            bounds["basic"] = True
        elif match is None:
            unit = note
        elif match["low"] is not None:
            bounds |= {"minimum": float(match["low"]), "maximum": float(match["high"])}
        else:
            bounds[{">=": "minimum", ">": "above", "<=": "maximum"}[match["sign"]]] = float(match["bound"])
    return value_type(annotation), Option(words, unit, choices, **bounds)


def _described(node: ast.ClassDef | ast.FunctionDef) -> dict[str, str]:
    """The text on each argument in the sections Args and Attributes of a docstring, as one line each."""
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    found: dict[str, str] = {}
    for section in re.findall(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE):
        lines = textwrap.dedent(section).splitlines()
        name = ""
        for line in lines:
            start = re.match(r"(\w+): (.*)", line)
            if start:
                name = start[1]
                found[name] = start[2]
            elif line.strip() and name:
                found[name] += " " + line.strip()
    return {name: text[:1].upper() + text[1:] for name, text in found.items()}
