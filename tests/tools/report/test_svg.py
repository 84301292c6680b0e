"""Marks, cuts and pointer data of the drawings."""

import json
import re
import xml.etree.ElementTree as ElementTree

import pytest

from hybrid_imagenet.tools.report import figures, load, svg
from hybrid_imagenet.tools.report.svg import Chart, Series
from tests.tools.report.synthetic import make_run


def test_lines_are_cut_where_they_leave_the_chart():
    assert svg.inside([(0, 0), (10, 20), (20, 0)], 0, 10) == [[(0, 0), (5, 10)], [(15, 10), (20, 0)]]
    assert svg.inside([(0, 30), (1, 40)], 0, 10) == []
    assert svg.inside([(0, 2), (1, 3), (2, 4)], 0, 10) == [[(0, 2), (1, 3), (2, 4)]]


def test_runs_have_marks_and_can_be_hidden_by_their_number(tmp_path):
    runs = [load.load(make_run(tmp_path / name)) for name in ("a", "b", "c")]
    chart = figures.curves(runs, "top1", "epoch")
    assert [series.shape for series in chart.series if not series.dashed] == [0, 1, 2]
    drawing = svg.line_chart(chart)
    assert [drawing.count(f'<g data-run="{number}">') for number in range(4)] == [2, 2, 2, 0]
    assert "figcaption" not in drawing  # the page's legend names the runs
    assert "<circle" in drawing and "<polygon" in drawing and "<rect" in drawing


def test_pointer_data_are_the_values_drawn():
    drawing = svg.line_chart(Chart("t", [Series("s", [1, 2, 3], [0.0, 10.0, 100.0], 0)], "x", "y", log_y=True))
    data = json.loads(ElementTree.fromstring(re.search(r"<svg.*</svg>", drawing).group()).get("data-series"))
    assert (data[0]["x"], data[0]["y"]) == ([2, 3], [10, 100])  # a logarithm cannot show 0
    assert data[0]["py"][0] > data[0]["py"][1]


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
    assert svg.Scale(low, high, 0, 1).ticks(count) == pytest.approx(ticks)


def test_logarithmic_ticks():
    assert svg.Scale(0.05, 2000, 0, 1, log=True).ticks() == pytest.approx([0.1, 1, 10, 100, 1000])
    assert svg.Scale(30, 120, 0, 1, log=True).ticks() == pytest.approx([50, 100])
    assert len(svg.Scale(1e-9, 1e9, 0, 1, log=True).ticks(5)) <= 7


def test_scale_maps_ends_and_middle():
    assert [svg.Scale(0, 10, 100, 200)(v) for v in (0, 5, 10, 20)] == [100, 150, 200, 200]
    assert svg.Scale(1, 100, 0, 2, log=True)(10) == pytest.approx(1)
    flat = svg.fitted([3.0, 3.0], 0, 1)
    assert flat.low < 3 < flat.high
    assert svg.fitted([], 0, 1).ticks()
    assert svg.fitted([0.0, -1.0, 5.0], 0, 1, log=True).low > 0
