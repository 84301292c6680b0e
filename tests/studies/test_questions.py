"""Tests this project's own studies: equal budgets, and arms that differ only in one thing."""

import pytest

from hybrid_imagenet import config, run_plan
from hybrid_imagenet.training import relative_step_advice
from studies import questions

TUNED = [questions.ACCURACY_BY_BATCH, questions.WARMUP_METHOD]
POINTS = [
    pytest.param(study, arm, point, id=f"{study.name}-{arm.name}-{point.label}")
    for study in TUNED
    for arm in study.arms
    for point in arm.points
]


def resolve_arm(study, arm, *flags):
    return config.resolve([*study.arguments(arm, 0), *flags])


@pytest.mark.parametrize("study", TUNED, ids=lambda study: study.name)
def test_arms_of_a_tuned_study_have_the_same_budget(study):
    assert len({len(arm.points) for arm in study.arms}) == 1
    assert len(study.arms[0].points) >= 3
    for arm in study.arms:
        flags = [study.arguments(arm, 0, point.flags) for point in arm.points]
        assert len({str(config.resolve(f).as_dict()) for f in flags}) == len(arm.points)


@pytest.mark.parametrize(("study", "arm", "point"), POINTS)
def test_points_of_a_tuned_study_have_the_relative_step_in_their_names(study, arm, point):
    resolved = resolve_arm(study, arm, *point.flags)
    top = relative_step_advice.peak(run_plan.make(resolved))
    if resolved.optimization.optimizer == "sgd":
        rate = run_plan.make(resolved).optimizer.options.learning_rate
        assert float(point.label) == pytest.approx(rate / (1 - resolved.get("momentum")), rel=6e-3)
        return
    # The step decays until LARS is completely blended in.
    rest = questions.KAPPA ** run_plan.make(resolved).schedule.values.ramp_epochs
    if getattr(resolved.schedule_options, "lr_decay_exponent", None) == "epoch":
        rest = questions.KAPPA ** (questions.WARMUP + 1)
    assert float(point.label) * rest == pytest.approx(top.value, rel=0.06)


@pytest.mark.parametrize("batch", questions.BATCHES)
def test_methods_of_accuracy_by_batch_have_the_same_batch_and_virtual_gpus(batch):
    arms = [arm for arm in questions.ACCURACY_BY_BATCH.arms if arm.batch == batch]
    assert [arm.name.removesuffix(f"_{batch}") for arm in arms] == list(questions.METHODS)
    for arm in arms:
        resolved = resolve_arm(questions.ACCURACY_BY_BATCH, arm, *arm.points[0].flags)
        assert run_plan.make(resolved).base_batch == batch
        assert resolved.optimization.per_gpu_batch == questions.GPU_IMAGES


@pytest.mark.parametrize("batch", questions.BATCHES[1:])
@pytest.mark.parametrize("point", [0, 4])
def test_arms_of_the_warmup_study_are_equal_after_the_warmup(batch, point):
    study = questions.WARMUP_METHOD
    arms = {arm.name: arm for arm in study.arms}
    both = []
    for name in ("adabound", "linear"):
        arm = arms[f"{name}_{batch}"]
        both.append(resolve_arm(study, arm, *arm.points[point].flags))
    plans = [run_plan.make(resolved) for resolved in both]
    bounded, linear = (plan.schedule.values for plan in plans)
    for epoch in (3.0, 3.5, 7.2, 15.9):
        a = bounded(epoch, epoch + 0.1, batch)
        b = linear(epoch, epoch + 0.1, batch)
        assert relative_step_advice.at_step(plans[0].optimizer, a) == pytest.approx(
            relative_step_advice.at_step(plans[1].optimizer, b), rel=2e-3
        )
        # Biases have no trust ratio, so their learning rates are compared.
        assert (1 - 0.9) * a["learning_rate"] == pytest.approx(b["learning_rate"], rel=2e-3)
        assert a["momentum"] == b["momentum"] == 0.9
    same = (
        "weight_decay",
        "epochs",
        "per_gpu_batch",
        "virtual_gpus",
        "tuning_split",
        "lr_decay",
        "warmup_epochs",
    )
    assert all(both[0].get(name) == both[1].get(name) for name in same)
