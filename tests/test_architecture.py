"""The packages and the direction of the imports between them, as docs/dev/architecture.md draws
it.
"""

import ast
import collections
import pathlib
import re

import pytest

import hybrid_imagenet
from tests.support import fresh

PACKAGE = pathlib.Path(hybrid_imagenet.__file__).parent
# What each room may import of the package besides itself and what all may import (errors, files,
# options, the stages of a start, XLA, private names of TensorFlow and Keras); the top level is
# listed too.
ALLOWED = {
    "errors": set(),
    "options": set(),
    "files": set(),
    "startup": set(),
    "xla": set(),
    "private_api": set(),
    "recipes": set(),
    "comm": set(),
    "models": set(),
    "order": {"comm"},
    "schedules": {"order"},
    "analysis": {"schedules"},
    "optimizers": {"order", "schedules", "comm"},
    "data": {"order", "schedules"},
    "config": {"recipes", "order", "schedules", "comm", "optimizers", "models", "data", "runlog"},
    "checkpoints": {"order", "models", "data"},
    "runlog": {"analysis", "optimizers"},
    "resilience": {"comm", "checkpoints"},
    "training": {
        "callbacks",
        "order",
        "schedules",
        "analysis",
        "config",
        "comm",
        "optimizers",
        "models",
        "data",
        "checkpoints",
        "runlog",
        "resilience",
    },
    "train": {"config", "comm", "resilience", "training"},
    "print_config": {"config", "optimizers", "order", "schedules", "training"},
    "main": {
        "config",
        "recipes",
        "comm",
        "data",
        "resilience",
        "training",
        "train",
        "print_config",
        "__main__",
    },
    "tools": {
        "schedules",
        "analysis",
        "config",
        "recipes",
        "comm",
        "optimizers",
        "models",
        "data",
        "checkpoints",
        "runlog",
        "resilience",
        "training",
    },
    "benchmarks": {
        "callbacks",
        "order",
        "analysis",
        "config",
        "comm",
        "optimizers",
        "models",
        "data",
        "checkpoints",
        "runlog",
        "training",
        "train",
        "tools",
    },
    "library": {"order", "schedules", "comm", "optimizers", "models"},
    "callbacks": {
        "order",
        "schedules",
        "comm",
        "optimizers",
        "models",
        "checkpoints",
        "runlog",
        "resilience",
        "library",
    },
    "demo": {"main", "runlog", "tools"},
    "__main__": {"comm", "resilience", "tools"},
    # for type checkers
    "__init__": {"callbacks", "comm", "data", "library", "optimizers", "order", "schedules"},
}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    parts = ("hybrid_imagenet", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree):
    """Full names of everything of the package that a tree of nodes imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_rooms(path):
    names = [
        name
        for name in imported_names(ast.parse(path.read_text()))
        if name.startswith("hybrid_imagenet.")
    ]
    shared = {"__version__", "errors", "files", "options", "startup", "xla", "private_api"}
    return {name.split(".")[1] for name in names} - shared - {room_of(path)}


def test_every_room_has_a_rule():
    assert {room_of(path) for path in modules()} == set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_a_room_imports_only_what_lies_below_it(room):
    files = [path for path in modules() if room_of(path) == room]
    assert files
    for path in files:
        beyond = imported_rooms(path) - ALLOWED[room]
        assert not beyond, f"{path.relative_to(PACKAGE)} imports {sorted(beyond)}"


def test_packages_depend_in_one_direction():
    order, left = [], dict(ALLOWED)
    while left:
        free = [room for room, below in left.items() if not below - set(order)]
        assert free, f"a circle among {sorted(left)}"
        order += free
        left = {room: below for room, below in left.items() if room not in free}


def test_modules_import_each_other_in_no_circle():
    known = {name_of(path) for path in modules()}
    edges = {}
    for path in modules():
        names = imported_names(ast.parse(path.read_text()))
        targets = {name if name in known else name.rpartition(".")[0] for name in names}
        # A package's own __init__ may gather what its modules offer.
        edges[name_of(path)] = {
            t for t in targets & known if not name_of(path).startswith(t + ".")
        } - {name_of(path)}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for target in sorted(edges[name]):
            visit(target)
        path.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)


def test_the_page_lists_every_package_and_only_files_that_exist():
    text = (PACKAGE.parent / "docs" / "dev" / "architecture.md").read_text()
    rows = set(re.findall(r"^\| `(\w+)/` \|", text, re.M))
    assert rows == {room for room in ALLOWED if (PACKAGE / room).is_dir()}
    for name in re.findall(
        r"`((?:[\w]+/)+[\w.]*|\w+\.py)`", text.replace("NAME.py", "__init__.py")
    ):
        folders = [PACKAGE, PACKAGE.parent, PACKAGE / "training"]
        assert any((folder / name).exists() for folder in folders), name


GRADIENT = "The path of a gradient"


def paths_of_the_page():
    """The tables of files that docs/dev/architecture.md numbers, by heading."""
    text = (PACKAGE.parent / "docs" / "dev" / "architecture.md").read_text()
    sections = re.split(r"^#+ ", text, flags=re.M)
    found = {
        s.partition("\n")[0]: re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", s, re.M) for s in sections
    }
    return {heading: files for heading, files in found.items() if files}


def joined(one, other):
    """Whether one file imports the other, or names it to a registry."""
    for path, target in ((one, other), (other, one)):
        tree, name = ast.parse(path.read_text()), name_of(target)
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        names = {*imported_names(tree), *texts}
        if any(found == name or found.startswith((f"{name}.", f"{name}:")) for found in names):
            return True
    return False


@pytest.mark.parametrize("heading", sorted(paths_of_the_page().keys() - {GRADIENT}))
def test_the_files_of_a_path_import_each_other(heading):
    """From the first file all others are reached: each imports one of them, is imported by one, or
    is named by one.
    """
    first, *left = [PACKAGE / name for name in paths_of_the_page()[heading]]
    reached = [first]
    for file in reached:
        found = [other for other in left if joined(file, other)]
        reached += found
        left = [other for other in left if other not in found]
    assert not left, f"joined to no other file: {left}"


def test_each_file_of_the_path_of_a_gradient_is_joined_to_another():
    """They are no chain: the optimizer calls a communicator, and the update a rule, that it is
    given.
    """
    files = [PACKAGE / name for name in paths_of_the_page()[GRADIENT]]
    assert all(any(joined(file, other) for other in files if other != file) for file in files)


def test_the_paths_of_the_page_are_there():
    wanted = {f"The path of {what}" for what in ("an image", "the command line", "an option")}
    found = paths_of_the_page()
    assert {GRADIENT, *wanted} <= set(found)


def test_nothing_in_the_package_needs_the_checkout():
    for path in modules():
        names = imported_names(ast.parse(path.read_text()))
        assert not [
            name for name in names if name.split(".")[0] in ("studies", "benchmarks", "tests")
        ], path


def test_only_comm_and_the_peers_of_benchmarks_know_horovod():
    for path in modules():
        if room_of(path) != "comm" and path.parent.name != "peers":
            names = imported_names(ast.parse(path.read_text()))
            assert not [n for n in names if n.split(".")[0] == "horovod"], path


def test_modules_started_by_name_exist():
    known = {name_of(path) for path in modules()}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if (
                    text.startswith("hybrid_imagenet.")
                    and text.replace(".", "").replace("_", "").isalnum()
                ):
                    assert text in known or text.rpartition(".")[0] in known, f"{path}: {text}"


@pytest.mark.parametrize("name", ["callbacks/__init__.py", "schedules/__init__.py"])
def test_the_public_modules_only_show_what_lies_in_rooms(name):
    tree = ast.parse((PACKAGE / name).read_text())
    kinds = [type(node) for node in tree.body]
    assert set(kinds[1:-1]) == {ast.ImportFrom}, "a docstring, imports and __all__"
    assert [target.id for target in tree.body[-1].targets] == ["__all__"]


def test_the_package_shows_its_names_without_importing_what_they_need():
    assert set(hybrid_imagenet.__all__) <= set(dir(hybrid_imagenet))
    names = (
        "hybrid_imagenet",
        "hybrid_imagenet.schedules",
        "hybrid_imagenet.order",
        "tests.support.first_names",
    )
    assert fresh.loaded_by(*names) == set()


def test_type_checkers_know_the_names_of_the_package():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert {alias.name for node in block.body for alias in node.names} == set(
        hybrid_imagenet.__all__
    )
    for name in hybrid_imagenet.__all__:
        assert getattr(hybrid_imagenet, name)


PURE_PACKAGES = ("analysis", "config", "errors", "recipes", "schedules")
PURE_FILES = (
    "comm.cost_model",
    "comm.packing",
    "comm.torus",
    "data.augmentations",
    "data.datasets",
    "data.sources.digits",
    "data.splits",
    "models.depths",
    "models.keras_families",
    "models.moments",
    "optimizers.registry",
    "optimizers.trust_ratio",
    "order.sampling",
    "order.shard_order",
    "runlog.live",
)


def test_formulas_flags_and_views_of_a_run_import_neither_tensorflow_nor_keras():
    names = [name_of(path) for path in modules() if room_of(path) in PURE_PACKAGES]
    names += [f"hybrid_imagenet.{name}" for name in PURE_FILES]
    assert fresh.loaded_by(*names) == set()


def test_class_names_are_unique_in_the_package():
    count = collections.Counter()
    for path in modules():
        tree = ast.parse(path.read_text())
        count.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, times in count.items() if times > 1]


def test_file_names_are_unique_in_the_package():
    """Recipes are an exception: a recipe's file has the name that --recipe takes."""
    count = collections.Counter(path.name for path in modules() if room_of(path) != "recipes")
    repeated = {name for name, times in count.items() if times > 1}
    assert repeated == {"__init__.py", "__main__.py"}
