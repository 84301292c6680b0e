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
    settings, expected = derived.communication(resolved), dict(record["communication"])
    found = {f.name: getattr(settings, f.name) for f in dataclasses.fields(Settings)}
    found |= found.pop("options") | {"cycle_time_ms": settings.cycle_ms(nccl=False)}
    expected["fp32_gradients"] = tuple(expected["fp32_gradients"])
    of_algorithms = {"torus_grid", "hybrid_threshold_kb"}
    assert set(expected) - set(found) <= of_algorithms
    assert {name: found[name] for name in expected if name in found} == {
        name: value for name, value in expected.items() if name in found
    }
