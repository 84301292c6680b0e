"""The study of windows of shards: arms that differ in nothing else, at the batch and the step of another study."""

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import derived
from studies import questions, shuffle_window
from studies.shuffle_window import SHUFFLE_WINDOW, WINDOWS

ARMS = {arm.name: config.resolve(SHUFFLE_WINDOW.arguments(arm, 0)) for arm in SHUFFLE_WINDOW.arms}


@pytest.mark.parametrize("window", WINDOWS)
def test_an_arm_differs_in_its_window_only(window):
    own, whole = ARMS[f"window_{window}"].values(), ARMS["all"].values()
    assert {name for name in own if own[name] != whole[name]} == {"shuffle_window"}
    assert own["shuffle_window"] == window


def test_all_have_the_batch_and_the_step_of_hybrid_in_the_study_of_batches():
    arm = next(arm for arm in questions.ACCURACY_BY_BATCH.arms if arm.name == "hybrid_1024")
    point = arm.points[questions.FACTORS.index(shuffle_window.TUNED)]
    theirs = config.resolve([*questions.BASE, *arm.flags, *point.flags, "--eval_split=validation"]).values()
    own = ARMS["all"].values()
    assert {name for name in own if own[name] != theirs[name]} == {"dataset", "data_cache"}
    assert derived.base_batch(ARMS["all"]) == questions.LARGE


def test_windows_hold_more_and_fewer_batches_than_one_of_sixteen_shards_of_imagenet():
    assert shuffle_window.batches(10) < 16 * 1_281_167 / 1024 / 6144 < shuffle_window.batches(20)
    assert all(shuffle_window.SHARDS % window == 0 for window in WINDOWS)  # windows of one size
    assert 60_000 - derived.held_out(ARMS["all"], 60_000) == shuffle_window.IMAGES
