"""Tests commands on damaged runs: wrong types, truncated files, pipes, devices and directories.

Each command reports such a run in one line.
"""

import collections
import copy
import functools
import itertools
import json
import os
import pathlib
import shutil
import time

import numpy as np
import pytest

from hybrid_imagenet import __main__, config
from hybrid_imagenet.commands import resume
from hybrid_imagenet.commands.report import load, page, report_command
from hybrid_imagenet.errors import UserError
from tests.commands.report.synthetic import make_run
from tests.support.promptly import promptly

WRONG_VALUES = (
    None,
    True,
    -1,
    0,
    0.5,
    1e300,
    10**400,
    -(10**400),
    float("nan"),
    "word",
    "",
    [],
    {},
    [["a"]],
    [None],
    {"a": {"b": 1}},
)
FILES = ("config.json", "metrics.jsonl", "summary.json", "lock", "image_results.npz")


def make_whole_run(directory):
    """Writes a finished run with every flag, as the program does; returns its directory."""
    make_run(directory, epochs=3)
    path = directory / "config.json"
    resolved = config.resolve(["--dataset=digits", "--epochs=3", "--target_top1=0.5"])
    origins = {name: origin.value for name, origin in resolved.origins.items()}
    facts = {"origins": origins, "started": time.time(), "precision": "float32", "num_classes": 10}
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "flags": resolved.as_masked_dict(), **facts})
    )
    return directory


def replaced(document, depth, every):
    """Yields (path, copy) pairs: copies of a JSON object in which the value at a path is wrong.

    Args:
      document: The object.
      depth: Levels of keys that are replaced.
      every: 1 tries all pairs of a value and a wrong one, n every n-th pair. An odd number tries
        each wrong value.
    """

    def paths_to_values(value, path):
        if path:
            yield path
        if len(path) < depth and isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in inner:
                yield from paths_to_values(item, (*path, key))

    for path, wrong in itertools.islice(
        itertools.product(paths_to_values(document, ()), WRONG_VALUES), 0, None, every
    ):
        changed = copy.deepcopy(document)
        parent = changed
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = wrong
        yield path, changed


def judge_run(run):
    """Returns how the commands judge a run: damaged, not resumable or whole.

    The judgment combines status, resume, report --text and report. Exceptions other than UserError
    are not caught.
    """
    try:
        loaded = load.load_run(run)
        list(report_command.summary_lines(loaded))
        page.build([loaded], "title")
        assert loaded.next_step is not None
    except UserError as error:
        assert str(run) in str(error)
        return "damaged"
    try:
        resume.resume_command(run, json.loads((run / "config.json").read_text()), [])
    except UserError:
        return "not resumable"
    return "whole"


@pytest.mark.parametrize(
    ("name", "depth", "every"),
    [("config.json", 1, 1), ("config.json", 2, 9), ("summary.json", 3, 5), ("metrics.jsonl", 2, 5)],
)
def test_report_of_a_value_of_another_kind_accepts_it_or_raises_the_file(
    name, depth, every, tmp_path
):
    run = make_whole_run(tmp_path / "run")
    *before, last = (run / name).read_text().splitlines()
    assert judge_run(run) == "whole"
    verdicts = collections.Counter()
    for _, changed in replaced(json.loads(last), depth, every):
        (run / name).write_text("\n".join([*before, json.dumps(changed)]) + "\n")
        verdicts[judge_run(run)] += 1
    assert verdicts["damaged"] > 50 and verdicts["whole"] > 5


def make_fifo(path):
    os.mkfifo(path)


def make_directory(path):
    path.mkdir()


def make_device(path):
    path.symlink_to("/dev/zero")


def make_loop(path):
    path.symlink_to(path)


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(1 << 40)


def make_binary(path):
    path.write_bytes(bytes(range(256)) * 9)


def make_deep(path):
    path.write_text('{"flags": ' * 50 + "{}" + "}" * 50)


def make_endless(path):
    path.write_text("[" * 100_000)


def make_number(path):
    path.write_text("1" * 10_000)


def make_empty(path):
    path.touch()


UNUSABLE_FILES = (
    make_fifo,
    make_directory,
    make_device,
    make_loop,
    make_huge,
    make_binary,
    make_deep,
    make_endless,
    make_number,
    make_empty,
)


def damaged_runs(parent: pathlib.Path) -> int:
    """Writes more than a hundred runs, each with other damage; returns their number."""
    number = 0
    original = make_whole_run(parent / "whole")
    for name in FILES:
        for make in UNUSABLE_FILES:
            run = shutil.copytree(
                original, parent / f"{make.__name__.removeprefix('make_')}-{name}"
            )
            (run / name).unlink(missing_ok=True)
            make(run / name)
            number += 1
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        document = json.loads((original / name).read_text().splitlines()[0])
        for key in sorted(document)[:25]:
            run = shutil.copytree(original, parent / f"{key}-{name}")
            (run / name).write_text(json.dumps({**document, key: {"a": [document[key]]}}) + "\n")
            number += 1
    return number


def test_runs_lists_a_hundred_damaged_runs_next_to_a_whole_one(tmp_path, capsys):
    number = damaged_runs(tmp_path)
    assert number > 100
    assert promptly(lambda: __main__.main(["runs", str(tmp_path)])) == 0
    output, error = capsys.readouterr()
    head, *rows = output.splitlines()
    assert head.split()[-1] == "problem" and error == ""
    assert len(rows) == number + 1
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["whole"][3] == "finished" and cells["whole"][-1] != "problem"
    for name in ("config.json", "summary.json", "metrics.jsonl"):
        for make in ("fifo", "directory", "device", "huge", "binary"):
            line = next(row for row in rows if row.startswith(f"{make}-{name} "))
            assert " damaged " in line and f"{make}-{name}/{name}" in line, line
    # These files are not part of a run's results.
    for make in ("fifo", "directory", "binary", "device", "huge"):
        assert cells[f"{make}-lock"][3] == cells[f"{make}-image_results.npz"][3] == "finished"


def test_runs_lists_a_run_with_unexpected_damage(tmp_path, capsys, monkeypatch):
    for name in ("one", "other"):
        make_whole_run(tmp_path / name)

    def load_all_but_one(path, real=load.load_run):
        return {}["gone"] if path.name == "one" else real(path)

    monkeypatch.setattr(load, "load_run", load_all_but_one)
    assert __main__.main(["runs", str(tmp_path)]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()}
    assert " damaged " in rows["one"] and rows["one"].endswith("KeyError: 'gone'")
    assert " finished " in rows["other"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "make", [make_fifo, make_device, make_huge], ids=["fifo", "device", "huge"]
)
def test_status_and_report_of_a_run_with_a_pipe_or_device_end_promptly(
    name, make, tmp_path, capsys
):
    run = make_whole_run(tmp_path / "run")
    (run / name).unlink(missing_ok=True)
    make(run / name)
    code = 0 if name in ("lock", "image_results.npz") else 2
    for arguments in (["status", str(run)], ["report", "--text", str(run)], ["stop", str(run)]):
        exit_code = promptly(functools.partial(__main__.main, arguments))
        assert exit_code == (2 if arguments[0] == "stop" else code)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == (1 if code == 0 else 3)
    resumed = promptly(lambda: __main__.main(["resume", str(run), "--dry_run"]))
    assert resumed == (2 if name == "config.json" else 0)


def test_load_run_ignores_image_results_that_do_not_fit(tmp_path):
    run = make_whole_run(tmp_path / "run")
    good = {
        "label": np.zeros(3, np.int32),
        "predicted": np.ones(3, np.int32),
        "probability": np.full(3, 0.5, np.float32),
        "class_names": np.array(["a", "b"]),
        "worst": np.array([2]),
        "worst_files": np.array(["x.png"]),
    }
    np.savez(run / "image_results.npz", **good)
    assert load.load_run(run).image_results is not None
    for name, wrong in (
        ("label", np.full(3, 2)),
        ("predicted", np.zeros(2, int)),
        ("probability", np.zeros((3, 2))),
        ("worst", np.array([3])),
        ("worst", np.array([0.5])),
        ("class_names", np.array("a")),
    ):
        np.savez(run / "image_results.npz", **{**good, name: wrong})
        assert load.load_run(run).image_results is None, name
