"""Tests that the arms of a study differ only in the settings that the study compares."""

import pathlib

import numpy as np
import pytest

from hybrid_imagenet import config, print_config, run_plan
from hybrid_imagenet.schedules.step_bounds import adabound_bounds
from hybrid_imagenet.training import relative_step_advice
from studies import batch_norm, optimizers, questions, rate_curves, tuning
from studies.command import STUDIES
from studies.handover import ADAM_RATES

OPTIONS_OF_SHORT = {
    "softmax": {"loss"},
    "sharp": {"blurpool"},
    "last_weights": {"ema_decay", "ema_every"},
    "coupled": {"decoupled_decay", "weight_decay"},
    "one_size": {"image_size_schedule"},
}
DIFFERENCES = [
    ("decay", "sgd_all", "sgd", {"decay_all"}),
    ("decay", "lars_all", "lars", {"decay_all"}),
    *(("short-parts", arm, "short", flags) for arm, flags in OPTIONS_OF_SHORT.items()),
    ("short-parts", "plain", "short", set().union(*OPTIONS_OF_SHORT.values())),
    ("short-parts", "mirrored", "short", {"eval_flip"}),
]


def arm_of(study, name):
    return next(arm for arm in STUDIES[study].arms if arm.name == name)


def resolve_arm(study, name, *flags):
    return config.resolve(STUDIES[study].arguments(arm_of(study, name), 0, flags))


@pytest.mark.parametrize(("study", "first", "second", "flags"), DIFFERENCES)
def test_arms_of_a_study_differ_only_in_the_flags_compared(study, first, second, flags):
    one, other = (resolve_arm(study, name).as_dict() for name in (first, second))
    assert {name for name in one | other if one.get(name) != other.get(name)} == flags


def test_decoupled_and_coupled_decay_of_the_study_are_equally_strong():
    decoupled, coupled = (resolve_arm("short-parts", name) for name in ("short", "coupled"))
    assert decoupled.get("weight_decay") == pytest.approx(
        coupled.optimization.lr * coupled.get("weight_decay") / (1 - coupled.get("momentum"))
    )


def test_arms_of_batch_norm_are_the_rows_of_table_3_4_with_equal_updates():
    study = batch_norm.BATCH_NORM
    assert [arm.top1 for arm in study.arms] == [0.7560, 0.7505, 0.7335, 0.7034]
    rows = {
        arm.name: resolve_arm("batch_norm", arm.name, *arm.points[1].flags) for arm in study.arms
    }
    assert {
        name: (row.network.sync_batch_norm, row.network.batch_norm, row.optimization.random_batch)
        for name, row in rows.items()
    } == {
        "last": (False, "last", 0),
        "moving": (False, "moving", 0),
        "sync": (True, "moving", 0),
        "random": (True, "moving", 16),
    }
    plans = {
        name: print_config.plan_epochs(run_plan.make(row), 60_000 - questions.TUNING)
        for name, row in rows.items()
    }
    assert [sum(row.steps for row in plan) for plan in plans.values()] == pytest.approx(
        [521] * 4, abs=1
    )
    assert [max(row.learning_rate for row in plan) for plan in plans.values()] == pytest.approx(
        [1.2] * 4
    )
    spread = np.std(np.arange(batch_norm.LEAST, batch_norm.MOST + 1)) * np.sqrt(12) / (12 * 32)
    assert round(100 * spread) == 9
    assert any("by 9 %" in note for note in study.notes)


def test_optimizers_by_batch_shares_the_runs_of_accuracy_by_batch():
    accuracy_arms, optimizer_arms = (
        {
            trial.cell.directory.name: trial.arm.name
            for trial in tuning.plan(study, pathlib.Path("x"), 1)
        }
        for study in (questions.ACCURACY_BY_BATCH, optimizers.OPTIMIZERS_BY_BATCH)
    )
    common = set(optimizer_arms) & set(accuracy_arms)
    assert all(accuracy_arms[name] == optimizer_arms[name] for name in common)
    shared = {optimizer_arms[name] for name in common}
    assert shared == {
        f"{name}_{batch}" for name in ("sgd", "lars", "hybrid") for batch in questions.BATCHES
    }


@pytest.mark.parametrize("batch", questions.BATCHES)
def test_optimizers_have_equal_budgets_and_lamb_is_tuned_around_the_published_step(batch):
    arms = [arm for arm in optimizers.OPTIMIZERS_BY_BATCH.arms if arm.batch == batch]
    assert len(arms) == len(optimizers.OPTIMIZERS)
    for arm in arms:
        name = optimizers.OPTIMIZERS_BY_BATCH.name
        points = [resolve_arm(name, arm.name, *point.flags) for point in arm.points]
        assert len({str(point.as_dict()) for point in points}) == 5
        assert {
            (
                run_plan.make(c).base_batch,
                c.run.epochs,
                c.optimization.per_gpu_batch,
                c.optimization.warmup_epochs,
            )
            for c in points
        } == {(batch, 16, 32, 3)}
        if arm.name == f"lamb_{batch}":
            steps = [relative_step_advice.peak(run_plan.make(point)).value for point in points]
            tuned = relative_step_advice.tuned(run_plan.make(points[0]).optimizer, batch)
            assert steps == pytest.approx(
                [factor * tuned for factor in questions.FACTORS], rel=1e-3
            )


@pytest.mark.parametrize("study, gpus", [("handover", 32), ("handover-256", 8)])
def test_points_of_the_handover_have_the_settings_in_their_names(study, gpus):
    # This point has the step that was tuned from a cold start.
    base = resolve_arm(study, "default", *arm_of(study, "default").points[1].flags)
    for point in arm_of(study, "handover").points:
        factor, step = point.at
        resolved = resolve_arm(study, "handover", *point.flags)
        assert factor == ADAM_RATES[point.label.partition(",")[0]](gpus)
        assert resolved.get("adabound_lr") == pytest.approx(0.001 * factor, rel=1e-3)
        assert resolved.get("lars_eta") == pytest.approx(step * base.get("lars_eta"), rel=1e-3)
        assert resolved.optimization.lr_schedule == (
            "exponential" if "kappa" in point.label else "poly"
        )
        assert resolved.get("hybrid_ramp_epochs") == float(point.label.rsplit(" ", 1)[1])


@pytest.mark.parametrize(
    ("study", "updates"),
    [
        ("rate-curves", rate_curves.UPDATES),
        ("adabound-bounds-256", rate_curves.SMALL_UPDATES),
    ],
)
def test_adabound_with_a_scaled_gamma_ends_as_close_to_sgd_as_on_imagenet(study, updates):
    arm = arm_of(study, "adabound")
    resolved = resolve_arm(study, "adabound", *arm.points[1].flags)
    plan = print_config.plan_epochs(run_plan.make(resolved), 60_000 - questions.TUNING)
    assert sum(row.steps for row in plan) == updates
    here = adabound_bounds(updates, 1.0, resolved.get("adabound_gamma"))
    imagenet = adabound_bounds(rate_curves.IMAGENET_UPDATES, 1.0, 0.001)
    assert here == pytest.approx(imagenet, rel=1e-3)
    assert here == pytest.approx((0.95, 1.05), abs=0.005)
    assert run_plan.make(resolved).optimizer.options.final_lr == pytest.approx(
        float(arm.points[1].label)
    )
