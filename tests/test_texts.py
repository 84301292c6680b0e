"""Tests that what errors, help texts, docstrings and pages name exists: files, commands, flags."""

import ast
import functools
import inspect
import pathlib
import re

import pytest

from benchmarks.__main__ import BENCHMARKS as REPOSITORY_BENCHMARKS
from hybrid_imagenet.__main__ import COMMANDS
from hybrid_imagenet.benchmarks.__main__ import BENCHMARKS
from hybrid_imagenet.config import OPTIONS
from hybrid_imagenet.options import options_of
from hybrid_imagenet.planner.planner_flags import PlannerFlags
from studies.command import STUDIES
from tests.test_docs import ALL_PAGES, anchors, blocks

ROOT = pathlib.Path(__file__).parents[1]
PYTHON_FILES = sorted(
    path
    for directory in ("hybrid_imagenet", "benchmarks", "studies")
    for path in (ROOT / directory).rglob("*.py")
)
SHELL_FILES = sorted((ROOT / "launch").rglob("*.sh"))
FILE_OF_THE_REPOSITORY = (
    r"(?<![\w./-])((?:benchmarks|dev|examples|flags|hybrid_imagenet|launch|studies|tests)/[\w./-]+"
    r"\.(?:csv|flags|json|py|sh|txt|yaml))\b"
)
# Stands for a value that is formatted into a text.
VALUE = "\0"
SUBCOMMANDS = {"bench": set(BENCHMARKS), "data": {"prepare", "check"}}
# In texts about the form of a command.
PLACEHOLDERS = {"NAME", "flag", "flag_name", "name", "noNAME", "no_NAME", "no_name", "noname"}
FOREIGN_FLAGS = {
    "git": {"abbrev", "always", "dirty", "exclude"},
    "mpirun": {"allow_run_as_root", "bind_to", "mca", "oversubscribe", "prefix", "quiet"},
    "tar": {"dereference", "sparse"},
    "nvidia-smi": {"query_gpu", "format"},
    "docker": {"gpus", "shm_size"},
    "tensorboard": {"logdir"},
    "XLA": {
        "tf_xla_persistent_cache_device_types",
        "tf_xla_persistent_cache_directory",
        "xla_gpu_enable_command_buffer",
    },
    "CSS variables": {"c", "c0", "c6", "part"},
    "tfds build": {"file_format"},
    "setup.sh": {"gpu"},
    # It is declared by a function that takes the name.
    "data prepare": {"from"},
    "every command": {"help", "version", "flagfile"},
    "PyPI": {"distribution"},
}
"""Flags of other programs that texts name, by program."""
FOREIGN_FLAGS_OF_PAGES = {
    # The flags of timm next to those of this program.
    "comparison.md": {
        *("aa", "amp", "batch_size", "bce_loss", "crop_pct", "cutmix", "grad_accum_steps"),
        *("initial_checkpoint", "mixup", "model_ema_decay", "opt", "sched", "smoothing"),
    },
    # sbatch and docker build
    "schedulers.md": {"account", "partition", "signal", "target"},
    # pip and pack.sh
    "install.md": {"no_deps", "tests", "whole"},
    # docker build
    "README.md": {"target"},
    # A script of the reader.
    "library.md": {"your", "flags"},
}
"""Flags of other programs in the prose of pages for users."""


def texts(path):
    """Yields the texts of a file: the strings of a Python file, a shell script as a whole."""
    source = path.read_text()
    if path.suffix != ".py":
        yield source
        return
    parts = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            yield "".join(
                part.value if isinstance(part, ast.Constant) else VALUE for part in node.values
            )
        # `ast.walk` yields an f-string before its parts.
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in parts:
            yield node.value


@functools.cache
def named(pattern, paths=(*PYTHON_FILES, *SHELL_FILES)):
    """Returns the matches of a pattern in the texts of files, each with the files that have it."""
    found = {}
    for path in paths:
        for text in texts(path):
            for match in re.findall(pattern, text):
                found.setdefault(match, set()).add(path.relative_to(ROOT).as_posix())
    return found


def test_pages_and_sections_that_a_text_names_exist():
    pages = named(r"(?<![\w./-])(docs/[\w/-]+\.md|README\.md)(?:#([\w-]+))?")
    assert len(pages) > 10
    for (name, section), places in pages.items():
        assert (ROOT / name).is_file(), (name, places)
        assert not section or section in anchors(ROOT / name), (name, section, places)


def test_files_of_the_repository_that_a_text_names_exist():
    files = named(FILE_OF_THE_REPOSITORY)
    assert len(files) > 10
    for name, places in files.items():
        assert "NAME" in name or (ROOT / name).is_file(), (name, places)


def test_files_of_the_repository_that_a_page_names_exist():
    checked = 0
    # The changelog also names files of the past.
    for page in set(ALL_PAGES) - {ROOT / "CHANGELOG.md"}:
        for name in re.findall(FILE_OF_THE_REPOSITORY, page.read_text()):
            is_example = "NAME" in name or name == "hybrid_imagenet/recipes/cosine60.py"
            paths = (ROOT / name, page.parent / name)
            assert is_example or any(path.is_file() for path in paths), (page.name, name)
            checked += 1
    assert checked > 100


def test_commands_that_a_text_names_exist():
    commands = named(r"hybrid-imagenet ([a-z]\w*)(?: ([a-z]\w*))?")
    assert len(commands) > 10
    for (command, word), places in commands.items():
        assert command in COMMANDS, (command, places)
        if word and command in SUBCOMMANDS:
            assert word in SUBCOMMANDS[command], (command, word, places)


def test_modules_that_a_text_runs_exist():
    modules = named(r"python\S* -m ([a-z]\w*(?:\.\w+)*)(?: ([a-z]\w*))?")
    names = {"benchmarks": set(REPOSITORY_BENCHMARKS), "studies": set(STUDIES)}
    assert {module for module, _ in modules} >= set(names)
    for (module, word), places in modules.items():
        path = ROOT.joinpath(*module.split("."))
        if not (ROOT / module.partition(".")[0]).exists():
            # A module of Python or of another package.
            continue
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), places
        if word and module in names:
            assert word in names[module], (module, word, places)


@functools.cache
def known_flags():
    """Returns the flags that a text may name, with underscores and without the dashes in front."""
    options = set(OPTIONS) | set(options_of(PlannerFlags))
    options |= {f"no{name}" for name, option in OPTIONS.items() if option.kind.base is bool}
    for path in PYTHON_FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in ("add_argument", "add_option"):
                options |= {
                    argument.value.lstrip("-").replace("-", "_")
                    for argument in node.args
                    if isinstance(argument, ast.Constant)
                }
    return options.union(PLACEHOLDERS, *FOREIGN_FLAGS.values())


def test_flags_that_a_text_of_python_names_exist():
    flags = named(r"(?<![\w-])--([A-Za-z][\w-]*\w|[a-z])(?![\w-]*\0)", tuple(PYTHON_FILES))
    assert len(flags) > 100
    unknown = {
        name: places
        for name, places in flags.items()
        if name.replace("-", "_") not in known_flags()
    }
    assert unknown == {}


def test_flags_of_other_programs_are_still_named():
    flags = named(r"(?<![\w-])--([A-Za-z][\w-]*)", tuple(PYTHON_FILES))
    names = {name.replace("-", "_") for name in flags}
    unused = {program: flags - names for program, flags in FOREIGN_FLAGS.items() if flags - names}
    assert unused == {}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.stem
)
def test_flags_in_the_prose_of_a_page_for_users_exist(page):
    prose = "".join(text for language, text in blocks(page) if language == "prose")
    flags = re.findall(r"(?<![\w-])--(?:\[no\])?([A-Za-z][\w-]*)", prose)
    known = known_flags() | FOREIGN_FLAGS_OF_PAGES.get(page.name, set())
    assert {name.replace("-", "_") for name in flags} - known == set()


def descriptions(docstring):
    """Yields the description of each argument, attribute, result and error in a docstring."""
    section = ""
    is_first = False
    for line in inspect.cleandoc(docstring).splitlines():
        heading = re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line)
        if heading:
            section = heading[1]
            is_first = True
        elif re.match(r"\S", line):
            section = ""
        elif section and re.match(r"  \S", line):
            if section not in ("Returns", "Yields"):
                yield line.partition(": ")[2] or line.strip()
            elif is_first:
                yield line.strip()
            is_first = False


def test_descriptions_in_docstrings_begin_with_a_capital_letter_and_a_noun():
    found = []
    for path in [*PYTHON_FILES, *sorted((ROOT / "dev").rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                docstring = ast.get_docstring(node, clean=False) or ""
                found += [(path.name, text) for text in descriptions(docstring)]
    assert len(found) > 1000
    # The name of a type such as float32 may come first, in front of a shape.
    form = r"(?!(?:Of|As|Where) )(?:[^a-z]|b?float\d|u?int\d)"
    assert [name_and_text for name_and_text in found if not re.match(form, name_and_text[1])] == []
