"""The page in a real browser, where one is installed: light and dark, on a phone and on a desk, and live."""

import json
import re
import shutil
import subprocess
import threading

import pytest

from hybrid_imagenet.tools.report import load, page, serve, svg
from tests.tools.report.synthetic import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--hide-scrollbars"]  # fmt: skip
PROBE = """<script>addEventListener("load", () => {
  const chart = document.querySelector("svg.chart"), box = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 50, clientY: box.top + 50}));
  const card = () => getComputedStyle(document.querySelector("figure")).backgroundColor;
  const before = card();
  document.getElementById("theme").click();
  const drawings = [...document.querySelectorAll("figure > svg")];
  const text = (what) => [...document.querySelectorAll(what)].map((e) => e.getBoundingClientRect().height);
  console.log("PROBE" + JSON.stringify({width: innerWidth, needed: document.documentElement.scrollWidth,
    drawn: drawings.filter((s) => s.getBoundingClientRect().height > 50).length, plots: drawings.length,
    tip: document.querySelector(".tip").innerText, card: before, after: card(),
    cells: Math.min(...text("td:not(.none)").filter((h) => h))}));
});</script></body>"""
WIDTHS = (320, 400, 800, 1280)
NEEDED = pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")


def browse(profile, *arguments):
    """The output of a browser, and what it wrote on its console."""
    command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return result.stdout, [line for line in result.stderr.splitlines() if "CONSOLE" in line]


def rgb(color):
    return "rgb({}, {}, {})".format(*(int(color[at : at + 2], 16) for at in (1, 3, 5)))


@NEEDED
@pytest.mark.parametrize(("theme", "number"), [("light", 1), ("dark", 0)])
def test_page_in_a_browser(tmp_path, theme, number):
    make_run(tmp_path / "one", world_size=1, full=False, epochs=3)
    make_run(tmp_path / "two", world_size=2)
    text = page.build(load.load_all([str(tmp_path / "one"), str(tmp_path / "two")]), "t")
    (tmp_path / "page.html").write_text(text.replace("</body>", PROBE))
    frames = "".join(f'<iframe src="page.html" style="width:{width}px;height:400px"></iframe>' for width in WIDTHS)
    (tmp_path / "frames.html").write_text(frames)
    shot = f"--screenshot={tmp_path / 'page.png'}"
    where = f"file://{tmp_path / 'frames.html'}"
    wanted = f"--blink-settings=preferredColorScheme={number}"
    _, messages = browse(tmp_path / "profile", wanted, "--window-size=1400,900", shot, where)
    found = [json.loads(re.search(r"PROBE(\{.*\})", line).group(1).replace('\\"', '"')) for line in messages]
    assert sorted(probe["width"] for probe in found) == list(WIDTHS)  # and no other message
    other = svg.CARDS["dark" if theme == "light" else "light"]
    for probe in found:
        assert probe["needed"] == probe["width"]
        assert probe["drawn"] == probe["plots"] > 10
        assert "two: " in probe["tip"]
        assert (probe["card"], probe["after"]) == (rgb(svg.CARDS[theme]), rgb(other))
        assert probe["cells"] >= 14  # a line of text, in pixels


@NEEDED
def test_the_live_page_takes_over_what_is_new(tmp_path):
    run = make_run(tmp_path / "run", epochs=3, finished=False)
    asked = threading.Event()

    def build():
        text = page.build([load.load(run)], "t")
        if not asked.is_set():  # the run goes on as soon as the page was asked for
            asked.set()
            record = load.load(run).epochs[-1] | {"epoch": 4, "val_top1": 0.777}
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            assert "77.70 %" not in text
        return text

    with serve.server(serve.Live([str(run)], build), 0) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        address = f"http://{serve.ADDRESS}:{server.server_port}/"
        document, messages = browse(tmp_path / "profile", "--virtual-time-budget=20000", "--dump-dom", address)
        server.shutdown()
    assert asked.is_set()
    assert "77.70 %" in document
    assert messages == []
