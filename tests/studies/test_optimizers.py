"""The comparison of optimizers: equal budgets, the runs of `accuracy-by-batch` where arms are the same."""

import pathlib

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.config import derived, relative_step
from studies import optimizers, questions, tuning

STUDY = optimizers.OPTIMIZERS_BY_BATCH
ARMS = {arm.name: arm for arm in STUDY.arms}


def settled(arm, point, ranks=1, study=STUDY):
    return config.resolve([*study.arguments(arm, 0), *(point.flags if point else ())], ranks)


def test_every_optimizer_has_five_points_at_every_batch():
    assert len(ARMS) == len(optimizers.OPTIMIZERS) * len(questions.BATCHES)
    for arm in STUDY.arms:
        found = [settled(arm, point) for point in arm.points]
        assert len({str(each.values()) for each in found}) == 5
        assert {derived.base_batch(each) for each in found} == {arm.batch}
        assert {(each.epochs, each.per_gpu_batch, each.warmup_epochs) for each in found} == {(16, 32, 3)}


def test_cells_are_those_of_accuracy_by_batch_where_methods_are_the_same():
    theirs, ours = (
        {trial.cell.directory.name: trial.arm.name for trial in tuning.plan(study, pathlib.Path("x"), 1)}
        for study in (questions.ACCURACY_BY_BATCH, STUDY)
    )
    shared = {ours[name] for name in set(ours) & set(theirs)}
    assert shared == {f"{name}_{batch}" for name in ("sgd", "lars", "hybrid") for batch in questions.BATCHES}
    assert all(theirs[name] == ours[name] for name in set(ours) & set(theirs))
    assert len(set(ours) & set(theirs)) == 5 * len(shared)


@pytest.mark.parametrize("batch", questions.BATCHES)
def test_nesterov_lars_and_lamb_differ_in_the_optimizer_only(batch):
    found = [
        settled(ARMS[f"{name}_{batch}"], ARMS[f"{name}_{batch}"].points[0]) for name in ("nesterov", "lars", "lamb")
    ]
    own = {"optimizer", "lr", "sgd_nesterov", "weight_decay", "decoupled_decay", "momentum", "momentum_rule"}
    own |= {name for each in found for name in each.chosen if name.startswith(("lars_", "lamb_"))}
    values = [{name: value for name, value in each.values().items() if name not in own} for each in found]
    assert values[0] == values[1] == values[2]
    assert [each.optimizer for each in found] == ["sgd", "lars", "lamb"]
    assert found[0].chosen["sgd_nesterov"]


@pytest.mark.parametrize("batch", questions.BATCHES)
def test_points_of_lamb_are_relative_steps_around_its_authors(batch):
    arm = ARMS[f"lamb_{batch}"]
    for point, factor in zip(arm.points, questions.FACTORS, strict=True):
        resolved = settled(arm, point)
        top = relative_step.peak(resolved)
        assert top.value == pytest.approx(factor * relative_step.tuned(resolved, batch), rel=1e-3)
        assert float(point.label) == pytest.approx(top.value, rel=0.06)
