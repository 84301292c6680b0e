"""Tests the values and axes of charts."""

import json
import re

import pytest

from hybrid_imagenet.commands.report import figures, load, svg
from tests.commands.report.synthetic import make_run


def test_learning_rate_chart_draws_bounds_during_adabound_only(runs):
    chart = figures.learning_rate_chart([load.load_run(runs[1])])
    lengths = {series.name: len(series.xs) for series in chart.series}
    # AdaBound runs for 4 of the 12 epochs, and each epoch has 2 records.
    assert lengths == {"upper bound Bu": 8, "learning rate": 24, "lower bound Bl": 8}
    both = figures.learning_rate_chart(load.load_runs(runs))
    # With several runs, the chart shows their learning rates only.
    assert [(series.name, series.run) for series in both.series] == [("one", 0), ("two", 1)]


def test_metric_chart_draws_a_run_without_an_epoch_from_its_steps(runs, tmp_path):
    path = make_run(tmp_path / "early", epochs=1, finished=False)
    first = (path / "metrics.jsonl").read_text().splitlines()[0]
    diverged = {"kind": "diverged", "step": 9, "seconds": 3.0, "train_loss": None}
    (path / "metrics.jsonl").write_text(f"{first}\n{json.dumps(diverged)}\n")
    none = tmp_path / "none"
    none.mkdir()
    (none / "config.json").write_text((path / "config.json").read_text())
    loaded = load.load_runs([*runs, str(path), str(none)])
    assert loaded[2].epochs == [] and loaded[2].state == "diverged"
    for by in ("epoch", "step", "hours"):
        for metric in ("top1", "loss"):
            chart = figures.metric_chart(loaded, metric, by)
            assert {series.run for series in chart.series} == {0, 1, 2}
            (early,) = [series for series in chart.series if series.run == 2]
            assert len(early.xs) == 1 and early.dashed
            assert chart.limits == figures.metric_chart(loaded[:2], metric, by).limits
    validation, training, *_ = figures.metric_chart(loaded, "loss", "step").series
    assert validation.xs[:2] == [31, 62]
    assert training.xs[:2] == [16, 31]


def test_metric_chart_limits_the_axis_of_accuracy_to_later_values_and_targets(tmp_path):
    run = load.load_run(make_run(tmp_path / "run", epochs=12, target_top1=[0.83]))
    chart = figures.metric_chart([run], "top1", "epoch")
    low, high = chart.limits
    later = [
        100 * r[key] for r in run.epochs if r["epoch"] > 4 for key in ("val_top1", "train_top1")
    ]
    assert 0.9 * min(later) < low < min(later)
    assert chart.levels == [("target 83 %", 83.0)]
    assert max(*later, 83.0) < high <= 100
    assert "target 83 %" in svg.line_chart(chart)


def test_metric_chart_ignores_failed_runs_in_the_limits_of_axes(tmp_path):
    good = load.load_run(make_run(tmp_path / "good"))
    failed = load.load_run(make_run(tmp_path / "failed"))
    for number, record in enumerate(failed.epochs):
        record.update(val_top1=0.1, train_top1=0.1, val_loss=10.0**number, train_loss=10.0**number)
    for metric in ("top1", "loss"):
        alone = figures.metric_chart([good], metric, "epoch")
        both = figures.metric_chart([good, failed], metric, "epoch")
        assert both.limits == alone.limits
        drawing = svg.line_chart(both)
        heights = [
            float(p.split(",")[1])
            for line in re.findall(r'points="([^"]*)" class="line', drawing)
            for p in line.split()
        ]
        assert min(heights) >= 10 and max(heights) <= svg.HEIGHT - 44


@pytest.mark.parametrize("has_single_gpu_speed", [True, False])
def test_seconds_by_cause_add_up_to_the_time_of_the_run(tmp_path, has_single_gpu_speed):
    # This also holds if the throughput of one GPU is unknown, as in all runs without a summary.
    run = load.load_run(make_run(tmp_path / "run", finished=has_single_gpu_speed))
    assert (run.summary["single_gpu_images_per_second"] is not None) == has_single_gpu_speed
    ((_, parts),) = figures.seconds_by_cause([run])
    assert sum(parts.values()) == pytest.approx(run.summary["wall_seconds"])
