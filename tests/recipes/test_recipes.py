"""Recipes: their flags, their schedules, and the pages that describe them."""

import math
import pathlib
import re

import pytest

from benchmarks.optimizer import resnet50_shapes
from hybrid_imagenet import config, print_config, recipes, run_plan
from hybrid_imagenet.cluster import gpus as visible_gpus
from hybrid_imagenet.comm import fusion
from hybrid_imagenet.comm.settings import WIRE_DTYPES
from studies.trial_runs import chosen_defaults
from tests.references import alexnet_reference, mlperf_reference, short_reference

IMAGENET = 1_281_167
NAMES = recipes.names()
# Flags that --lr_schedule=mlperf sets by the batch, so that a recipe may have to set the default.
SET_BY_MLPERF_TABLE = ("bn_group", "epochs")
# A flag whose default depends on the hardware, so that a recipe may repeat one of the defaults.
SET_BY_HARDWARE = "per_gpu_batch"


def plan(recipe, world_size, *flags):
    return print_config.plan_epochs(
        run_plan.make(config.resolve([f"--recipe={recipe}", *flags], world_size)), IMAGENET
    )


@pytest.mark.parametrize("name", NAMES)
def test_recipe_overrides_only_differ_from_defaults_and_have_a_source(name):
    recipe = recipes.load(name)
    resolved = config.resolve([f"--recipe={name}"])
    defaults = {flag: argument.default for flag, argument in config.COMMON.items()}
    defaults |= chosen_defaults(resolved.as_dict())
    for flag, value in recipe.overrides.items():
        assert resolved.get(flag) == value, flag
        by_table = flag in SET_BY_MLPERF_TABLE and resolved.optimization.lr_schedule == "mlperf"
        assert value != defaults[flag] or by_table or flag == SET_BY_HARDWARE, flag
        assert resolved.origins[flag] is config.Origin.RECIPE
    assert recipe.name == name
    assert all((recipe.summary, recipe.source, recipe.hardware, recipe.published))


@pytest.mark.parametrize("name", NAMES)
def test_recipe_creates_an_optimizer_that_takes_the_values_of_its_schedule(name):
    resolved = config.resolve([f"--recipe={name}"], 4)
    planned = run_plan.make(resolved)
    optimizer = planned.optimizer.create()
    values = planned.schedule.values(0.0, 0.1, planned.base_batch)
    # Only schedules with a ramp set trust_ratio_exponent.
    assert {*values, "trust_ratio_exponent"} == set(optimizer.hyperparameters.names)
    optimizer.hyperparameters.assign(values)


@pytest.mark.parametrize("name", NAMES)
def test_recipe_can_be_planned_for_two_epochs_on_two_ranks(name):
    flags = ["--dataset=digits", "--epochs=2", "--image_size=32"]
    if "warmup" not in name and recipes.load(name).overrides.get("optimizer", "hybrid") == "hybrid":
        flags.append("--warmup_epochs=1")
    rows = print_config.plan_epochs(
        run_plan.make(config.resolve([f"--recipe={name}", *flags], 2)), 1437
    )
    assert len(rows) == 2
    assert all(row.steps > 0 and row.learning_rate >= 0 for row in rows)


def test_recipe_hybrid_on_cluster_1_follows_the_paper():
    rows = plan("hybrid", 24)
    assert {row.global_batch for row in rows} == {6144}
    assert [row.phase for row in rows[:11]] == ["AdaBound"] * 10 + ["SGD"]
    assert rows[9].bounds == pytest.approx((2.4, 2.4), rel=1e-3)
    assert rows[10].learning_rate == pytest.approx(2.4)
    assert rows[89].learning_rate == pytest.approx(2.4 * 0.9**79)
    # With every image seen once per epoch, 90 epochs are ceil(90 * 1281167 / 6144) steps.
    assert sum(row.steps for row in rows) == -(-90 * IMAGENET // 6144)


def test_recipe_lu_as_printed_follows_the_formulas_of_the_paper():
    """Reads t and the exponent of κ in Lu et al., section 2.2.1, as the number of the epoch."""
    rows = plan("lu_as_printed", 24)
    assert {row.global_batch for row in rows} == {6144}
    for epoch in range(1, 11):
        upper = 2.4 + 1 / (0.001 * epoch) - 1 / (0.001 * 10)
        assert rows[epoch - 1].bounds == pytest.approx((epoch / 10 * 2.4, upper))
    assert [row.learning_rate for row in rows[10:]] == pytest.approx(
        [2.4 * 0.9**epoch for epoch in range(11, 91)]
    )
    assert {row.momentum for row in rows} == {0.0}
    resolved = config.resolve(["--recipe=lu_as_printed"], 24)
    assert resolved.network.model == "resnet50_v1"
    options = run_plan.make(resolved).optimizer.options
    assert (options.decay_all, options.bias_correction) == (True, False)
    # The paper does not print the coefficient of LARS. With the chosen one, the relative step in
    # epoch 11 is MLPerf's at this batch.
    assert resolved.get("lars_eta") * 2.4 * 0.9**11 == pytest.approx(0.141, abs=5e-4)


def test_recipe_hybrid_p40_has_half_the_batch_of_hybrid_and_the_same_rates():
    first = plan("hybrid", 24)[20]
    second = plan("hybrid_p40", 24)[20]
    assert (first.global_batch, second.global_batch) == (6144, 3072)
    assert first.learning_rate == second.learning_rate
    assert config.resolve(["--recipe=hybrid_p40"]).network.precision == "float32"


def test_recipes_gradual_warmup_and_hal_have_the_published_learning_rates():
    for name, gpus, start, peak in (("gradual_warmup", 256, 0.1, 3.2), ("hal", 64, 0.0, 5.2)):
        rows = plan(name, gpus)
        assert rows[0].learning_rate == pytest.approx(start)
        rates = [rows[epoch].learning_rate for epoch in (5, 29, 31, 59, 61, 79, 81)]
        expected = [peak, peak, peak / 10, peak / 10, peak / 100, peak / 100, peak / 1000]
        assert rates == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "gpus", "peak"),
    [
        ("hybrid", 24, 2.4),
        ("adabound", 24, 1e-3),
        ("gradual_warmup", 256, 3.2),
        ("flash_a", 1024, 34.0),
        ("mlperf_lars", 1024, 21.2),
    ],
)
def test_peak_learning_rate_of_recipes_is_that_of_all_gpus(name, gpus, peak):
    assert run_plan.make(
        config.resolve([f"--recipe={name}"], gpus)
    ).peak_learning_rate() == pytest.approx(peak)


def test_recipe_hal_decays_every_parameter_and_gradual_warmup_only_kernels():
    options = {
        name: run_plan.make(config.resolve([f"--recipe={name}"], 4)).optimizer.options
        for name in ("hal", "gradual_warmup")
    }
    assert {name: (a.weight_decay, a.decay_all) for name, a in options.items()} == {
        "hal": (1e-4, True),
        "gradual_warmup": (1e-4, False),
    }


def test_recipes_flash_exp_have_the_published_batches_and_momentum():
    rows = plan("flash_exp4", 2176)
    assert [rows[e].global_batch for e in (0, 30, 45, 75)] == [34816, 69632, 87040, 121856]
    assert max(row.per_gpu_batch for row in rows) <= 32
    assert [rows[e].accumulation for e in (0, 30, 45, 75)] == [1, 2, 2, 2]
    rows = plan("flash_exp3", 2048)
    assert [(rows[e].global_batch, round(rows[e].momentum, 4)) for e in (0, 31)] == [
        (55296, 0.9407),
        (65536, 0.95),
    ]
    assert plan("flash_exp2", 3456)[89].global_batch == 55296


def test_recipe_flash_reference_has_the_rates_of_you_et_al_as_mikami_et_al_print_them():
    resolved = config.resolve(["--recipe=flash_reference"], 1024)
    assert {row.global_batch for row in plan("flash_reference", 1024)} == {32768}
    planned = run_plan.make(resolved)
    schedule = planned.schedule.values
    rates = [schedule(e, e, 32768)["learning_rate"] for e in (0.0, 2.5, 5.0, 47.5, 90.0)]
    # The warmup is linear. Half of the decay is left at epoch 47.5, and 29 / 4 is its square.
    assert rates == pytest.approx([0.2, 14.6, 29.0, 7.25, 0.0])
    assert {row.momentum for row in plan("flash_reference", 1024)} == {0.9}
    assert planned.optimizer.options.trust_coefficient == 0.001


@pytest.mark.parametrize("row", mlperf_reference.ROWS, ids=lambda row: f"{row[0]:.0f}")
def test_recipe_mlperf_lars_has_the_settings_of_mlperfs_table(row):
    """Uses the number of GPUs that gives the batch of the row."""
    batch, target, lr, warmup, momentum, decay, end, *_, span = row
    gpus = int(batch) // 16
    resolved = config.resolve(["--recipe=mlperf_lars", "--per_gpu_batch=16"], gpus)
    assert (
        resolved.optimization.lr,
        resolved.optimization.warmup_epochs,
        resolved.get("momentum"),
    ) == (
        lr,
        warmup,
        momentum,
    )
    assert (resolved.get("weight_decay"), resolved.run.epochs) == (decay, round(end))
    planned = run_plan.make(resolved)
    schedule = planned.schedule.values
    last = planned.schedule.end_epoch
    assert last == pytest.approx(end, abs=0.05)
    rates = [schedule(e, e, int(batch))["learning_rate"] for e in (0.0, warmup / 2, warmup, last)]
    assert rates == pytest.approx([0, lr / 2, lr, 0])
    assert planned.optimizer.options.weight_decay == decay
    validation = planned.validation
    assert validation.every_epochs == 4 and validation.offset_epochs in range(4)
    validated = [e for e in range(1, planned.epochs + 1) if validation.is_due(e - 1, e)]
    assert math.ceil(target) in validated
    assert gpus % resolved.network.bn_group == 0
    assert 0.5 < 16 * resolved.network.bn_group / span < 2
    assert planned.communication.neighbors == resolved.network.bn_group
    text = print_config.describe(resolved, IMAGENET)
    assert f"MLPerf's table at batch {batch:.0f}" in next(
        x for x in text.splitlines() if x.startswith("momentum ")
    )
    assert f"batch normalization over {16 * resolved.network.bn_group} images" in text
    assert f"MLPerf's table has {span:.0f}" in text


def test_recipe_mlperf_lars_with_flags_prefers_them_to_the_table():
    flags = ["--recipe=mlperf_lars", "--epochs=10", "--weight_decay=3e-4"]
    at_1632 = config.resolve(flags, 51)
    assert (
        at_1632.run.epochs,
        at_1632.get("weight_decay"),
        at_1632.optimization.lr,
    ) == (
        10,
        3e-4,
        7.4,
    )
    assert at_1632.origins["epochs"] is config.Origin.COMMAND_LINE
    assert config.resolve(flags, 1024).get("momentum") == 0.94


def test_recipe_short_is_the_published_configuration_of_mosaicml():
    """Compares with MosaicML's 8 GPUs: learning rate and image size in every epoch."""
    theirs = short_reference.MOSAICML
    rows = plan("short", 8)
    resolved = config.resolve(["--recipe=short"])
    validated = run_plan.make(resolved).validation
    assert {row.global_batch for row in rows} == {theirs["batch"]}
    assert len(rows) == theirs["epochs"] == 28
    rates = [row.learning_rate for row in rows]
    assert rates == pytest.approx([short_reference.mosaicml_rate(e) for e in range(28)], abs=2e-3)
    assert [row.image_size for row in rows] == [short_reference.mosaicml_size(e) for e in range(28)]
    assert (rows[0].image_size, rows[27].image_size) == (88, 176)
    validation = theirs["validation"] / theirs["validation_resize"]
    assert (validated.image_size, validated.crop_fraction) == (
        theirs["validation"],
        validation,
    )
    assert (resolved.get("momentum"), resolved.data.label_smoothing) == (
        theirs["momentum"],
        theirs["smoothing"],
    )
    assert (resolved.evaluation.eval_every_epochs, resolved.optimization.ema_every) == (
        theirs["eval_interval"],
        theirs["average_every"],
    )
    assert resolved.optimization.ema_decay ** theirs["half_life"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(("gpus", "decay"), [(8, 5e-4), (16, 1e-3), (1, 6.25e-5)])
def test_recipe_short_scales_decoupled_decay_with_the_batch(gpus, decay):
    """MosaicML's decay of 5e-4 in a step is for 2,048 images."""
    resolved = config.resolve(["--recipe=short"], gpus)
    optimizer = run_plan.make(resolved).optimizer.create()
    assert optimizer.decoupled_decay_rate == pytest.approx(decay)
    assert optimizer.coupled_decay_rate == 0.0
    lines = print_config.describe(resolved, IMAGENET).splitlines()
    assert f"decoupled decay {decay:.3g} of the weights a step at batch {256 * gpus}" in lines


@pytest.mark.parametrize(("schedule", "peak"), [("flash_a", 34.0), ("flash_b", 29.0)])
def test_optimizer_arguments_of_a_published_schedule_have_its_peak(schedule, peak):
    flags = [
        "--optimizer=lars",
        f"--lr_schedule={schedule}",
        "--decoupled_decay",
        "--warmup_epochs=34",
    ]
    planned = run_plan.make(config.resolve(flags, 8))
    assert planned.optimizer.options.learning_rate == planned.schedule.values.peak == peak


@pytest.mark.parametrize(
    ("flags", "ranks", "group"),
    [
        # The table normalizes over 128 images, and a GPU has 32.
        ([], 1024, 4),
        # A GPU has more images than the 64 of the table.
        (["--per_gpu_batch=256"], 16, 1),
        (["--virtual_gpus=4"], 256, 4),
        # The group is a part of a rank.
        (["--virtual_gpus=8"], 128, 4),
        (["--virtual_gpus=8", "--per_gpu_batch=8"], 64, 8),
        # XLA cannot compile a sum over ranks.
        (["--jit_compile"], 1024, 1),
        (["--jit_compile", "--virtual_gpus=8"], 128, 4),
        (["--sync_batch_norm"], 1024, 1),
        (["--bn_group=2"], 1024, 2),
        (["--model=some:network"], 1024, 1),
    ],
)
def test_recipe_mlperf_lars_chooses_a_supported_normalization_group(flags, ranks, group):
    assert config.resolve(["--recipe=mlperf_lars", *flags], ranks).network.bn_group == group


def test_recipes_flash_exp_smooth_labels_as_table_3_says():
    configs = {
        name: config.resolve([f"--recipe={name}"]) for name in NAMES if name.startswith("flash")
    }
    assert [name for name, c in configs.items() if c.data.label_smoothing] == [
        "flash_exp2",
        "flash_exp3",
        "flash_exp4",
    ]


def test_recipes_four_minutes_keep_their_epochs_and_normalize_on_each_gpu():
    configs = {
        n: config.resolve([f"--recipe=four_minutes_{n}"], 2048) for n in ("resnet", "alexnet")
    }
    assert {name: (c.run.epochs, c.optimization.warmup_epochs) for name, c in configs.items()} == {
        "resnet": (90, 31),
        "alexnet": (95, 31),
    }
    assert {c.network.bn_group for c in configs.values()} == {1}


# With NCCL the last buckets have their own threshold.
@pytest.mark.parametrize("late", [None, 4 << 20])
@pytest.mark.parametrize(
    ("name", "shapes"), [("resnet", resnet50_shapes), ("alexnet", alexnet_reference.shapes)]
)
def test_recipes_four_minutes_send_large_gradients_by_the_ring_others_by_masters(
    name, shapes, late
):
    """Uses the sizes of the network's gradients in the order of backpropagation."""
    resolved = config.resolve([f"--recipe=four_minutes_{name}"], 2048)
    settings = run_plan.make(resolved).communication
    elements = [math.prod(shape) for shape in shapes()]
    wire_dtype = WIRE_DTYPES[resolved.communication.compression]
    buckets = fusion.make_buckets(
        range(len(elements))[::-1], elements, wire_dtype, settings.fusion_bytes, late
    )
    limit = 1024 * settings.options.size_switch_kb
    masters = [bucket for bucket in buckets if bucket.bytes < limit]
    ring = [bucket for bucket in buckets if bucket.bytes >= limit]
    assert masters and ring
    assert all(bucket in masters for bucket in buckets if len(bucket.members) > 1)
    assert sum(len(bucket.members) for bucket in masters) > 2 * len(ring)


def test_table_by_number_of_gpus_has_the_batches_of_the_recipes(monkeypatch):
    monkeypatch.setattr(visible_gpus, "in_use", lambda: True)
    text = (pathlib.Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    rows = re.findall(
        r"^\| ([\d,]+(?: to [\d,]+)?) \| ([\d,]+(?: to [\d,]+)?) \| (`--recipe=.*?`) \|", text, re.M
    )
    assert len(rows) == 6
    for number, images, flags in rows:
        numbers = [
            [int(n.replace(",", "")) for n in cell.split(" to ")] for cell in (number, images)
        ]
        for choice in flags.split(" or "):
            words = choice.strip("`").split()
            plans = [
                print_config.plan_epochs(run_plan.make(config.resolve(words, count)), IMAGENET)
                for count in numbers[0]
            ]
            batches = [row.global_batch for rows in plans for row in rows]
            assert [min(batches), max(batches)] == [numbers[1][0], numbers[1][-1]], (number, choice)


def test_recipes_page_lists_each_recipe_once():
    text = (pathlib.Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    (section,) = re.findall(r"^## All recipes\n(.*?)^## ", text, re.M | re.S)
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == NAMES


def test_tuning_page_has_the_settings_of_mlperf_lars(monkeypatch):
    monkeypatch.setattr(visible_gpus, "in_use", lambda: True)
    text = (pathlib.Path(__file__).parents[2] / "docs" / "tuning.md").read_text()
    rows = re.findall(
        r"^\| (\d+) \| ([\d,]+) \| `mlperf_lars` \| (\S+) \| (\d+) \| (\S+) \| (\S+) \| (\d+) \|",
        text,
        re.M,
    )
    assert [int(number) for number, *_ in rows] == [8, 16, 32, 128, 256]
    for number, images, *numbers in rows:
        c = config.resolve(["--recipe=mlperf_lars"], int(number))
        assert run_plan.make(c).base_batch == int(images.replace(",", ""))
        assert [float(n) for n in numbers] == pytest.approx(
            [
                c.optimization.lr,
                c.optimization.warmup_epochs,
                c.get("momentum"),
                c.get("weight_decay"),
                c.run.epochs,
            ],
            rel=3e-3,
        )
