"""The ablation of the short recipe: arms that differ in one part, and parts that are those of the recipe."""

import pytest

from hybrid_imagenet import config, recipes
from studies.short_parts import PARTS, SHORT_PARTS

FLAGS = {
    "softmax": {"loss"},
    "sharp": {"blurpool"},
    "last_weights": {"ema_decay", "ema_every"},
    "coupled": {"decoupled_decay", "weight_decay"},
    "one_size": {"image_size_schedule"},
}
ARMS = {arm.name: config.resolve(SHORT_PARTS.arguments(arm, 0)) for arm in SHORT_PARTS.arms}


def differences(arm):
    own, all_parts = ARMS[arm].values(), ARMS["short"].values()
    return {name for name in own if own[name] != all_parts[name]}


@pytest.mark.parametrize("arm", PARTS)
def test_an_arm_is_without_its_part_and_like_the_others_in_all_else(arm):
    assert differences(arm) == FLAGS[arm]


def test_plain_is_without_all_of_them_and_mirrored_has_one_more():
    assert differences("plain") == set().union(*FLAGS.values())
    assert differences("mirrored") == {"eval_flip"}


def test_the_parts_are_those_of_the_recipe():
    overrides = recipes.load("short").overrides
    assert set().union(*FLAGS.values()) <= set(overrides)
    for name in ("loss", "blurpool", "decoupled_decay"):
        assert ARMS["short"].values()[name] == overrides[name]


def test_both_kinds_of_decay_take_as_much_off_the_weights():
    decoupled, coupled = ARMS["short"], ARMS["coupled"]
    assert decoupled.weight_decay == pytest.approx(coupled.lr * coupled.weight_decay / (1 - coupled.momentum))
    assert coupled.lr_scaling == "none"
