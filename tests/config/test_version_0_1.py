"""Recipes and flag files come to the numbers that they came to in version 0.1 (version_0_1.json, made with it)."""

import dataclasses
import json
import pathlib

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.comm.settings import Settings
from hybrid_imagenet.config import derived

RECORD = json.loads((pathlib.Path(__file__).parent / "version_0_1.json").read_text())
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(params=RECORD)
def recorded(request, monkeypatch):
    """A source of flags with what it came to."""
    monkeypatch.chdir(ROOT)
    return config.resolve([request.param]), RECORD[request.param]


def test_communication(recorded):
    resolved, record = recorded
    settings = derived.communication(resolved)
    found = {f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings)}
    found |= found.pop("options")
    assert found["fp32_gradients"] == tuple(record["communication"].pop("fp32_gradients"))
    del found["fp32_gradients"]
    assert found.items() <= record["communication"].items()
