"""Tests marks, clipping and pointer data of the drawings."""

import json
import re
import xml.etree.ElementTree as ElementTree

from hybrid_imagenet.commands.report import figures, load, svg
from hybrid_imagenet.commands.report.svg import Chart, Series
from tests.commands.report.synthetic import make_run


def test_clip_polyline_cuts_lines_where_they_leave_the_chart():
    assert svg.clip_polyline([(0, 0), (10, 20), (20, 0)], 0, 10) == [
        [(0, 0), (5, 10)],
        [(15, 10), (20, 0)],
    ]
    assert svg.clip_polyline([(0, 30), (1, 40)], 0, 10) == []
    assert svg.clip_polyline([(0, 2), (1, 3), (2, 4)], 0, 10) == [[(0, 2), (1, 3), (2, 4)]]


def test_line_chart_has_marks_and_groups_for_each_run(tmp_path):
    runs = [load.load_run(make_run(tmp_path / name)) for name in ("a", "b", "c")]
    chart = figures.metric_chart(runs, "top1", "epoch")
    assert [series.shape for series in chart.series if not series.dashed] == [0, 1, 2]
    drawing = svg.line_chart(chart)
    assert [drawing.count(f'<g data-run="{number}">') for number in range(4)] == [2, 2, 2, 0]
    # The legend of the page names the runs.
    assert "figcaption" not in drawing
    assert "<circle" in drawing and "<polygon" in drawing and "<rect" in drawing


def test_line_chart_has_the_drawn_values_as_pointer_data():
    drawing = svg.line_chart(
        Chart("t", [Series("s", [1, 2, 3], [0.0, 10.0, 100.0], 0)], "x", "y", log_y=True)
    )
    data = json.loads(
        ElementTree.fromstring(re.search(r"<svg.*</svg>", drawing).group()).get("data-series")
    )
    # A logarithmic axis cannot show 0.
    assert (data[0]["x"], data[0]["y"]) == ([2, 3], [10, 100])
    assert data[0]["py"][0] > data[0]["py"][1]
