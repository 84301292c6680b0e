"""Reads the Markdown of pages."""

import pathlib
import re


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the anchors of the headings of a page, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {
        re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }
