"""Tests the nightly check of links to other sites, without the network."""

import importlib.util
import urllib.error
import urllib.request

import pytest

from tests.launch.shell import ROOT


@pytest.fixture(scope="module")
def check_links():
    spec = importlib.util.spec_from_file_location("check_links", ROOT / ".ci" / "check_links.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_external_links_in_code_blocks_and_to_files_are_ignored(check_links):
    text = "[a](https://a.org/x) [b](b.md)\n```\n[c](https://c.org)\n```\n[d](http://d.org#e)\n"
    assert check_links.external_links(text) == ["https://a.org/x", "http://d.org#e"]


@pytest.mark.parametrize(
    ("error", "is_gone"),
    [
        (urllib.error.HTTPError("", 404, "", None, None), True),
        (urllib.error.HTTPError("", 403, "", None, None), False),
        (urllib.error.URLError("no route to host"), False),
    ],
)
def test_problem_of_an_address_is_an_error_only_if_the_page_is_gone(
    check_links, monkeypatch, error, is_gone
):
    def fail(request, timeout):
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    result, text = check_links.problem_of("https://en.wikipedia.org/wiki/Ä")
    assert result == is_gone
    assert text


def test_check_links_main_without_answers_warns_and_succeeds(check_links, monkeypatch, capsys):
    monkeypatch.setattr(check_links, "problem_of", lambda address: (False, "no answer"))
    assert check_links.main() == 0
    assert "warning: https://" in capsys.readouterr().out
