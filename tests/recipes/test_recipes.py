import dataclasses

import pytest

from hybrid_imagenet import config, optimizers, recipes
from hybrid_imagenet.config import derived, report
from hybrid_imagenet.numerics import schedules

IMAGENET = 1_281_167
NAMES = {
    "hybrid",
    "hybrid_p40",
    "adabound",
    "gradual_warmup",
    "hal",
    "flash_a",
    "flash_b",
    "flash_exp1",
    "flash_exp2",
    "flash_exp3",
    "flash_exp4",
    "four_minutes_resnet",
    "four_minutes_alexnet",
    "mlperf_lars",
}


def plan(recipe, world_size, *flags):
    return report.plan(config.resolve([f"--recipe={recipe}", *flags]), IMAGENET, world_size)


def test_every_method_has_a_recipe():
    assert set(recipes.names()) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_resolves_holds_only_differences_and_says_where_it_is_from(name):
    recipe = recipes.load(name)
    resolved = config.resolve([f"--recipe={name}"])
    defaults = {f.name: f.default for f in dataclasses.fields(config.Config)}
    for flag, value in recipe.overrides.items():
        assert getattr(resolved, flag) == value != defaults[flag], flag
        assert resolved.origins[flag] == f"recipe {name}"
    assert recipe.name == name
    assert all((recipe.summary, recipe.source, recipe.hardware, recipe.published))


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_makes_an_optimizer_and_a_schedule(name):
    resolved = config.resolve([f"--recipe={name}"])
    optimizer = optimizers.create(**derived.optimizer_arguments(resolved, 4))
    schedule = schedules.create(**derived.schedule_arguments(resolved, 4))
    values = schedule(0.0, 0.1, derived.base_batch(resolved, 4))
    assert set(values) == set(optimizer.hyper.names)
    optimizer.hyper.assign(values)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_recipe_plans_two_epochs_of_digits_on_two_ranks(name):
    flags = ["--dataset=digits", "--epochs=2", "--image_size=32"]
    if "warmup" not in name and recipes.load(name).overrides.get("optimizer", "hybrid") == "hybrid":
        flags.append("--warmup_epochs=1")
    rows = report.plan(config.resolve([f"--recipe={name}", *flags]), 1437, 2)
    assert len(rows) == 2
    assert all(row.steps > 0 and row.learning_rate >= 0 for row in rows)


def test_hybrid_on_cluster_1():
    rows = plan("hybrid", 24)
    assert {row.global_batch for row in rows} == {6144}
    assert [row.phase for row in rows[:11]] == ["AdaBound"] * 10 + ["SGD"]
    assert rows[9].bounds == pytest.approx((2.4, 2.4), rel=1e-3)
    assert rows[10].learning_rate == pytest.approx(2.4)
    assert rows[89].learning_rate == pytest.approx(2.4 * 0.9**79)
    # With every image seen once per epoch, 90 epochs are ceil(90 * 1281167 / 6144) steps.
    assert sum(row.steps for row in rows) == -(-90 * IMAGENET // 6144)


def test_cluster_2_has_half_the_batch_and_the_same_rates():
    first, second = plan("hybrid", 24)[20], plan("hybrid_p40", 24)[20]
    assert (first.global_batch, second.global_batch) == (6144, 3072)
    assert first.learning_rate == second.learning_rate
    assert config.resolve(["--recipe=hybrid_p40"]).precision == "float32"


def test_goyal_and_hal_reach_their_linear_scaling_rates():
    for name, gpus, peak in (("gradual_warmup", 256, 3.2), ("hal", 64, 5.2)):
        rows = plan(name, gpus)
        assert rows[0].learning_rate == pytest.approx(0.1)
        found = [rows[epoch].learning_rate for epoch in (5, 29, 31, 59, 61, 79, 81)]
        expected = [peak, peak, peak / 10, peak / 10, peak / 100, peak / 100, peak / 1000]
        assert found == pytest.approx(expected)


def test_sony_experiments_follow_the_batch():
    rows = plan("flash_exp4", 2176)
    assert [rows[e].global_batch for e in (0, 30, 45, 75)] == [34816, 69632, 87040, 121856]
    rows = plan("flash_exp3", 2048)
    assert [(rows[e].global_batch, round(rows[e].momentum, 4)) for e in (0, 31)] == [(55296, 0.9407), (65536, 0.95)]
    assert plan("flash_exp2", 3456)[89].global_batch == 55296


def test_mlperf_takes_peak_and_warmup_by_batch():
    for gpus, peak, warmup in ((128, 10.0, 5), (512, 25.0, 5), (1024, 31.2, 25)):
        rows = plan("mlperf_lars", gpus)
        assert rows[0].learning_rate == 0
        assert max(row.learning_rate for row in rows) == pytest.approx(peak, rel=0.02)
        assert max(rows, key=lambda row: row.learning_rate).epoch in (warmup, warmup + 1)


def test_the_table_names_every_recipe_once():
    lines = recipes.table().splitlines()
    assert [line.split()[0] for line in lines[::3]] == sorted(NAMES)
    assert len(lines) == 3 * len(NAMES)
