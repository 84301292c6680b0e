import dataclasses
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from hybrid_imagenet.tools.report import command as program
from hybrid_imagenet.tools.report import figures, load, page, scales, svg, tables
from tests.support import fresh
from tests.tools.report.synthetic import make_run


@pytest.fixture
def runs(tmp_path):
    make_run(tmp_path / "one", world_size=1, recipe="goyal", finished=False, epochs=9, full=False)
    make_run(tmp_path / "two", world_size=2)
    return [str(tmp_path / "one"), str(tmp_path / "two")]


class Page(HTMLParser):
    """Collects the tags with their attributes, and checks that they nest."""

    VOID = ("meta", "link", "br", "line", "rect", "circle", "polyline")

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_needs_nothing_from_elsewhere(runs):
    text = page.build(load.load_all(runs), "Title & <more>")
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


def test_every_chart_is_well_formed_and_stays_inside_its_frame(runs):
    text = page.build(load.load_all(runs), "t")
    drawings = re.findall(r"<svg.*?</svg>", text, re.S)
    assert len(drawings) >= 12
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


def test_report_on_several_runs_writes_page_and_plots(runs, tmp_path, capsys):
    out = tmp_path / "out"
    assert program.main([*runs, f"--out={out}", "--title=Two runs"]) == 0
    names = {path.name for path in out.iterdir()}
    expected = {"index.html", "top1_by_epoch.png", "loss_by_time.png", "learning_rate_2.png", "run_time.png"}
    expected |= {"throughput_by_gpus.png", "efficiency_by_gpus.png", "iops.png", "step_time.png", "trust_ratios_2.png"}
    assert expected <= names
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names if name.endswith(".png"))
    assert capsys.readouterr().out.splitlines()[0] == str(out / "index.html")


def test_one_run_goes_into_its_own_directory(runs):
    assert program.main(runs[:1]) == 0
    text = (load.pathlib.Path(runs[0]) / "report" / "index.html").read_text()
    assert "one (not finished)" in text
    assert "No trust ratios in these records." in text
    assert "No bytes read and reads in these records." in text


def test_without_matplotlib_the_page_is_written_all_the_same(runs, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert program.main(runs[:1]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1
    assert "pip install matplotlib" in captured.err


def test_series_by_epoch_and_by_hours_pass_over_missing_values(runs):
    run = load.load(runs[1])
    run.epochs[2].pop("val_top1")
    run.epochs[3]["val_top1"] = None
    epochs, values = run.series("val_top1")
    hours, _ = run.series("val_top1", by="hours")
    assert epochs == [1, 2, 5, 6, 7, 8, 9, 10, 11, 12]
    assert values[0] == run.epochs[0]["val_top1"]
    assert hours[-1] == pytest.approx(run.epochs[-1]["seconds"] / 3600)
    assert run.series("train_loss", steps=True)[0][:3] == [0.5, 1.0, 1.5]


def test_time_axis_has_a_unit_that_fits(runs):
    run = load.load(runs[1])
    labels = []
    for factor in (1, 10, 1000):
        for record in run.epochs:
            record["seconds"] = record["epoch"] * 5.0 * factor
        labels.append(figures.curves([run], "top1", "hours").x_label)
    assert labels == ["seconds since the start", "minutes since the start", "hours since the start"]


def test_bounds_are_drawn_only_while_they_hold(runs):
    chart = figures.learning_rate(load.load(runs[1]), 1)
    lengths = {series.name: len(series.xs) for series in chart.series}
    assert lengths == {"upper bound Bu": 8, "learning rate": 24, "lower bound Bl": 8}  # 4 of 12 epochs, 2 records each


def test_relative_steps_stand_beside_the_tuned_one_at_the_batch(runs):
    chart = figures.relative_steps(load.load_all(runs))
    names = ["one", "two", "tuned LARS, peak, batch 32", "tuned LARS, peak, batch 64"]
    assert [series.name for series in chart.series] == names
    own, tuned = chart.series[1], chart.series[3]
    assert (list(own.xs), own.ys[0]) == (list(range(5, 13)), pytest.approx(0.02 * 0.2))  # after the warmup
    assert (list(tuned.xs), tuned.dashed) == (list(range(5, 13)), True)
    assert tuned.ys == pytest.approx([0.105 * (64 / 3264) ** 0.5] * 8)
    for run in (loaded := load.load_all(runs)):
        for record in run.epochs:
            record.pop("relative_step", None)
    assert figures.relative_steps(loaded) is None


def test_input_is_drawn_beside_the_means_of_epochs_10_to_60(tmp_path):
    make_run(tmp_path / "long", epochs=70)
    make_run(tmp_path / "short", epochs=9)
    bandwidth, operations = figures.input_output([load.load(tmp_path / "long")])
    assert "application reads" in bandwidth.title and "application reads" in operations.title
    for chart, mean in ((bandwidth, 3.30), (operations, 36500)):
        dashed = chart.series[-1]
        assert (list(dashed.xs), list(dashed.ys), dashed.dashed) == ([10, 60], [mean, mean], True)
    (own,) = figures.input_output([load.load(tmp_path / "short")])[0].series
    assert own.xs[-1] == 9


def test_efficiency_by_gpus_is_relative_to_the_smallest(runs):
    throughput, efficiency = figures.scaling(load.load_all(runs))
    assert throughput.series[0].xs == [1, 2]
    assert efficiency.series[0].ys == pytest.approx([100, 100 * 2**-0.1])
    assert figures.scaling(load.load_all(runs[:1])) == []


def test_runs_that_do_other_work_are_not_compared_by_gpus(tmp_path):
    for number, (size, batch) in enumerate([(1, 16), (2, 32), (4, 32), (8, 64)]):
        make_run(tmp_path / str(number), world_size=size, per_gpu_batch=batch, epochs=2)
    loaded = load.load_all([str(tmp_path / str(number)) for number in range(4)])
    assert [run.name for run in figures.comparable(loaded)] == ["1", "2"]
    assert figures.scaling(loaded)[0].series[0].xs == [2, 4]
    assert figures.scaling([loaded[0], loaded[3]]) == []


def test_learning_rate_comes_from_the_records_that_have_more(runs):
    run = load.load(runs[1])
    del run.steps[3:]
    (rate,) = [s for s in figures.learning_rate(run, 1).series if s.name == "learning rate"]
    assert len(rate.xs) == 12


def test_step_time_adds_up(runs):
    run = load.load(runs[1])
    ((_, parts),) = figures.step_time([run])
    total = 1e3 * run.steps[-1]["step_seconds"]
    assert sum(parts.values()) == pytest.approx(total)
    assert parts["input"] == pytest.approx(0.04 * total)
    assert parts["exposed communication"] == pytest.approx(20)


def test_criteria_table_shows_runs_and_papers(runs):
    text = tables.criteria(load.load_all(runs))
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text)]
    two = next(row for row in rows if row[0] == "two")
    assert two[1:6] == ["top-1 75.00 %", "2", "64", "10", "0.1000"]
    h = next(row for row in rows if row[0] == "Lu et al., Table 3.8: cluster 1, to 75 % top-1")
    assert h[4:10] == ["32", "0.0312", "18 min 00 s", "36,082", "97.50 %", "7 h 12 min"]


def test_overview_tells_which_images_were_validated(runs):
    loaded = load.load_all(runs)
    changed = dataclasses.replace(loaded[1], summary=loaded[1].summary | {"val_split": "tuning"})
    assert "tuning images" in tables.overview([changed])
    assert "tuning images" not in tables.overview(loaded)


def test_overview_tells_what_was_dropped(runs):
    run = load.load(runs[0])
    run.summary.update({"images_dropped": None, "val_dropped": None})
    told = load.load(runs[0])
    told.summary.update({"images_dropped": 8, "val_dropped": 3})
    head, *rows = (
        re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        for row in re.findall(r"<tr>(.*?)</tr>", tables.overview([run, told]))
    )
    assert head[-1] == "images dropped"
    assert [row[-1] for row in rows] == [tables.DASH, "8 + 3 in validation"]


def test_differences_between_runs(runs):
    assert load.differences(load.load_all(runs)) == [("recipe", ["goyal", "hybrid"])]
    assert "goyal" in tables.flag_differences(load.load_all(runs))
    assert "All flags are the same" in tables.flag_differences([load.load(runs[0])] * 2)


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    for parent in "ab":
        make_run(tmp_path / parent / "run", epochs=2)
    assert [run.name for run in load.load_all([str(tmp_path / p / "run") for p in "ab"])] == ["a/run", "b/run"]


def test_text_from_a_run_cannot_become_markup(tmp_path):
    make_run(tmp_path / "<b>run", epochs=2, note="<script>alert(1)</script>", dataset="<i>x</i>")
    text = page.build([load.load(tmp_path / "<b>run")], "t")
    for tag in ("<b>", "<i>x", "<script>alert"):
        assert tag not in text


def test_control_characters_of_a_run_are_shown_not_obeyed(tmp_path):
    make_run(tmp_path / "run\x1b[31m", epochs=2, note="a\x1b]0;x\x07\ud800", dataset="b\x9b2J")
    text = page.build([load.load(tmp_path / "run\x1b[31m")], "title\x1b[0m")
    assert not [c for c in text if not c.isprintable() and c not in "\n\t\xa0"]
    for shown in (r"run\x1b[31m", r"title\x1b[0m", r"b\x9b2J"):
        assert shown in text
    text.encode()


def test_run_on_imagenet_is_set_beside_the_reference(tmp_path):
    make_run(tmp_path / "run", epochs=12, dataset="imagenet2012", per_gpu_batch=1024)
    text = page.build([load.load(tmp_path / "run")], "t")
    assert "needs 35.0 epochs" in text or "needs 35.1 epochs" in text
    assert "not comparable" not in text


def test_run_that_has_just_begun(tmp_path):
    run = make_run(tmp_path / "run", epochs=1, finished=False)
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    (run / "metrics.jsonl").write_text(first + "\n" + '{"kind": "st')
    assert program.main([str(run)]) == 0


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda run: shutil.rmtree(run), "no such directory"),
        (lambda run: (run / "config.json").unlink(), "config.json"),
        (lambda run: (run / "config.json").write_text("{"), "not JSON"),
        (lambda run: (run / "config.json").write_text("[]"), "not a JSON object"),
        (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "no record yet"),
        (lambda run: (run / "metrics.jsonl").write_text("x\n{}\n"), "line 1"),
    ],
)
def test_directory_without_a_run_is_one_line(tmp_path, capsys, prepare, words):
    run = make_run(tmp_path / "run", epochs=2)
    prepare(run)
    assert program.main([str(run)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize("arguments", [["--out"], ["--out=", "x"], ["--color=red", "x"], ["--out=x"]])
def test_wrong_arguments_are_one_line(arguments, capsys):
    assert program.main(arguments) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_unwritable_target_is_one_line(runs, capsys):
    assert program.main([*runs, "--out=/proc/report"]) == 2
    assert capsys.readouterr().err.startswith("error: --out=/proc/report: ")


def test_starts_without_tensorflow(runs):
    codes, loaded, _ = fresh.run(("hybrid_imagenet.tools.report.command", [runs[0]]))
    assert codes == [0]
    assert not loaded & fresh.FRAMEWORKS


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 90, 6, [0, 20, 40, 60, 80]),
        (0.45, 0.78, 5, [0.5, 0.6, 0.7]),
        (-3, 3, 3, [-2, 0, 2]),
    ],
)
def test_linear_ticks(low, high, count, ticks):
    assert scales.Scale(low, high, 0, 1).ticks(count) == pytest.approx(ticks)


def test_logarithmic_ticks():
    assert scales.Scale(0.05, 2000, 0, 1, log=True).ticks() == pytest.approx([0.1, 1, 10, 100, 1000])
    assert scales.Scale(30, 120, 0, 1, log=True).ticks() == pytest.approx([50, 100])
    assert len(scales.Scale(1e-9, 1e9, 0, 1, log=True).ticks(5)) <= 7


def test_scale_maps_ends_and_middle():
    assert [scales.Scale(0, 10, 100, 200)(v) for v in (0, 5, 10, 20)] == [100, 150, 200, 200]
    assert scales.Scale(1, 100, 0, 2, log=True)(10) == pytest.approx(1)
    flat = scales.fit([3.0, 3.0], 0, 1)
    assert flat.low < 3 < flat.high
    assert scales.fit([], 0, 1).ticks()
    assert scales.fit([0.0, -1.0, 5.0], 0, 1, log=True).low > 0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (2e-5, "2e-5"), (3e6, "3e6"), (12, "12")]
)
def test_tick_labels(value, text):
    assert scales.label(value) == text


def test_pointer_data_are_the_values_drawn():
    drawing = svg.line_chart("t", [svg.Series("s", [1, 2, 3], [0.0, 10.0, 100.0], 0)], "x", "y", log_y=True)
    data = json.loads(ElementTree.fromstring(re.search(r"<svg.*</svg>", drawing).group()).get("data-series"))
    assert (data[0]["x"], data[0]["y"]) == ([2, 3], [10, 100])  # a logarithm cannot show 0
    assert data[0]["py"][0] > data[0]["py"][1]
