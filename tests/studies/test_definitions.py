"""Tests the definitions of the studies of the papers."""

import pytest

from hybrid_imagenet import config, print_config, run_plan
from hybrid_imagenet.analysis import published
from studies import trial_runs
from studies.definitions import FLASH_EPOCHS, FLASH_GPUS, FLASH_SCALE, STUDIES
from studies.figure_3_1 import FIGURE_3_1
from studies.questions import EPOCHS, TUNING

IMAGES = 60_000 - TUNING
ARMS = [(study, arm) for study in STUDIES.values() for arm in study.arms]


def arms_by_name(study):
    return {arm.name: arm for arm in STUDIES[study].arms}


@pytest.mark.parametrize(("study", "arm"), ARMS, ids=lambda x: x.name)
def test_arms_of_all_studies_are_valid_configurations(study, arm):
    resolved = config.resolve(study.arguments(arm, 4))
    assert resolved.run.seed == 4
    assert resolved.evaluation.target_top1 == (0.8,)
    # This raises if a batch does not fit the data.
    plan = print_config.plan_epochs(run_plan.make(resolved), IMAGES)
    assert len(plan) == (FLASH_EPOCHS if study.name == "batch_size_control" else EPOCHS)


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_arms_of_a_study_differ_and_its_claims_name_them(study):
    names = [arm.name for arm in study.arms]
    assert len(set(names)) == len(names)
    resolved = [
        tuple(sorted(str(trial_runs.resolved(study.arguments(arm, 0))).split(", ")))
        for arm in study.arms
    ]
    assert len(set(resolved)) == len(names)
    assert study.claims
    for claim in study.claims:
        assert {claim.first, claim.second} <= set(names)
        assert claim.first != claim.second
        assert claim.relation in ("above", "equal")


@pytest.mark.parametrize("study", STUDIES.values(), ids=lambda s: s.name)
def test_claims_of_a_study_agree_with_the_numbers_of_the_paper(study):
    arms = {arm.name: arm for arm in study.arms}
    for claim in study.claims:
        first, second = arms[claim.first], arms[claim.second]
        if claim.metric == "top1" and first.top1 is not None and second.top1 is not None:
            lead = first.top1 - second.top1
            assert lead > 0 if claim.relation == "above" else abs(lead) < 0.002
        elif claim.metric == "epochs" and first.epochs is not None and second.epochs is not None:
            assert first.epochs < second.epochs


def test_numbers_of_lu_et_al_equal_the_paper():
    # Tables 3.4 to 3.6 and section 3.2.1. The numbers were typed from the paper a second time.
    top1 = {name: [arm.top1 for arm in study.arms] for name, study in STUDIES.items()}
    epochs = {name: [arm.epochs for arm in study.arms] for name, study in STUDIES.items()}
    assert (top1["initialization"], epochs["initialization"]) == (
        [0.756, 0.7523, 0.7438],
        [32, 35, 36],
    )
    assert (top1["gamma"], epochs["gamma"]) == ([0.756, 0.7532], [32, 42])
    for batch in (256, 1024):
        hybrid, gradual = (
            next(a for a in FIGURE_3_1.arms if a.name == f"{n}_{batch}")
            for n in ("hybrid", "sgd_kappa")
        )
        assert hybrid.top1 == 0.756
        # The paper writes "about 0.5 %".
        assert hybrid.top1 - gradual.top1 == pytest.approx(0.005)
        assert gradual.about
    cluster_1, cluster_2 = (r for r in published.RESULTS if r.source == "Lu et al., Table 3.7")
    assert arms_by_name("precision")["fp16"].top1 == cluster_1.top1
    assert arms_by_name("precision")["fp16_wire"].top1 == cluster_2.top1


def test_numbers_of_mikami_et_al_equal_the_published_table():
    printed = {
        r.source.removeprefix("Mikami et al., Table 5, "): r.top1
        for r in published.RESULTS
        if "Table 5" in r.source
    }
    names = {
        "reference": "reference",
        "exp1": "exp. 1",
        "exp2": "exp. 2",
        "exp3": "exp. 3",
        "exp4": "exp. 4",
    }
    for arm, source in names.items():
        assert arms_by_name("batch_size_control")[arm].top1 == printed[source]


# Table 3 of Mikami et al.: the global batch at epochs 1, 31, 46 and 76 of 90.
FLASH = {
    "reference": (32768, 32768, 32768, 32768),
    "exp1": (34816, 69632, 69632, 69632),
    "exp2": (55296, 55296, 55296, 55296),
    "exp3": (55296, 65536, 65536, 65536),
    "exp4": (34816, 69632, 87040, 121856),
}


@pytest.mark.parametrize("arm", FLASH)
def test_batches_of_mikami_et_al_are_divided_by_one_factor(arm):
    resolved = config.resolve(
        STUDIES["batch_size_control"].arguments(arms_by_name("batch_size_control")[arm], 0)
    )
    schedule = run_plan.make(resolved).batches
    for epoch, batch in zip((0, 30, 45, 75), FLASH[arm], strict=True):
        at = epoch * FLASH_EPOCHS / 90
        assert at == int(at)
        assert schedule.at(int(at)).global_batch(FLASH_GPUS) * FLASH_SCALE == batch
    # Table 3, column LS.
    assert bool(resolved.data.label_smoothing) == (arm in ("exp2", "exp3", "exp4"))
    plan = print_config.plan_epochs(run_plan.make(resolved), IMAGES)
    assert {round(row.momentum, 6) for row in plan} == {0.9}
    assert max(row.learning_rate for row in plan) <= 34.0
