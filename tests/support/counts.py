"""How many malformed inputs were tried."""

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest


@dataclasses.dataclass
class Counts:
    """Inputs that were refused with a message, and those that were harmless."""

    refused: int = 0
    taken: int = 0


@contextlib.contextmanager
def counted(what: str, request: pytest.FixtureRequest) -> Iterator[Counts]:
    """Gives counts to fill, and prints them on the terminal, past pytest's capture."""
    counts = Counts()
    yield counts
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        total = counts.refused + counts.taken
        print(
            f"\nfuzzing {what}: {total} malformed inputs, {counts.refused} refused, {counts.taken} harmless", flush=True
        )
