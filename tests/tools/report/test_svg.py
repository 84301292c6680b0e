"""Marks, cuts and pointer data of the drawings."""

import json
import re
import xml.etree.ElementTree as ElementTree

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


def test_heat_map_has_a_color_bar_with_its_ends_and_keeps_both_ends_of_long_names():
    rows = [("stage2_block1_a_long_name_of_a_convolution", [0.01, None]), ("b", [200.0, 1.0])]
    drawing = svg.heat_map("t", rows, [1, 2], "epoch", "trust ratio")
    assert "trust ratio, logarithmic" in drawing
    ticks = re.findall(r'<span style="left:([0-9.]+)%">([^<]*)</span>', drawing)
    assert ("0.0", "0.01") in ticks and ("100.0", "200") in ticks
    assert re.search("stage2_block1…\\w+convolution", drawing)
    opacities = dict(re.findall(r'fill-opacity="([0-9.]+)"><title>(.*?), epoch', drawing))
    assert opacities == {"0.06": rows[0][0], "1.00": "b"} | {k: "b" for k in opacities if 0.06 < float(k) < 1}


def test_pointer_data_are_the_values_drawn():
    drawing = svg.line_chart(Chart("t", [Series("s", [1, 2, 3], [0.0, 10.0, 100.0], 0)], "x", "y", log_y=True))
    data = json.loads(ElementTree.fromstring(re.search(r"<svg.*</svg>", drawing).group()).get("data-series"))
    assert (data[0]["x"], data[0]["y"]) == ([2, 3], [10, 100])  # a logarithm cannot show 0
    assert data[0]["py"][0] > data[0]["py"][1]
