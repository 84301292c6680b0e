"""The rows of Table 3.4 of Lu et al.: what differs between them, and that the first is as long as the others."""

import numpy as np
import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import report
from studies import batch_norm, questions
from studies.command import STUDIES

STUDY = batch_norm.BATCH_NORM
TRAINING = 60_000 - questions.TUNING


def settled(arm, point):
    return config.resolve([*STUDY.arguments(arm, 0), *point.flags])


ROWS = {arm.name: settled(arm, arm.points[1]) for arm in STUDY.arms}


def test_the_arms_are_the_rows_of_the_table():
    assert STUDIES["batch_norm"] is STUDY
    assert [arm.top1 for arm in STUDY.arms] == [0.7560, 0.7505, 0.7335, 0.7034]
    assert {name: (row.sync_batch_norm, row.batch_norm, row.random_batch) for name, row in ROWS.items()} == {
        "last": (False, "last", 0),
        "moving": (False, "moving", 0),
        "sync": (True, "moving", 0),
        "random": (True, "moving", 16),
    }
    assert [(c.first, c.second) for c in STUDY.claims] == [("last", "moving"), ("moving", "sync"), ("sync", "random")]


def test_random_batches_take_as_many_updates_from_as_many_images_at_the_same_rates():
    plans = {name: report.plan(row, TRAINING) for name, row in ROWS.items()}
    steps = {name: sum(row.steps for row in plan) for name, plan in plans.items()}
    assert steps["last"] == steps["moving"] == steps["sync"] == 521
    assert steps["random"] == pytest.approx(521, abs=1)
    spread = np.std(np.arange(batch_norm.LEAST, batch_norm.MOST + 1)) * np.sqrt(12) / (12 * 32)
    assert round(100 * spread) == 9
    assert any("by 9 %" in note for note in STUDY.notes)
    mean = (batch_norm.LEAST + batch_norm.MOST) / 2
    assert mean == ROWS["sync"].per_gpu_batch == 32
    for plan in plans.values():
        assert max(row.learning_rate for row in plan) == pytest.approx(1.2)
    last = {name: plan[-1].learning_rate for name, plan in plans.items()}
    assert last["random"] == pytest.approx(last["sync"], rel=0.1)
