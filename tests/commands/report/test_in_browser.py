"""Tests the page of the report in a real browser: charts, legend, theme, narrow windows, print."""

import pytest

from hybrid_imagenet.commands.report import report_command
from tests.commands.report.synthetic import make_run
from tests.support.browser import browser, needs_chromium

ROOT_STYLE = "getComputedStyle(document.body)"
# The lightness of a color such as rgb(232, 234, 237), from 0 to 255.
LIGHTNESS = "(color => color.match(/\\d+/g).slice(0, 3).reduce((a, b) => a + +b, 0) / 3)"
BACKGROUND = f"{LIGHTNESS}({ROOT_STYLE}.backgroundColor)"
TEXT = f"{LIGHTNESS}({ROOT_STYLE}.color)"
# Whether each line of a run is visible, by the number of the run.
VISIBLE_LINES = """[0, 1].map(run => [...document.querySelectorAll(`[data-run="${run}"]`)]
    .every(line => getComputedStyle(line).display !== "none"))"""

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Writes a report on two runs; yields a browser, and the address of the page."""
    folder = tmp_path_factory.mktemp("report")
    make_run(folder / "one", epochs=9, full=False, finished=False)
    make_run(folder / "two", world_size=4)
    report_command.main([str(folder / "one"), str(folder / "two"), f"--out={folder / 'out'}"])
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened, (folder / "out" / "index.html").as_uri()


def test_report_draws_its_charts_without_a_problem_in_the_console(page):
    opened, address = page
    opened.open(address)
    assert opened.problems == []
    sizes = opened.evaluate(
        "[...document.querySelectorAll('svg.chart')].map(chart =>"
        " [...chart.querySelectorAll('.line')].map(line => line.getBoundingClientRect().width))"
    )
    assert len(sizes) > 5
    # Each chart has a line that spans a good part of it.
    assert min(max(widths, default=0) for widths in sizes) > 150, sizes


def test_report_legend_hides_and_shows_the_lines_of_a_run(page):
    opened, address = page
    opened.open(address)
    assert opened.evaluate(VISIBLE_LINES) == [True, True]
    opened.click('[data-hides="0"]')
    assert opened.evaluate(VISIBLE_LINES) == [False, True]
    opened.click('[data-hides="0"]')
    assert opened.evaluate(VISIBLE_LINES) == [True, True]


def test_report_pointer_on_a_chart_shows_its_values(page):
    opened, address = page
    opened.open(address)
    opened.move("svg.chart")
    text = opened.evaluate("document.querySelector('.tip').innerText")
    assert " at " in text
    assert opened.evaluate("document.querySelector('.tip').hidden") is False
    assert opened.problems == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_theme_follows_the_system_until_the_button_switches_it(page, scheme):
    opened, address = page
    opened.open(address, scheme=scheme)
    before = opened.evaluate(BACKGROUND)
    assert (before > 200) == (scheme == "light")
    opened.click("#theme")
    assert (opened.evaluate(BACKGROUND) > 200) != (scheme == "light")
    assert abs(opened.evaluate(BACKGROUND) - opened.evaluate(TEXT)) > 150


def test_report_in_a_window_of_420_pixels_does_not_scroll_sideways(page):
    opened, address = page
    opened.open(address, width=420)
    assert opened.evaluate("document.documentElement.scrollWidth") == 420
    # Labels of axes keep a readable size: the drawing is scaled, its text is not smaller than 8 px.
    smallest = opened.evaluate(
        "Math.min(...[...document.querySelectorAll('svg.chart text')].map(text =>"
        " text.getBoundingClientRect().height))"
    )
    assert smallest > 8


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_in_print_has_dark_text_and_its_legend(page, scheme):
    # Browsers do not print backgrounds, so light text would be invisible.
    opened, address = page
    opened.open(address, scheme=scheme)
    opened.click("#theme")
    opened.emulate(media="print", scheme=scheme)
    assert opened.evaluate(TEXT) < 60
    shown = "(selector => getComputedStyle(document.querySelector(selector)).display)"
    assert opened.evaluate(f"{shown}('[data-hides]')") != "none"
    assert opened.evaluate(f"{shown}('#theme')") == "none"
    assert opened.pdf().startswith(b"%PDF")
