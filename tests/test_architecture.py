"""The direction of imports, as docs/architecture.md draws it."""

import ast
import pathlib
import subprocess
import sys

import pytest

import hybrid_imagenet

PACKAGE = pathlib.Path(hybrid_imagenet.__file__).parent
FREE = {"errors", "__init__"}
# What each part may import of the package besides itself and the errors.
ALLOWED = {
    "numerics": set(),
    "recipes": set(),
    "config": {"recipes", "numerics"},
    "comm": {"numerics"},
    "optimizers": {"numerics"},
    "models": {"numerics"},
    "data": {"numerics"},
    "metrics": {"numerics"},
    "callbacks": {"numerics", "comm", "optimizers", "models", "data", "metrics", "checkpoint", "state"},
}
PROGRAMS = {"main", "doctor", "plan", "report", "study", "search", "benchmarks", "evaluate", "predict", "export"}


def modules():
    return sorted(p for p in PACKAGE.rglob("*.py"))


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.startswith("hybrid_imagenet."):
                yield name.split(".")[1]


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_a_part_imports_only_what_lies_below_it(part):
    files = [path for path in modules() if part_of(path) == part]
    assert files
    for path in files:
        beyond = set(imported_parts(path)) - ALLOWED[part] - {part} - FREE - {"__version__"}
        if path.relative_to(PACKAGE).as_posix() in ("data/__main__.py", "data/show.py"):
            continue  # a program
        assert not beyond, f"{path.name} imports {beyond}"


def test_only_comm_knows_horovod():
    for path in modules():
        if part_of(path) not in ("comm", "benchmarks", "doctor"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                assert not [n for n in names if n.split(".")[0] == "horovod"], path


def test_nothing_imports_a_program():
    for path in modules():
        if part_of(path) not in PROGRAMS:
            assert not set(imported_parts(path)) & PROGRAMS, path


def test_the_configuration_stays_above_the_parts():
    for path in modules():
        if part_of(path) in ("numerics", "comm", "optimizers", "models", "data", "metrics", "callbacks"):
            assert "config" not in set(imported_parts(path)), path


def test_pure_mathematics_needs_neither_tensorflow_nor_keras():
    names = [f"hybrid_imagenet.numerics.{p.stem}" for p in (PACKAGE / "numerics").glob("*.py") if p.stem != "__init__"]
    code = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module(name)\n"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('tensorflow', 'keras', 'horovod')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
