"""Tests the site in a real browser. `.ci/run` installs what it needs: mkdocs and Chromium."""

import functools
import http.server
import importlib.util
import pathlib
import subprocess
import sys
import threading

import pytest

from tests.support.browser import browser, needs_chromium

ROOT = pathlib.Path(__file__).parents[1]

pytestmark = [
    needs_chromium,
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs (pip install '.[docs]')"
    ),
]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Prints nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Builds the site; returns its folder."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


@pytest.fixture(scope="module")
def opened(site, tmp_path_factory):
    """Serves the site; yields a browser, and the address of the site."""
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with browser(tmp_path_factory.mktemp("profile")) as started:
            yield started, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def findings(opened, site):
    """Opens every page in a wide and in a narrow window.

    Returns a dictionary by page: the problems in the console, the pictures that are not shown, the
    number of pictures, and the width that the page needs in a window of 420 pixels.
    """
    started, address = opened
    found = {}
    for path in sorted(site.rglob("index.html")):
        page = path.parent.relative_to(site).as_posix()
        if page == "example-report":
            # It is not a page of the site; the tests of the report open such a page.
            continue
        started.open(f"{address}/{page}/")
        pictures = started.evaluate("[...document.images].map(image => image.naturalWidth)")
        problems = list(started.problems)
        started.resize(420)
        found[page] = {
            "problems": problems,
            "missing pictures": pictures.count(0),
            "pictures": len(pictures),
            "width": started.evaluate("document.documentElement.scrollWidth"),
        }
    return found


def test_every_page_opens_without_a_problem_in_the_console(findings):
    assert len(findings) > 40
    assert {page: found["problems"] for page, found in findings.items() if found["problems"]} == {}


def test_pictures_of_every_page_are_shown(findings):
    assert sum(found["pictures"] for found in findings.values()) > 5
    assert [page for page, found in findings.items() if found["missing pictures"]] == []


def test_every_page_in_a_window_of_420_pixels_does_not_scroll_sideways(findings):
    assert {page: found["width"] for page, found in findings.items() if found["width"] > 420} == {}


@pytest.mark.parametrize(("scheme", "name"), [("light", "default"), ("dark", "slate")])
def test_theme_of_the_first_visit_follows_the_system(opened, scheme, name):
    started, address = opened
    # The site remembers the theme of a visitor, and a page that is open stores it again.
    started.open("about:blank")
    started.send("Storage.clearDataForOrigin", origin=address, storageTypes="all")
    started.open(f"{address}/", scheme=scheme)
    # A script applies the theme after the page is loaded.
    assert started.wait_for(f"document.body.dataset.mdColorScheme === '{name}'")


def test_search_of_the_site_finds_a_page(opened):
    started, address = opened
    started.open(address + "/")
    started.evaluate(
        "(() => { const field = document.querySelector('.md-search__input'); field.focus();"
        " field.value = 'watchdog'; field.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )
    found = started.wait_for("document.querySelectorAll('.md-search-result__link').length")
    assert found > 0
    assert started.problems == []


def test_page_of_the_site_can_be_printed(opened):
    started, address = opened
    started.open(address + "/runs/")
    assert started.pdf().startswith(b"%PDF")
