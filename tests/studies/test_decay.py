"""The study of LARS and of decay on biases and normalization: arms that differ in these two alone."""

from hybrid_imagenet import config
from hybrid_imagenet.analysis import published
from studies.decay import DECAY

ARMS = {arm.name: config.resolve(DECAY.arguments(arm, 0)).values() for arm in DECAY.arms}


def differences(first, second):
    return {name for name in ARMS[first] | ARMS[second] if ARMS[first].get(name) != ARMS[second].get(name)}


def test_arms_of_one_optimizer_differ_in_what_decays():
    assert differences("sgd_all", "sgd") == differences("lars_all", "lars") == {"decay_all"}
    assert (ARMS["sgd_all"]["decay_all"], ARMS["lars"]["decay_all"]) == (True, False)


def test_optimizers_differ_in_their_own_options_only():
    assert {name for name in differences("sgd", "lars") if not name.startswith(("lars_", "sgd_"))} == {"optimizer"}


def test_arms_have_as_many_points_and_the_numbers_of_the_paper():
    assert {len(arm.points) for arm in DECAY.arms} == {4}
    assert [arm.top1 for arm in DECAY.arms] == [*published.JIA_ABLATION.values(), None, None]
    assert {name for claim in DECAY.claims for name in (claim.first, claim.second)} == set(ARMS)
