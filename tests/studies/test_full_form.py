"""Tests the comparison in the paper's own form: batch, T, updates, and what each arm changes."""

import pytest

from hybrid_imagenet import config, print_config, run_plan
from hybrid_imagenet.errors import EXIT_PREEMPTED
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.training import relative_step_advice
from studies import command, full_form, plot, trial_runs
from studies.full_form import FULL_FORM, FULL_FORM_SMALL
from studies.garment_pairs import TRAINING_IMAGES
from tests.studies import support

BOTH = pytest.mark.parametrize("study", [FULL_FORM, FULL_FORM_SMALL], ids=lambda study: study.name)
HYBRID_OPTIONS = {
    "adabound_bound_time",
    "adabound_lr",
    "adabound_lr_scaling",
    "hybrid_bias_correction",
    "hybrid_decay_in_warmup",
    "hybrid_handover",
    "hybrid_ramp_epochs",
}
LARS_OPTIONS = {"lars_eps", "lars_eps_rule", "lars_eta", "lars_variant"}
KAPPA_OPTIONS = {"lr_decay", "lr_decay_exponent"}
POLY_OPTIONS = {"lr_power"}
PRINTED = {
    "recipe",
    "adabound_bound_time",
    "decay_all",
    "hybrid_bias_correction",
    "hybrid_handover",
    "lars_eta",
    "lr_decay_exponent",
    "momentum",
}
# Flags that may differ from those of the arm `hybrid`: the ones that an arm is about, and the ones
# that only exist with them.
DIFFERENCES = {
    "gradual_sgd": {"optimizer", "sgd_nesterov", "warmup_start_lr"} | HYBRID_OPTIONS | LARS_OPTIONS,
    "as_printed": PRINTED,
    "hybrid_poly": {"lr_schedule"} | KAPPA_OPTIONS | POLY_OPTIONS,
    "hybrid_ramp": {"hybrid_ramp_epochs", "lars_eta"},
    "hybrid_small_step": {"lars_eta"},
    "lars_poly": {
        "optimizer",
        "lars_eta",
        "lars_nesterov",
        "lr",
        "lr_scaling",
        "lr_schedule",
        "warmup_start_lr",
    }
    | HYBRID_OPTIONS
    | KAPPA_OPTIONS
    | POLY_OPTIONS,
}


def resolve(study, name):
    arm = next(arm for arm in study.arms if arm.name == name)
    return config.resolve(study.arguments(arm, seed=2))


def differing(first, second):
    """Returns the names of the settings in which two configurations differ."""
    one = first.as_dict()
    other = second.as_dict()
    return {name for name in one | other if one.get(name) != other.get(name)}


@BOTH
def test_arms_of_the_full_form_have_its_batch_warmup_and_updates(study):
    for arm in study.arms:
        resolved = resolve(study, arm.name)
        assert run_plan.make(resolved).base_batch == full_form.BATCH == 6144
        assert (resolved.optimization.virtual_gpus, resolved.optimization.per_gpu_batch) == (
            24,
            256,
        )
        assert (resolved.optimization.warmup_epochs, resolved.run.epochs) == (10, 90)
        assert (
            resolved.network.batch_norm,
            resolved.network.sync_batch_norm,
            resolved.network.bn_group,
        ) == (
            "last",
            False,
            1,
        )
        assert resolved.run.seed == 2
        plan = print_config.plan_epochs(run_plan.make(resolved), TRAINING_IMAGES)
        assert sum(epoch.steps for epoch in plan) == 879
        assert sum(epoch.steps for epoch in plan[:10]) == 98


@BOTH
def test_arms_of_the_full_form_differ_from_hybrid_only_in_their_own_settings(study):
    assert {arm.name for arm in study.arms} == {"hybrid"} | DIFFERENCES.keys()
    hybrid = resolve(study, "hybrid")
    for name, flags in DIFFERENCES.items():
        # The large network of the recipe as printed is ResNet-50 v1.
        model = {"model"} if (study, name) == (FULL_FORM, "as_printed") else set()
        assert differing(hybrid, resolve(study, name)) == flags | model, name


@BOTH
def test_hybrid_arm_has_the_settings_of_the_recipe(study):
    shipped = config.resolve(["--recipe=hybrid", "--virtual_gpus=24"])
    optimization = {
        "optimizer",
        "lr",
        "lr_scaling",
        "lr_schedule",
        "warmup_epochs",
        "epochs",
        "per_gpu_batch",
    }
    assert not differing(shipped, resolve(study, "hybrid")) & (
        optimization | set(shipped.chosen_options)
    )


def test_as_printed_arm_has_the_settings_of_its_recipe():
    shipped = config.resolve(["--recipe=lu_as_printed", "--virtual_gpus=24"])
    printed = resolve(FULL_FORM, "as_printed")
    assert printed.network.model == shipped.network.model == "resnet50_v1"
    assert not differing(shipped, printed) & (PRINTED | set(shipped.chosen_options))


def test_gradual_sgd_arm_is_its_recipe_with_the_decay_and_warmup_of_hybrid():
    recipe = config.resolve(
        [
            "--recipe=gradual_warmup",
            *FULL_FORM.base,
            "--lr_schedule=exponential",
            "--lr_decay=0.9",
            "--seed=2",
        ]
    )
    gradual = resolve(FULL_FORM, "gradual_sgd")
    # lr * N and lr * B / 256 are the same with 256 images per GPU.
    assert differing(recipe, gradual) == {"recipe", "lr_scaling"}
    rates = [run_plan.make(row).optimizer.options.learning_rate for row in (recipe, gradual)]
    assert rates == pytest.approx([2.4, 2.4])


@pytest.mark.parametrize(
    ("name", "step", "epoch"),
    [
        ("hybrid", mlperf.tuned_step(6144), 11),
        ("as_printed", mlperf.tuned_step(6144), 11),
        ("hybrid_poly", mlperf.tuned_step(6144), 11),
        ("hybrid_ramp", mlperf.tuned_step(6144), 13),
        ("hybrid_small_step", 0.04, 11),
        ("lars_poly", mlperf.tuned_step(6144), 11),
    ],
)
def test_relative_step_of_an_arm_has_the_expected_peak(name, step, epoch):
    peak = relative_step_advice.peak(run_plan.make(resolve(FULL_FORM, name)))
    assert peak.value == pytest.approx(step, rel=1e-3)
    assert peak.epoch == epoch


def test_hybrid_and_lars_arms_with_polynomial_decay_are_equal_after_the_warmup():
    hybrid = resolve(FULL_FORM, "hybrid_poly")
    lars = resolve(FULL_FORM, "lars_poly")
    for epoch in (10.0, 10.1, 42.0, 89.5):
        first = run_plan.make(hybrid).schedule.values(epoch, epoch + 0.1, full_form.BATCH)
        second = run_plan.make(lars).schedule.values(epoch, epoch + 0.1, full_form.BATCH)
        assert relative_step_advice.at_step(
            run_plan.make(hybrid).optimizer, first
        ) == pytest.approx(
            relative_step_advice.at_step(run_plan.make(lars).optimizer, second), rel=1e-3
        )
        # Biases and normalization have no trust ratio, and use an average of the gradient instead
        # of a sum.
        assert (1 - 0.9) * first["learning_rate"] == pytest.approx(second["learning_rate"])
        assert first["momentum"] == second["momentum"] == 0.9


def test_small_form_differs_only_in_network_precision_and_target():
    for arm in FULL_FORM.arms:
        names = differing(resolve(FULL_FORM, arm.name), resolve(FULL_FORM_SMALL, arm.name))
        assert names == {"model", "model_width", "precision", "target_top1"}
    assert resolve(FULL_FORM, "hybrid").network.precision == "mixed_float16"
    assert resolve(FULL_FORM, "hybrid").network.model == "resnet50"


@BOTH
def test_claims_of_the_full_form_have_the_effect_of_the_paper_and_name_arms(study):
    assert command.STUDIES[study.name] is study
    arms = {arm.name: arm for arm in study.arms}
    of_paper = [claim for claim in study.claims if claim.by_paper]
    assert {(claim.first, claim.second, claim.metric) for claim in of_paper} == {
        ("hybrid", "gradual_sgd", "top1"),
        ("hybrid", "gradual_sgd", "epochs"),
    }
    assert arms["hybrid"].top1 - arms["gradual_sgd"].top1 == pytest.approx(0.005)
    assert arms["gradual_sgd"].about
    assert all({claim.first, claim.second} <= arms.keys() for claim in study.claims)
    cells = {str(trial_runs.resolved(study.arguments(arm, 0))) for arm in study.arms}
    assert len(cells) == len(study.arms) == 7


def test_full_form_stopped_and_started_again_runs_only_what_is_missing_and_plots_every_arm(
    tmp_path, monkeypatch
):
    started = []

    def run(cell, arguments, place, stop):
        started.append(arguments)
        if len(started) == 3:
            raise KeyboardInterrupt
        support.finish(cell, support.curve(0.5 + len(started) / 100))
        return 0

    plotted_arms = []
    monkeypatch.setattr(command.running, "run_process", run)
    monkeypatch.setattr(
        plot,
        "_by_epoch",
        lambda pyplot, study, arms: plotted_arms.append(len(arms)) or pyplot.figure(),
    )
    for name in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        (tmp_path / name).touch()
    words = [
        "full_form_small",
        "--seeds=1",
        f"--out={tmp_path / 'out'}",
        "--",
        f"--data_dir={tmp_path}",
    ]
    assert command.main(words) == EXIT_PREEMPTED
    assert command.main(words) == 0
    assert len(started) == 2 + 1 + 5
    assert plotted_arms == [7]
    rows = (tmp_path / "out" / "full_form_small.csv").read_text().splitlines()
    assert len(rows) == 1 + 7
    assert not any(str(tmp_path) in row for row in rows)
