"""Tests the pages for users: commands are valid, run and exit with 0; links and flags exist."""

import ast
import importlib.util
import os
import pathlib
import re
import shlex
import subprocess
import sys
import unittest.mock

import numpy as np
import pytest
from PIL import Image

import hybrid_imagenet as hi
from hybrid_imagenet import __main__, config, run_plan
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.commands import evaluate, export, predict, run, runs
from hybrid_imagenet.commands.data import data_command as data
from hybrid_imagenet.commands.doctor import doctor_command as doctor
from hybrid_imagenet.commands.report import report_command as report
from hybrid_imagenet.config import help as flag_help
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.planner import planner_flags as plan
from tests.ranks import environment
from tests.support.pages import anchors

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [
    ROOT / "docs" / "tutorial-own-images.md",
    ROOT / "docs" / "tutorial-imagenet.md",
    ROOT / "docs" / "tuning.md",
    ROOT / "docs" / "troubleshooting.md",
    ROOT / "docs" / "glossary.md",
]
ALL_PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
        *(ROOT / "studies" / "records").glob("*.md"),
    ]
)
PARSERS = {
    "train": config.resolve,
    "evaluate": lambda words: evaluate._parser().parse_args(words),
    "predict": lambda words: predict._parser().parse_args(words),
    "report": lambda words: report._parser().parse_args(words),
    "export": lambda words: export._parser().parse_args(words),
    "data": lambda words: data._parser().parse_args(words),
    "doctor": doctor.parse_arguments,
    "plan": plan.parse,
    "runs": lambda words: runs._runs_parser().parse_args(words),
    "run": lambda words: config.resolve(run.parse_arguments(words)[1]),
}


def blocks(page):
    """Yields pairs of a language and a text: of each block, and "prose" for the text between."""
    first, *others = re.split(r"^```(.*)$", page.read_text(), flags=re.M)
    yield "prose", first
    for number, (language, text) in enumerate(zip(others[::2], others[1::2], strict=True)):
        yield ("prose" if number % 2 else language), text


def commands(page):
    """Yields the commands of a page, with continued lines joined."""
    for language, text in blocks(page):
        if not language:
            yield from (line for line in text.replace("\\\n", " ").splitlines() if line.strip())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_a_page_are_valid(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for line in commands(page):
        first, *words = shlex.split(line, comments=True)
        if first == "python":
            assert words[:2] == ["-m", "hybrid_imagenet.main"], line
            config.resolve(words[2:])
        elif first == "hybrid-imagenet":
            PARSERS[words[0]](words[1:])
        else:
            assert (ROOT / first).is_file(), line
            config.resolve([word for word in words if word.startswith("--")])


def test_commands_other_than_training_are_valid_on_every_page(monkeypatch):
    monkeypatch.chdir(ROOT)
    parsed = set()
    for page in ALL_PAGES:
        for line in commands(page):
            words = shlex.split(line, comments=True)
            if words[:1] == ["hybrid-imagenet"] and words[1] in set(PARSERS) - {"train", "run"}:
                try:
                    PARSERS[words[1]](words[2:])
                except (SystemExit, UserError) as problem:
                    pytest.fail(f"{page.name}: {line}: {problem}")
                parsed.add(words[1])
    assert parsed >= {"evaluate", "predict", "report", "export", "data", "doctor", "plan"}


# Examples with fewer ranks are for CPUs.
FEWEST_GPUS = 8


def gpu_examples():
    """Yields commands that name a number of GPUs, as (page, words, comment next to it)."""
    for page in ALL_PAGES:
        for line in commands(page):
            yield page.name, shlex.split(line, comments=True), line.partition("#")[2]
    for title, command in flag_help.EXAMPLES.items():
        yield "--help", shlex.split(command), title


def training_of(words):
    """Returns the flags of training in a command, and the number of ranks that it starts.

    Returns None if the command does not train.
    """
    if words[:3] == ["python", "-m", "hybrid_imagenet.main"] or words[:2] == [
        "hybrid-imagenet",
        "train",
    ]:
        return [word for word in words if word.startswith("--")], 1
    if words[:2] == ["hybrid-imagenet", "run"] and "--" in words:
        options, flags = run.parse_arguments(words[2:])
        return (flags, options.np) if options.module == "hybrid_imagenet.main" and flags else None
    return None


def test_examples_with_gpus_have_the_batch_that_is_stated_next_to_them(monkeypatch):
    # Only the README may omit the batch. Without a flag, a GPU has 256 images everywhere.
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(gpus, "in_use", lambda: True)
    checked = 0
    for page_name, words, comment in gpu_examples():
        flags_and_ranks = training_of(words)
        if (
            flags_and_ranks is None
            or "FLAGS" in flags_and_ranks[0]
            or "cosine60" in " ".join(flags_and_ranks[0])
        ):
            continue
        resolved = config.resolve(*flags_and_ranks)
        if resolved.gpus < FEWEST_GPUS and not resolved.run.print_config_gpus:
            continue
        stated = re.search(r"([\d,]+) images per step", comment)
        assert stated or page_name == "README.md", (page_name, words)
        batch = int(stated[1].replace(",", "")) if stated else 256 * resolved.gpus
        assert run_plan.make(resolved).base_batch == batch, (page_name, words)
        checked += 1
    assert checked >= 15


@pytest.mark.parametrize(
    "command",
    [
        "train --recipe=mlperf_lars --print_config --print_config_gpus=8",
        "train --recipe=mlperf_lars --dataset=synthetic --check_only",
        "plan --cluster=h100 --hosts=1",
    ],
)
def test_guide_to_8_gpus_shows_the_output_of_a_command(command, tmp_path, monkeypatch, capsys):
    page = ROOT / "docs" / "gpus-on-one-machine.md"
    shown = [text for language, text in blocks(page) if language == "text"]
    monkeypatch.chdir(tmp_path)
    assert __main__.main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    assert any(set(text.split("\n")) - {"", "..."} <= set(printed) for text in shown), printed


def test_schedulers_page_has_the_cores_that_plan_predicts_for_8_v100(capsys):
    assert __main__.main(["plan", "--cluster=h1", "--hosts=1"]) == 0
    cores = re.search(r"about (\d+) CPU cores.*; (\d+) with shards", capsys.readouterr().out)
    text = " ".join((ROOT / "docs" / "schedulers.md").read_text().split())
    assert f"for 8 V100 needs about {cores[1]} cores" in text
    assert f"about {cores[2]} with shards of `--resize=256`" in text


@pytest.mark.parametrize("command", flag_help.EXAMPLES.values())
def test_help_examples_for_8_gpus_and_more_train_the_recommended_recipe(command):
    flags_and_ranks = training_of(shlex.split(command))
    resolved = config.resolve(*flags_and_ranks)
    if resolved.run.print_config_gpus or resolved.gpus >= FEWEST_GPUS:
        assert resolved.run.recipe == "mlperf_lars"


@pytest.fixture
def example_directory(tmp_path, monkeypatch):
    """Changes to a directory with the files that the pages assume.

    These are flag files, and photos that differ in color.
    """
    (tmp_path / "flags").symlink_to(ROOT / "flags")
    generator = np.random.default_rng(5)
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for image in range(20):
            pixels = generator.integers(0, 120, (48, 40, 3))
            pixels[..., number] += 120
            Image.fromarray(pixels.astype(np.uint8)).save(
                tmp_path / "photos" / name / f"{image}.png"
            )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def only_answers(words):
    """Returns whether a command only prints an answer, within about a second, on any machine."""
    if words[0] == "train":
        return bool({"--check_only", "--print_config"} & set(words))
    return words[0] in ("data", "plan") and not any("/data/" in word for word in words)


@pytest.mark.parametrize("page", PAGES[:-1], ids=lambda page: page.stem)
def test_commands_that_only_answer_exit_with_0(page, example_directory, capsys):
    ran = 0
    for line in commands(page):
        first, *words = shlex.split(line, comments=True)
        if words[:2] == ["-m", "hybrid_imagenet.main"]:
            words = ["train", *words[2:]]
        if first in ("python", "hybrid-imagenet") and only_answers(words):
            assert __main__.main(words) == 0, (line, capsys.readouterr())
            ran += 1
    assert ran


@pytest.mark.slow
def test_tutorial_on_own_images_runs_from_its_first_command_to_its_last(example_directory):
    # The commands are unchanged, except that training ends after three steps.
    ran = []
    for line in commands(ROOT / "docs" / "tutorial-own-images.md"):
        first, *words = shlex.split(line, comments=True)
        assert first == "hybrid-imagenet"
        trains = words[0] in ("train", "run") and "--check_only" not in words
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "hybrid_imagenet",
                *words,
                *(["--max_steps=3"] if trains else []),
            ],
            env=environment() | {"PYTHONPATH": os.fspath(ROOT)},
            capture_output=True,
            text=True,
            timeout=900,
        )
        assert result.returncode == 0, (line, result.stdout + result.stderr)
        ran.append(words[0])
    assert {"train", "run", "data", "report", "evaluate", "predict", "export"} <= set(ran)
    assert (example_directory / "photos.onnx").is_file()


def links(page):
    """Yields a path and an anchor for each link to a file. Either may be empty."""
    text = "".join(text for language, text in blocks(page) if language == "prose")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: os.fspath(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_existing_pages_and_headings(page):
    for path, anchor in links(page):
        assert path.exists(), path
        assert not anchor or path.suffix != ".md" or anchor in anchors(path), (path, anchor)


def test_every_page_can_be_reached_from_the_readme():
    # All pages of docs/ must also be in the navigation of mkdocs.yml.
    reached = set()
    new = {ROOT / "README.md"}
    while new:
        reached |= new
        new = {
            path
            for page in new
            for path, _ in links(page)
            if path.suffix == ".md" and path.exists()
        } - reached
    assert set(ALL_PAGES) <= reached
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"([\w/-]+\.md)$", navigation, re.M)
    assert {
        os.fspath(page.relative_to(ROOT / "docs"))
        for page in ALL_PAGES
        if ROOT / "docs" in page.parents
    } <= set(listed)


@pytest.fixture(scope="module")
def reference():
    """Returns the module that writes the pages of docs/reference."""
    path = ROOT / "docs" / "dev" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    # The dataclasses of the module look up the module by its name.
    sys.modules["reference"] = module
    spec.loader.exec_module(module)
    return module


def test_reference_pages_on_another_machine_are_current(reference, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(os, "cpu_count", lambda: 77)
    assert reference.outdated_pages() == [], f"Run: {reference.REMEDY}"


def test_reference_check_outdated_page_prints_the_command_to_run(reference, monkeypatch, capsys):
    monkeypatch.setattr(reference, "pages", lambda: {"docs/reference/api.md": "another text"})
    assert reference.main(["--check"]) == 1
    message = f"docs/reference/api.md is not current. Run: {reference.REMEDY}\n"
    assert capsys.readouterr().err == message


def test_text_after_an_example_of_a_docstring_is_not_code(reference):
    text = "Computes a.\n\nExample:\n  a()\n\n  b()\n\nThe rest:\n\n* one\n* two\n\nReturns:\n  A."
    blocks = reference.docstring_blocks(text, "hi", set())
    assert blocks == [
        "Computes a.",
        "The rest:",
        "- one\n- two",
        "**Example**",
        "```python\na()\n\nb()\n```",
        "**Returns:** A.",
    ]


def test_api_reference_has_every_public_name():
    folder = ROOT / "docs" / "reference"
    modules = ("data", "optimizers", "order", "schedules")
    texts = [path.read_text() for path in (folder / "api.md", *folder.glob("api-*.md"))]
    headings = set(re.findall(r"^##+ `?([\w.]+)`?$", "".join(texts), re.M))
    public_modules = {*modules, "callbacks"}
    assert {f"hi.{name}" for name in set(hi.__all__) - public_modules} <= headings
    assert {path.stem for path in folder.glob("api-*.md")} == {f"api-{m}" for m in public_modules}
    for module in modules:
        assert {f"hi.{module}.{name}" for name in getattr(hi, module).__all__} <= headings
    # Importing this module would take seconds, because it imports TensorFlow.
    source = (ROOT / "hybrid_imagenet" / "callbacks" / "__init__.py").read_text()
    exported = ast.literal_eval(source.partition("__all__ = ")[2])
    assert {f"hi.callbacks.{name}" for name in exported} <= headings


def test_command_line_reference_has_usage_and_example_of_every_command():
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    sections = dict(re.findall(r"^###? ([a-z ]+)\n(.*?)(?=^##|\Z)", text, re.M | re.S))
    names = set(__main__.COMMANDS) - {"data"} | {"data prepare", "data check"}
    for name in names:
        assert f"```text\nusage: hybrid-imagenet {name}" in sections[name]
        # A description, which ends with a newline, may come first.
        assert re.search(rf"```sh\n(# .*\n)?hybrid-imagenet {name}\b", sections[name]), name


def test_command_line_reference_has_each_meaning_of_a_flag():
    # Optimizers describe flags such as --momentum in their own words.
    text = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    page_flags = re.findall(r"^- `(--\[no\]\w+|--\w+)", text.partition("\n## run\n")[0], re.M)
    help_flags = re.findall(r"^  (--\[no\]\w+|--\w+)", flag_help.text("all"), re.M)
    assert help_flags.count("--momentum") > 1
    # The command demo before it has one flag, too.
    assert page_flags[1:] == help_flags


def test_api_example_of_user_error_in_a_program_exits_with_the_message():
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    section = text.partition("### `hi.UserError`")[2]
    example = section.partition("**Example**\n\n```python\n")[2].partition("```")[0]
    failing = unittest.mock.Mock(init=unittest.mock.Mock(side_effect=hi.UserError("What to do.")))
    failing.UserError = hi.UserError
    with pytest.raises(SystemExit, match=r"^error: What to do\.$"):
        exec(example, {"hi": failing, "sys": sys})


@pytest.fixture(scope="module")
def public_callables(reference):
    """Returns the public functions and classes whose arguments users pass."""
    names = [name for names in reference.public_names().values() for name in names]
    return [name for name in names if not reference.signature(name).startswith("class ")]


def test_public_docstrings_describe_the_arguments_of_the_signature(reference, public_callables):
    for public_name in public_callables:
        names = [name for name, _, _ in reference.public_arguments(public_name) if name]
        documented = list(reference.documented_arguments(public_name))
        assert documented == names, public_name.name


def test_public_docstrings_state_the_defaults_of_the_signature(reference, public_callables):
    checked = 0
    for public_name in public_callables:
        descriptions = reference.documented_arguments(public_name)
        for name, _, default in reference.public_arguments(public_name):
            where = f"{public_name.name}: {name}"
            stated = reference.documented_default(descriptions[name]) if name else None
            if default is None:
                assert stated is None, where
                continue
            assert stated is not None, where
            # The default is a function, which the docstring describes in words.
            if default.startswith("lambda") or default == "print_to_stderr":
                continue
            assert stated == default or stated.startswith(f"{default}, "), where
            checked += 1
    assert checked > 100
