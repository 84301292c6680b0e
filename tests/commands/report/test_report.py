"""Tests the pages and texts of `hybrid-imagenet report`."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import numpy as np
import pytest

from hybrid_imagenet.commands.report import classes, load, page, tables
from hybrid_imagenet.commands.report import report_command as program
from tests.commands.report.synthetic import make_run


class Page(HTMLParser):
    """Collects the tags with their attributes, and checks that they nest."""

    VOID = ("meta", "link", "br", "line", "rect", "circle", "polyline", "polygon")

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_loads_nothing_from_other_places(runs):
    text = page.build(load.load_runs(runs), "Title & <more>")
    parsed = Page(text)
    assert parsed.open == []
    for tag, attributes in parsed.tags:
        assert "src" not in attributes
        assert tag not in ("iframe", "img", "object", "embed")
        if "href" in attributes:
            assert attributes["href"] == "data:,"
    assert "<title>Title &amp; &lt;more&gt;</title>" in text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert "prefers-color-scheme:dark" in text
    assert 'name="viewport"' in text


def test_page_has_well_formed_charts_inside_their_frames(runs):
    text = page.build(load.load_runs(runs), "t")
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawings) >= 10
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        _, _, width, height = map(float, root.get("viewBox").split())
        for line in root.iter("polyline"):
            for point in line.get("points").split():
                x, y = map(float, point.split(","))
                assert 0 <= x <= width
                assert 0 <= y <= height
        for bar in root.iter("rect"):
            assert float(bar.get("x")) + float(bar.get("width")) <= width + 1


def test_criteria_has_published_rows_only_for_runs_on_imagenet(runs):
    loaded = load.load_runs(runs)
    text = tables.criteria(loaded)
    assert "Lu et al." not in text
    assert text.count("top-1 75.00 %") == 2 and "top-5" not in re.sub("final top-5", "", text)
    # Neither of the two runs had GPUs.
    assert 'data-label="ranks"' in text and "GPU" not in text
    loaded[1].flags["dataset"] = "imagenet2012"
    assert 'data-label="GPUs"' in tables.criteria(loaded)


def test_criteria_has_rows_of_runs_and_papers(tmp_path):
    make_run(tmp_path / "two", dataset="imagenet2012")
    text = tables.criteria([load.load_run(tmp_path / "two")])
    rows = [
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)
    ]
    two = next(row for row in rows if row[0] == "two")
    assert two[1:6] == ["top-1 75.00 %", "2", "64", "10", "0.1000"]
    published_row = next(
        row for row in rows if row[0] == "Lu et al., Table 3.8: cluster 1, to 75 % top-1"
    )
    assert published_row[4:10] == ["32", "0.0312", "18 min 00 s", "36,082", "97.50 %", "7 h 12 min"]


def test_load_run_ignores_the_summary_of_fewer_planned_epochs(tmp_path):
    run = make_run(tmp_path / "run", epochs=2)
    assert load.load_run(run).state == "finished"
    summary = json.loads((run / "summary.json").read_text()) | {"epochs_planned": 1}
    (run / "summary.json").write_text(json.dumps(summary))
    assert load.load_run(run).state != "finished"


def test_differing_flags_returns_the_values_of_all_runs(runs):
    assert load.differing_flags(load.load_runs(runs)) == [("recipe", ["goyal", "hybrid"])]
    assert "goyal" in tables.flag_differences(load.load_runs(runs))
    assert "All flags are the same" in tables.flag_differences([load.load_run(runs[0])] * 2)


def test_load_runs_distinguishes_directories_of_the_same_name(tmp_path):
    for parent in "ab":
        make_run(tmp_path / parent / "run", epochs=2)
    paths = [str(tmp_path / parent / "run") for parent in "ab"]
    assert [run.name for run in load.load_runs(paths)] == ["a/run", "b/run"]
    same_path_twice = load.load_runs([paths[0], paths[0]])
    assert [run.name for run in same_path_twice] == ["run"]
    make_run(tmp_path / "c" / "a" / "run", epochs=2)
    names = [run.name for run in load.load_runs([*paths, str(tmp_path / "c" / "a" / "run")])]
    assert len(set(names)) == 3 and names[2] == "c/a/run"


def test_page_escapes_markup_in_names_and_flags_of_a_run(tmp_path):
    make_run(tmp_path / "<b>run", epochs=2, note="<script>alert(1)</script>", dataset="<i>x</i>")
    text = page.build([load.load_run(tmp_path / "<b>run")], "t")
    for tag in ("<b>", "<i>x", "<script>alert"):
        assert tag not in text


def test_page_escapes_control_characters_in_names_and_flags_of_a_run(tmp_path):
    make_run(tmp_path / "run\x1b[31m", epochs=2, note="a\x1b]0;x\x07\ud800", dataset="b\x9b2J")
    text = page.build([load.load_run(tmp_path / "run\x1b[31m")], "title\x1b[0m")
    assert not [c for c in text if not c.isprintable() and c not in "\n\t\xa0"]
    for text_without_escapes in (r"run\x1b[31m", r"title\x1b[0m", r"b\x9b2J"):
        assert text_without_escapes in text
    text.encode()


def test_page_compares_a_run_on_imagenet_with_the_reference(tmp_path):
    make_run(tmp_path / "run", epochs=12, dataset="imagenet2012", per_gpu_batch=1024)
    text = page.build([load.load_run(tmp_path / "run")], "t")
    assert "epochs to 75.9 % at batch 2,048; this run reached it in epoch 10." in text
    assert "not comparable" not in text


def test_report_accepts_a_run_without_complete_records(tmp_path):
    run = make_run(tmp_path / "run", epochs=1, finished=False)
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n" + '{"kind": "st')
    assert program.main([str(run)]) == 0
    (run / "metrics.jsonl").unlink()
    assert program.main([str(run)]) == 0


def test_report_text_prints_the_first_part_of_the_page(runs, capsys):
    assert program.main([runs[1], "--text"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "two: finished" and lines[1].startswith(
        "Target 75 % top-1 reached in epoch 10 of 12"
    )
    assert "Where the time went:" in lines and any(
        line.startswith("- --seed=1: ") for line in lines
    )
    assert program.main([*runs, "--text"]) == 0
    assert "\n\ntwo: finished\n" in capsys.readouterr().out
    assert not (load.pathlib.Path(runs[0]) / "report").exists()


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda run: shutil.rmtree(run), "is not a directory. Pass the directory of a run."),
        (lambda run: (run / "config.json").write_text("{"), "truncated or not JSON"),
        (lambda run: (run / "metrics.jsonl").write_text("x\n{}\n"), "line 1"),
    ],
)
def test_report_of_a_directory_without_a_run_prints_one_line(tmp_path, capsys, prepare, words):
    run = make_run(tmp_path / "run", epochs=2)
    prepare(run)
    assert program.main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--out=x"],
        ["x", "--text", "--out=y"],
        ["x", "--serve"],
    ],
)
def test_report_with_invalid_arguments_prints_one_line(arguments, capsys):
    assert program.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("count", [3, 30, 31])
def test_confusion_matrix_counts_every_validation_image(tmp_path, capsys, count):
    run = make_run(tmp_path / "run")
    generator = np.random.default_rng(count)
    label, other = generator.integers(0, count, (2, 400)).astype(np.int32)
    predicted = np.where(generator.random(400) < 0.7, label, other)
    worst = np.flatnonzero(label != predicted)[:2]
    np.savez(
        run / "image_results.npz",
        label=label,
        predicted=predicted,
        probability=generator.random(400).astype(np.float32),
        class_names=np.array([f"<c{n}>" for n in range(count)]),
        worst=worst,
        worst_files=np.array(["val/<a>.png", "val/b.png"]),
    )
    loaded = load.load_run(run)
    expected = np.zeros((count, count), int)
    for true, guess in zip(label, predicted, strict=True):
        expected[true, guess] += 1
    np.testing.assert_array_equal(classes.confusion_matrix(loaded.image_results), expected)
    text = page.build([loaded], "t")
    assert Page(text).open == [] and "<c1>" not in text and "val/&lt;a&gt;.png" in text
    cells = re.findall(r'<td style="--part:[\d.]+"(?: class=hit)?>(\d*)</td>', text)
    most = classes.confused_pairs(loaded.image_results)
    assert f"{(label == predicted).sum()} of 400 images right" in text
    if count <= 30:
        assert len(cells) == count * count and sum(int(cell or 0) for cell in cells) == 400
    else:
        assert not cells and len(most) == 20
        assert f">{most[0][2]}</td>" in text
    np.fill_diagonal(expected, 0)
    assert most[0][2] == expected.max()
    assert program.main([str(run), "--text"]) == 0
    printed = capsys.readouterr().out
    true, guess, images = most[0]
    assert (
        f"- {images} image{'s' if images > 1 else ''} of {true} predicted as {guess}\n" in printed
    )
    assert f"- val/b.png: <c{label[worst[1]]}> predicted as <c{predicted[worst[1]]}> (" in printed


def test_confusion_matrix_of_a_class_without_images_shows_no_percentage():
    results = {
        "class_names": np.array(["ant", "bee", "cat"]),
        "label": np.array([0, 0, 1]),
        "predicted": np.array([0, 2, 2]),
    }
    right = re.findall(r"<td class=\"whole\">(.*?)</td>", classes._matrix_table(results))
    assert right == ["50.0 %", "0.0 %", tables.DASH]


def test_load_run_ignores_damaged_image_results(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "image_results.npz").write_bytes(b"PK")
    assert load.load_run(run).image_results is None
    assert "Classes and images" not in page.build([load.load_run(run)], "t")
