"""Tests that links and pictures of the pages work on the site."""

import importlib.util
import pathlib
import posixpath
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
REPOSITORY = "https://example.org/owner/hybrid_imagenet/"


@pytest.fixture(scope="module")
def site_hook():
    path = ROOT / "docs" / "dev" / "site_hook.py"
    spec = importlib.util.spec_from_file_location("site_hook", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("link", "on_site", "with_repository"),
    [
        ("[tuning](tuning.md#by-batch)", "[tuning](../tuning.md#by-batch)", None),
        ("[home](../README.md)", "[home](../index.md)", None),
        (
            "[decay](../studies/records/decay.md#a)",
            "decay",
            "[decay](https://example.org/owner/hybrid_imagenet/blob/HEAD/studies/records/decay.md#a)",
        ),
        (
            "[keras_fit.py](../examples/keras_fit.py)",
            "`keras_fit.py`",
            "[keras_fit.py](https://example.org/owner/hybrid_imagenet/blob/HEAD/examples/keras_fit.py)",
        ),
        (
            "![A figure](../studies/records/figure-3-1.png)",
            "![A figure](../studies/figure-3-1.png)",
            None,
        ),
    ],
)
def test_linked_page_leads_to_the_site_or_the_repository(site_hook, link, on_site, with_repository):
    # The page of docs/ is one folder deeper on the site.
    assert site_hook.linked(link, "docs/x.md", "x/x.md", "") == on_site
    assert site_hook.linked(link, "docs/x.md", "x/x.md", REPOSITORY) == (with_repository or on_site)


def test_pictures_of_pages_are_on_the_site(site_hook):
    sources = {f"docs/{path.relative_to(ROOT / 'docs')}" for path in ROOT.glob("docs/**/*.md")}
    shown = set()
    for source in sources | set(site_hook.PAGES.values()):
        for target in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", (ROOT / source).read_text()):
            if "://" not in target:
                shown.add(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)))
    outside = {path for path in shown if not path.startswith("docs/")}
    assert outside == set(site_hook.PICTURES.values())
