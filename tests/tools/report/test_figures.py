"""The values and axes of charts."""

import json
import re

import pytest

from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.tools.report import figures, load, svg
from tests.tools.report.synthetic import make_run


def test_bounds_are_drawn_only_while_they_hold(runs):
    chart = figures.learning_rates([load.load(runs[1])])
    lengths = {series.name: len(series.xs) for series in chart.series}
    assert lengths == {
        "upper bound Bu": 8,
        "learning rate": 24,
        "lower bound Bl": 8,
    }  # 4 of 12 epochs, 2 records each
    both = figures.learning_rates(load.load_all(runs))
    assert [(series.name, series.run) for series in both.series] == [
        ("one", 0),
        ("two", 1),
    ]  # one chart of all runs


def test_a_run_without_an_epoch_is_drawn_by_step_beside_others(runs, tmp_path):
    path = make_run(tmp_path / "early", epochs=1, finished=False)
    first = (path / "metrics.jsonl").read_text().splitlines()[0]
    diverged = {"kind": "diverged", "step": 9, "seconds": 3.0, "train_loss": None}
    (path / "metrics.jsonl").write_text(f"{first}\n{json.dumps(diverged)}\n")
    (none := tmp_path / "none").mkdir()
    (none / "config.json").write_text((path / "config.json").read_text())
    loaded = load.load_all([*runs, str(path), str(none)])
    assert loaded[2].epochs == [] and loaded[2].state == "diverged"
    for by in ("epoch", "step", "hours"):
        for what in ("top1", "loss"):
            chart = figures.curves(loaded, what, by)
            assert {series.run for series in chart.series} == {0, 1, 2}
            (early,) = [series for series in chart.series if series.run == 2]
            assert len(early.xs) == 1 and early.dashed
            assert chart.limits == figures.curves(loaded[:2], what, by).limits
    by_step = figures.curves(loaded, "loss", "step").series
    assert by_step[0].xs[:2] == [31, 62] and by_step[1].xs[:2] == [
        16,
        31,
    ]  # validation; training within an epoch


def test_relative_steps_stand_beside_the_tuned_one_at_the_batch(runs):
    chart = figures.relative_steps(load.load_all(runs))
    names = ["one", "two", "tuned LARS, peak, batch 32", "tuned LARS, peak, batch 64"]
    assert [series.name for series in chart.series] == names
    own, tuned = chart.series[1], chart.series[3]
    assert (list(own.xs), own.ys[0]) == (
        list(range(5, 13)),
        pytest.approx(0.02 * 0.2),
    )  # after the warmup
    assert (list(tuned.xs), tuned.dashed) == (list(range(5, 13)), True)
    assert tuned.ys == pytest.approx([mlperf.tuned_step(64)] * 8)
    for run in (loaded := load.load_all(runs)):
        for record in run.epochs:
            record.pop("relative_step", None)
    assert figures.relative_steps(loaded) is None


def test_the_axis_of_accuracy_shows_the_later_part_and_the_target(tmp_path):
    run = load.load(make_run(tmp_path / "run", epochs=12, target_top1=[0.83]))
    chart = figures.curves([run], "top1", "epoch")
    low, high = chart.limits
    later = [
        100 * r[key] for r in run.epochs if r["epoch"] > 4 for key in ("val_top1", "train_top1")
    ]
    assert 0.9 * min(later) < low < min(later)
    assert chart.levels == [("target 83 %", 83.0)]
    assert max(*later, 83.0) < high <= 100
    assert "target 83 %" in svg.line_chart(chart)


def test_a_diverged_or_failed_run_does_not_stretch_the_axes_of_the_others(tmp_path):
    good = load.load(make_run(tmp_path / "good"))
    failed = load.load(make_run(tmp_path / "failed"))
    for number, record in enumerate(failed.epochs):
        record.update(val_top1=0.1, train_top1=0.1, val_loss=10.0**number, train_loss=10.0**number)
    for what in ("top1", "loss"):
        alone, both = (figures.curves(runs, what, "epoch") for runs in ([good], [good, failed]))
        assert both.limits == alone.limits
        drawing = svg.line_chart(both)
        heights = [
            float(p.split(",")[1])
            for line in re.findall(r'points="([^"]*)" class="line', drawing)
            for p in line.split()
        ]
        assert min(heights) >= 10 and max(heights) <= svg.HEIGHT - 44


@pytest.mark.parametrize("known", [True, False])
def test_the_bar_of_a_run_is_as_long_as_the_run(tmp_path, known):
    """Also where the throughput of one GPU alone is not known, which a run without a summary never
    knows.
    """
    run = load.load(make_run(tmp_path / "run", finished=known))
    assert (run.summary["single_gpu_images_per_second"] is not None) == known
    ((_, parts),) = figures.run_time([run])
    assert sum(parts.values()) == pytest.approx(run.summary["wall_seconds"])
