"""Tests the packages and the direction of imports, as docs/dev/architecture.md describes them."""

import ast
import collections
import pathlib
import re

import pytest

import hybrid_imagenet
from tests.support import fresh

PACKAGE = pathlib.Path(hybrid_imagenet.__file__).parent
# The modules of the package that each part may import. A part is a package or a file at the top
# level. All parts may import themselves, errors, files, options, startup, xla and private_api.
ALLOWED = {
    "errors": set(),
    "options": set(),
    "files": set(),
    "startup": set(),
    "xla": set(),
    "private_api": set(),
    "recipes": set(),
    "cluster": set(),
    "comm": {"cluster"},
    "models": set(),
    "order": {"comm"},
    "schedules": {"order"},
    "analysis": {"schedules"},
    "optimizers": {"order", "schedules", "comm"},
    "data": {"order", "schedules"},
    "config": {
        "recipes",
        "schedules",
        "cluster",
        "comm",
        "optimizers",
        "models",
        "data",
        "runlog",
    },
    "run_plan": {"config", "comm", "data", "optimizers", "order", "schedules"},
    "checkpoints": {"order", "models", "data", "optimizers"},
    "runlog": {"analysis", "optimizers"},
    "resilience": {"cluster", "comm", "checkpoints"},
    "training_run": {"checkpoints", "comm", "optimizers"},
    "training": {
        "callbacks",
        "training_run",
        "run_plan",
        "order",
        "schedules",
        "config",
        "cluster",
        "comm",
        "optimizers",
        "models",
        "data",
        "checkpoints",
        "runlog",
        "resilience",
    },
    "train": {"config", "run_plan", "comm", "training"},
    "print_config": {"config", "run_plan", "optimizers", "order", "schedules", "training"},
    "main": {
        "config",
        "run_plan",
        "recipes",
        "cluster",
        "comm",
        "resilience",
        "training",
        "train",
        "print_config",
        "__main__",
    },
    "commands": {
        "schedules",
        "analysis",
        "config",
        "recipes",
        "cluster",
        "comm",
        "optimizers",
        "models",
        "data",
        "checkpoints",
        "runlog",
        "resilience",
        "training",
    },
    # The command `plan`. No other part may import the planner.
    "planner": {"schedules", "analysis", "config", "comm", "models", "runlog", "commands"},
    "benchmarks": {
        "order",
        "cluster",
        "analysis",
        "config",
        "run_plan",
        "comm",
        "optimizers",
        "data",
        "training",
        "commands",
    },
    "callbacks": {
        "order",
        "schedules",
        "cluster",
        "comm",
        "optimizers",
        "models",
        "checkpoints",
        "runlog",
        "resilience",
        "training_run",
    },
    "demo": {"main", "runlog", "commands"},
    "__main__": {"recipes", "cluster", "resilience", "commands"},
    # Only type checkers execute these imports.
    "__init__": {"callbacks", "checkpoints", "comm", "data", "optimizers", "order", "schedules"},
}


def modules():
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path):
    names = ("hybrid_imagenet", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def part_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_names(tree):
    """Yields the full names of everything that a syntax tree imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def imported_parts(path):
    names = [
        name
        for name in imported_names(ast.parse(path.read_text()))
        if name.startswith("hybrid_imagenet.")
    ]
    shared = {"__version__", "errors", "files", "options", "startup", "xla", "private_api"}
    return {name.split(".")[1] for name in names} - shared - {part_of(path)}


def test_allowed_imports_are_declared_for_every_part_of_the_package():
    assert {part_of(path) for path in modules()} == set(ALLOWED)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_of_a_part_are_allowed(part):
    files = [path for path in modules() if part_of(path) == part]
    assert files
    for path in files:
        forbidden = imported_parts(path) - ALLOWED[part]
        assert not forbidden, f"{path.relative_to(PACKAGE)} imports {sorted(forbidden)}"


def test_allowed_imports_of_parts_have_no_cycle():
    order = []
    remaining = dict(ALLOWED)
    while remaining:
        free = [part for part, imports in remaining.items() if not imports - set(order)]
        assert free, f"a cycle among {sorted(remaining)}"
        order += free
        remaining = {part: imports for part, imports in remaining.items() if part not in free}


def test_imports_of_modules_have_no_cycle():
    module_names = {name_of(path) for path in modules()}
    edges = {}
    for path in modules():
        names = imported_names(ast.parse(path.read_text()))
        targets = {name if name in module_names else name.rpartition(".")[0] for name in names}
        # A package's own __init__ may gather what its modules offer.
        edges[name_of(path)] = {
            t for t in targets & module_names if not name_of(path).startswith(t + ".")
        } - {name_of(path)}
    done = set()
    path = []

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


def page_text(name):
    return (PACKAGE.parent / "docs" / "dev" / name).read_text()


def named_files(text):
    """Yields the files and directories that a text has in backticks."""
    yield from re.findall(r"`((?:[\w]+/)+[\w.]*|\w+\.py)`", text)


def file_exists(name):
    return any((folder / name).exists() for folder in (PACKAGE, PACKAGE.parent))


def moved_names():
    """Returns the rows (old, new) of the table of moved names on the architecture page."""
    section = page_text("architecture.md").partition("## What has moved")[2]
    return re.findall(r"^\| (.+) \| (.+) \|$", section, re.M)[1:]


def test_architecture_page_lists_every_package():
    rows = set(re.findall(r"^\| `(\w+)/` \|", page_text("architecture.md"), re.M))
    assert rows == {part for part in ALLOWED if (PACKAGE / part).is_dir()}


@pytest.mark.parametrize("page", ["architecture.md", "paths.md", "changes.md"])
def test_page_for_developers_names_only_existing_files(page):
    text = page_text(page)
    for old, _ in moved_names():
        text = text.replace(f"| {old} |", "|")
    # The reader writes these files; the page only shows what is in them.
    text = re.sub(r"Write\s+`[^`]+`", "", text).replace("NAME.py", "__init__.py")
    names = list(named_files(text))
    assert len(names) > 10
    for name in names:
        assert file_exists(name), name


def test_files_that_have_moved_are_gone():
    # A row about a part of a file, such as "`name` in `file.py`", keeps the file.
    files = [name for old, _ in moved_names() if " in `" not in old for name in named_files(old)]
    assert len(files) > 3
    for name in files:
        assert not file_exists(name), name


GRADIENT = "The path of a gradient"


def paths_of_the_page():
    """Returns the numbered tables of files in docs/dev/paths.md, by heading."""
    sections = re.split(r"^#+ ", page_text("paths.md"), flags=re.M)
    tables = {
        s.partition("\n")[0]: re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", s, re.M) for s in sections
    }
    return {heading: files for heading, files in tables.items() if files}


def are_connected(one, other):
    """Returns whether one of two files imports the other, or names it to a registry."""
    for path, target in ((one, other), (other, one)):
        tree = ast.parse(path.read_text())
        target_name = name_of(target)
        texts = [
            n.value
            for n in ast.walk(tree)
            if isinstance(n, ast.Constant) and isinstance(n.value, str)
        ]
        beginnings = (f"{target_name}.", f"{target_name}:")
        for name in {*imported_names(tree), *texts}:
            if name == target_name or name.startswith(beginnings):
                return True
    return False


@pytest.mark.parametrize("heading", sorted(paths_of_the_page().keys() - {GRADIENT}))
def test_files_of_a_path_through_the_code_are_connected(heading):
    first, *remaining = [PACKAGE / name for name in paths_of_the_page()[heading]]
    reached = [first]
    for file in reached:
        neighbors = [other for other in remaining if are_connected(file, other)]
        reached += neighbors
        remaining = [other for other in remaining if other not in neighbors]
    assert not remaining, f"connected to no other file: {remaining}"


def test_each_file_of_the_path_of_a_gradient_is_connected_to_another():
    # They form no chain of imports, because the optimizer receives its communicator, and the update
    # its rule, as arguments.
    files = [PACKAGE / name for name in paths_of_the_page()[GRADIENT]]
    for file in files:
        assert any(are_connected(file, other) for other in files if other != file), file


def test_paths_page_has_all_paths():
    subjects = ("an image", "the command line", "an option", "a record", "a checkpoint")
    headings = {f"The path of {subject}" for subject in subjects}
    assert {GRADIENT, *headings} <= set(paths_of_the_page())


def test_package_imports_nothing_outside_itself_from_the_checkout():
    for path in modules():
        names = imported_names(ast.parse(path.read_text()))
        assert not [
            name for name in names if name.split(".")[0] in ("studies", "benchmarks", "tests")
        ], path


def test_training_gets_its_numbers_from_the_plan():
    # These read flags: the checks of a command line, and the data that a plan depends on.
    before_the_plan = {"training/preflight.py", "training/build.py"}
    for path in modules():
        names = set(imported_names(ast.parse(path.read_text())))
        file = str(path.relative_to(PACKAGE))
        if part_of(path) not in ("config", "run_plan"):
            assert "hybrid_imagenet.config.derived" not in names, file
        if part_of(path) == "training" and file not in before_the_plan:
            # `stored` reads the file of an earlier run.
            flags = {name for name in names if name.startswith("hybrid_imagenet.config")}
            assert flags <= {"hybrid_imagenet.config.stored"}, file


def test_horovod_is_imported_only_by_comm():
    for path in modules():
        if part_of(path) != "comm":
            names = imported_names(ast.parse(path.read_text()))
            assert not [n for n in names if n.split(".")[0] == "horovod"], path


def test_modules_that_are_started_by_name_exist():
    module_names = {name_of(path) for path in modules()}
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
                if (
                    text.startswith("hybrid_imagenet.")
                    and text.replace(".", "").replace("_", "").isalnum()
                ):
                    module_exists = text in module_names
                    member_exists = text.rpartition(".")[0] in module_names
                    assert module_exists or member_exists, f"{path}: {text}"


@pytest.mark.parametrize("name", ["callbacks/__init__.py", "schedules/__init__.py"])
def test_public_modules_only_import_names(name):
    tree = ast.parse((PACKAGE / name).read_text())
    kinds = [type(node) for node in tree.body]
    assert set(kinds[1:-1]) == {ast.ImportFrom}, "a docstring, imports and __all__"
    assert [target.id for target in tree.body[-1].targets] == ["__all__"]


def test_public_names_can_be_used_without_loading_tensorflow():
    assert set(hybrid_imagenet.__all__) <= set(dir(hybrid_imagenet))
    names = (
        "hybrid_imagenet",
        "hybrid_imagenet.schedules",
        "hybrid_imagenet.order",
        "tests.support.first_names",
    )
    assert fresh.loaded_by(*names) == set()


def test_public_names_are_visible_to_type_checkers():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    assert {alias.name for node in block.body for alias in node.names} == set(
        hybrid_imagenet.__all__
    )
    for name in hybrid_imagenet.__all__:
        assert getattr(hybrid_imagenet, name)


PURE_PACKAGES = ("analysis", "config", "errors", "planner", "recipes", "run_plan", "schedules")
PURE_FILES = (
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
    "order.sampling",
    "order.shard_order",
    "runlog.live",
)


def test_modules_without_tensors_import_neither_tensorflow_nor_keras():
    names = [name_of(path) for path in modules() if part_of(path) in PURE_PACKAGES]
    names += [f"hybrid_imagenet.{name}" for name in PURE_FILES]
    assert fresh.loaded_by(*names) == set()


def test_class_names_are_unique_in_the_package():
    count = collections.Counter()
    for path in modules():
        tree = ast.parse(path.read_text())
        count.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
    assert not [name for name, times in count.items() if times > 1]


def test_file_names_are_unique_in_the_package():
    # A recipe's file has the name that --recipe takes, so recipes may repeat a name.
    count = collections.Counter(path.name for path in modules() if part_of(path) != "recipes")
    repeated = {name for name, times in count.items() if times > 1}
    assert repeated == {"__init__.py", "__main__.py"}
