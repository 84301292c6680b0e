"""The studies of ours: equal budgets, and arms that differ in what they are about and in nothing
else.
"""

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import derived
from hybrid_imagenet.training import relative_step_advice
from studies import questions

TUNED = [questions.ACCURACY_BY_BATCH, questions.WARMUP_METHOD]
POINTS = [
    pytest.param(study, arm, point, id=f"{study.name}-{arm.name}-{point.label}")
    for study in TUNED
    for arm in study.arms
    for point in arm.points
]


def settled(study, arm, *flags):
    return config.resolve([*study.arguments(arm, 0), *flags])


@pytest.mark.parametrize("study", TUNED, ids=lambda study: study.name)
def test_every_arm_has_the_same_budget(study):
    assert len({len(arm.points) for arm in study.arms}) == 1
    assert len(study.arms[0].points) >= 3
    for arm in study.arms:
        flags = [study.arguments(arm, 0, point.flags) for point in arm.points]
        assert len({str(config.resolve(f).values()) for f in flags}) == len(arm.points)


@pytest.mark.parametrize(("study", "arm", "point"), POINTS)
def test_a_point_has_the_relative_step_that_it_is_called_after(study, arm, point):
    resolved = settled(study, arm, *point.flags)
    top = relative_step_advice.peak(resolved)
    if resolved.optimization.optimizer == "sgd":
        rate = derived.rates(resolved)["lr"]
        assert float(point.label) == pytest.approx(
            rate / (1 - resolved.optimizer_options["momentum"]), rel=6e-3
        )
        return
    rest = questions.KAPPA ** resolved.optimizer_options.get(
        "hybrid_ramp_epochs", 0
    )  # what is left when LARS is all there
    if resolved.schedule_options.get("lr_decay_exponent") == "epoch":
        rest = questions.KAPPA ** (questions.WARMUP + 1)
    assert float(point.label) * rest == pytest.approx(top.value, rel=0.06)


@pytest.mark.parametrize("batch", questions.BATCHES)
def test_methods_are_compared_at_one_batch_from_the_same_virtual_gpus(batch):
    arms = [arm for arm in questions.ACCURACY_BY_BATCH.arms if arm.batch == batch]
    assert [arm.name.removesuffix(f"_{batch}") for arm in arms] == list(questions.METHODS)
    for arm in arms:
        resolved = settled(questions.ACCURACY_BY_BATCH, arm, *arm.points[0].flags)
        assert derived.base_batch(resolved) == batch
        assert resolved.optimization.per_gpu_batch == questions.GPU_IMAGES


@pytest.mark.parametrize("batch", questions.BATCHES[1:])
@pytest.mark.parametrize("point", [0, 4])
def test_the_two_warmups_end_in_the_same_training(batch, point):
    study = questions.WARMUP_METHOD
    arms = {arm.name: arm for arm in study.arms}
    both = [settled(study, arms[f"{name}_{batch}"], *arms[f"{name}_{batch}"].points[point].flags)
            for name in ("adabound", "linear")]  # fmt: skip
    bounded, linear = map(derived.schedule, both)
    for epoch in (3.0, 3.5, 7.2, 15.9):
        a, b = bounded(epoch, epoch + 0.1, batch), linear(epoch, epoch + 0.1, batch)
        assert relative_step_advice.at_step(both[0], a) == pytest.approx(
            relative_step_advice.at_step(both[1], b), rel=2e-3
        )
        assert (1 - 0.9) * a["learning_rate"] == pytest.approx(
            b["learning_rate"], rel=2e-3
        )  # of biases
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
    assert all(both[0].value(name) == both[1].value(name) for name in same)
