"""Checks that the links to other sites in all pages of the project still work.

Usage: python .ci/check_links.py

It needs the network, so it runs at night and not in `.ci/run`. `tests/test_docs.py` checks the
links between pages. Only a page that is gone is an error. A site that rejects programs or does not
answer is a warning, because that says nothing about the link.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import re
import string
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_SECONDS = 30
# Status codes of an address that no longer has a page.
GONE = (404, 410)
_LINK = re.compile(r"\]\((https?://[^)\s]+)\)")
_CODE_BLOCK = re.compile(r"^```.*?^```", re.M | re.S)


def external_links(text: str) -> list[str]:
    """Returns the addresses to which Markdown links, without those in code blocks."""
    return _LINK.findall(_CODE_BLOCK.sub("", text))


def pages_by_address(pages: Iterable[Path]) -> dict[str, list[Path]]:
    """Returns each address with the pages that link to it."""
    pages_of: dict[str, list[Path]] = {}
    for page in pages:
        for address in external_links(page.read_text(encoding="utf-8")):
            pages_of.setdefault(address, []).append(page)
    return pages_of


def problem_of(address: str) -> tuple[bool, str]:
    """Requests an address.

    Returns:
      Whether its page is gone, and what went wrong; the text is empty if the page was sent.
    """
    ascii_address = urllib.parse.quote(address, safe=string.punctuation)
    # Some sites reject the name that urllib sends by default.
    request = urllib.request.Request(ascii_address, headers={"User-Agent": "Mozilla/5.0"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS):
            return False, ""
    except urllib.error.HTTPError as error:
        return error.code in GONE, f"status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return False, str(error)


def main() -> int:
    """Checks all pages; returns the exit code, which is 1 if a page is gone."""
    pages = [page for page in ROOT.rglob("*.md") if "build" not in page.relative_to(ROOT).parts]
    pages_of = pages_by_address(
        page for page in pages if not page.relative_to(ROOT).parts[0].startswith(".venv")
    )
    addresses = sorted(pages_of)
    with concurrent.futures.ThreadPoolExecutor(8) as executor:
        problems = list(executor.map(problem_of, addresses))
    errors = 0
    for address, (is_gone, text) in zip(addresses, problems, strict=True):
        if text:
            names = ", ".join(str(page.relative_to(ROOT)) for page in pages_of[address])
            print(f"{'error' if is_gone else 'warning'}: {address}: {text} ({names})")
        errors += is_gone
    print(f"{len(addresses)} addresses, {errors} without a page")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
