import pytest

from hybrid_imagenet import config
from hybrid_imagenet.analysis import published
from hybrid_imagenet.config import derived, report
from studies import trial_runs
from studies.base import EPOCHS, TARGET
from studies.definitions import SONY_SCALE, STUDIES

NAMES = [
    *("gradient_descent", "warmup_epochs", "precision", "initialization", "gamma"),
    *("batch_size_control", "label_smoothing"),
]
DIGITS = 1500
ARMS = [(study, arm) for study in STUDIES.values() for arm in study.arms]


def named(study):
    return {arm.name: arm for arm in STUDIES[study].arms}


def settings(study, arm, seed=0):
    return config.resolve(STUDIES[study].arguments(named(study)[arm], seed))


@pytest.mark.parametrize(("study", "arm"), ARMS, ids=lambda x: x.name)
def test_every_arm_can_be_run_with_every_seed(study, arm):
    for seed in (0, 4):
        resolved = config.resolve(study.arguments(arm, seed), 2)
        assert resolved.seed == seed
        assert resolved.target_top1 == (TARGET,)
        plan = report.plan(resolved, DIGITS)  # raises where a batch does not fit the data
        assert len(plan) == EPOCHS


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_arms_differ_and_claims_name_them(study):
    names = [arm.name for arm in study.arms]
    assert len(set(names)) == len(names)
    resolved = [tuple(sorted(str(trial_runs.resolved(study.arguments(arm, 0))).split(", "))) for arm in study.arms]
    assert len(set(resolved)) == len(names)
    assert study.claims
    for claim in study.claims:
        assert {claim.first, claim.second} <= set(names)
        assert claim.first != claim.second
        assert claim.relation in ("above", "equal")


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_statements_of_order_follow_from_the_papers_numbers_where_it_has_them(study):
    arms = {arm.name: arm for arm in study.arms}
    for claim in study.claims:
        first, second = arms[claim.first], arms[claim.second]
        if claim.metric == "top1" and first.top1 is not None and second.top1 is not None:
            lead = first.top1 - second.top1
            assert lead > 0 if claim.relation == "above" else abs(lead) < 0.002
        elif claim.metric == "epochs" and first.epochs is not None and second.epochs is not None:
            assert first.epochs < second.epochs


def test_numbers_of_h():
    """Tables 3.4 to 3.6 and section 3.2.1, typed in from the paper a second time."""
    top1 = {study: [arm.top1 for arm in STUDIES[study].arms] for study in NAMES}
    epochs = {study: [arm.epochs for arm in STUDIES[study].arms] for study in NAMES}
    assert (top1["initialization"], epochs["initialization"]) == ([0.756, 0.7523, 0.7438], [32, 35, 36])
    assert (top1["gamma"], epochs["gamma"]) == ([0.756, 0.7532], [32, 42])
    gradient = named("gradient_descent")
    assert (gradient["hybrid"].top1, gradient["hybrid"].epochs) == (0.756, 32)
    assert gradient["hybrid"].top1 - gradient["gradual"].top1 == pytest.approx(0.005)  # "about 0.5 %"
    assert gradient["gradual"].about
    cluster_1, cluster_2 = (r for r in published.RESULTS if r.source == "Lu et al., Table 3.7")
    assert named("precision")["fp16"].top1 == cluster_1.top1
    assert named("precision")["fp16_wire"].top1 == cluster_2.top1


def test_numbers_of_s():
    printed = {
        r.source.removeprefix("Mikami et al., Table 5, "): r.top1 for r in published.RESULTS if "Table 5" in r.source
    }
    names = {"reference": "reference", "exp1": "exp. 1", "exp2": "exp. 2", "exp3": "exp. 3", "exp4": "exp. 4"}
    for arm, source in names.items():
        assert named("batch_size_control")[arm].top1 == printed[source]
    assert named("label_smoothing")["32K"].top1 == printed["reference"]
    assert named("label_smoothing")["54K_smoothed"].top1 == printed["exp. 2"]


SONY = {  # Table 3: global batch at epochs 1, 31, 46 and 76 of 90
    "reference": (32768, 32768, 32768, 32768),
    "exp1": (34816, 69632, 69632, 69632),
    "exp2": (55296, 55296, 55296, 55296),
    "exp3": (55296, 65536, 65536, 65536),
    "exp4": (34816, 69632, 87040, 121856),
}


@pytest.mark.parametrize("arm", SONY)
def test_batches_of_s_are_scaled_down_by_one_factor(arm):
    resolved = config.resolve(STUDIES["batch_size_control"].arguments(named("batch_size_control")[arm], 0), 2)
    schedule = derived.batches(resolved)
    for epoch, batch in zip((0, 30, 45, 75), SONY[arm], strict=True):
        at = epoch * EPOCHS / 90
        assert at == int(at)
        assert schedule.at(int(at)).global_batch(2) * SONY_SCALE == batch
    assert bool(resolved.label_smoothing) == (arm in ("exp2", "exp3", "exp4"))  # Table 3, LS
    plan = report.plan(resolved, DIGITS)
    assert {round(row.momentum, 6) for row in plan} == {0.9}
    assert max(row.learning_rate for row in plan) <= 34.0
