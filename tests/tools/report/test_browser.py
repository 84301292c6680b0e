"""The page in a real browser, where one is installed: no console message, and no sideways scrolling on a phone."""

import json
import re
import shutil
import subprocess

import pytest

from hybrid_imagenet.tools.report import load, page
from tests.tools.report.synthetic import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--hide-scrollbars"]  # fmt: skip
PROBE = """<script>addEventListener("load", () => {
  const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 50, clientY: box.top + 50}));
  document.getElementById("theme").click();
  const drawn = [...document.querySelectorAll("svg")].filter((s) => s.getBoundingClientRect().height > 50).length;
  console.log("PROBE" + JSON.stringify({width: innerWidth, needed: document.documentElement.scrollWidth, drawn,
    plots: document.querySelectorAll("svg").length, tip: document.querySelector(".tip").innerText}));
});</script></body>"""
WIDTHS = (320, 400, 800, 1280)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_page_in_a_browser(tmp_path):
    make_run(tmp_path / "one", world_size=1, full=False, epochs=3)
    make_run(tmp_path / "two", world_size=2)
    text = page.build(load.load_all([str(tmp_path / "one"), str(tmp_path / "two")]), "t")
    (tmp_path / "page.html").write_text(text.replace("</body>", PROBE))
    frames = "".join(f'<iframe src="page.html" style="width:{width}px;height:400px"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(frames)
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900",
               f"--screenshot={tmp_path / 'page.png'}", f"file://{tmp_path / 'frames.html'}"]  # fmt: skip
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    messages = [line for line in result.stderr.splitlines() if "CONSOLE" in line]
    found = [json.loads(re.search(r"PROBE(\{.*\})", line).group(1).replace('\\"', '"')) for line in messages]
    assert sorted(probe["width"] for probe in found) == list(WIDTHS)
    for probe in found:
        assert probe["needed"] == probe["width"]
        assert probe["drawn"] == probe["plots"] > 10
        assert "two: " in probe["tip"]
