"""The plan of a run: its types, its numbers for each recipe, and the difference of two plans."""

import dataclasses
import re

import pytest

from hybrid_imagenet import config, recipes, run_plan
from hybrid_imagenet.config import Origin
from hybrid_imagenet.errors import SharedError
from hybrid_imagenet.optimizers.registry import (
    AdaBoundOptions,
    HybridOptions,
    LarsOptions,
    SgdOptions,
)
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.schedules import training_schedule
from hybrid_imagenet.schedules.training_schedule import (
    CosineDecay,
    ExponentialDecay,
    FlashADecay,
    FlashBDecay,
    MLPerfDecay,
    PolynomialDecay,
    StepDecay,
)

# For each recipe on 8 GPUs: options of the optimizer, schedule, images per update, and the peak of
# the learning rate.
PLANS = {
    "adabound": (AdaBoundOptions, ExponentialDecay, 8 * 256, 1e-3),
    "flash_a": (LarsOptions, FlashADecay, 8 * 32, 34.0),
    "flash_b": (LarsOptions, FlashBDecay, 8 * 32, 29.0),
    "flash_exp1": (LarsOptions, FlashADecay, 8 * 16, 34.0),
    "flash_exp2": (LarsOptions, FlashBDecay, 8 * 16, 29.0),
    "flash_exp3": (LarsOptions, FlashBDecay, 8 * 27, 29.0),
    "flash_exp4": (LarsOptions, FlashADecay, 8 * 16, 34.0),
    "flash_reference": (LarsOptions, PolynomialDecay, 8 * 32, 29.0),
    # MLPerf's smallest point is for 1,632 images. Its learning rate is not scaled down.
    "four_minutes_alexnet": (LarsOptions, MLPerfDecay, 8 * 64, 7.4),
    "four_minutes_resnet": (LarsOptions, MLPerfDecay, 8 * 32, 7.4),
    "gradual_warmup": (SgdOptions, StepDecay, 8 * 32, 0.1 * 8 * 32 / 256),
    "hal": (SgdOptions, StepDecay, 8 * 208, 0.1 * 8 * 208 / 256),
    "hybrid": (HybridOptions, ExponentialDecay, 8 * 256, 0.1 * 8),
    "hybrid_p40": (HybridOptions, ExponentialDecay, 8 * 128, 0.1 * 8),
    "lu_as_printed": (HybridOptions, ExponentialDecay, 8 * 256, 0.1 * 8),
    "mlperf_lars": (LarsOptions, MLPerfDecay, 8 * 32, 7.4),
    "short": (SgdOptions, CosineDecay, 8 * 256, 2.048),
}


def make(*words, ranks=8):
    return run_plan.make(config.resolve(words, ranks))


def plan_recipe(name):
    # The first stage of this recipe needs a multiple of 27 images.
    batch = ["--per_gpu_batch=27"] if name == "flash_exp3" else []
    return make(f"--recipe={name}", *batch)


def test_plans_has_every_recipe():
    assert list(PLANS) == recipes.names()


@pytest.mark.parametrize("name", PLANS)
def test_plan_of_a_recipe_has_its_optimizer_schedule_batch_and_learning_rate(name):
    options, decay, batch, peak = PLANS[name]
    plan = plan_recipe(name)
    assert type(plan.optimizer.options) is options
    assert type(plan.schedule.decay) is decay
    assert (plan.workers, plan.ranks, plan.base_batch) == (8, 8, batch)
    assert plan.peak_learning_rate() == pytest.approx(peak)
    assert plan.optimizer.options.learning_rate == pytest.approx(peak)
    assert plan.schedule.values.peak == pytest.approx(peak)


@pytest.mark.parametrize("name", PLANS)
def test_plan_of_a_recipe_made_twice_has_no_difference(name):
    assert run_plan.differences(plan_recipe(name), plan_recipe(name)) == []


def parts(value):
    """Yields a plan and all dataclasses in it."""
    if dataclasses.is_dataclass(value):
        yield value
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for member in value:
            yield from parts(member)


@pytest.mark.parametrize("name", PLANS)
def test_parts_of_a_plan_are_frozen_and_documented(name):
    for part in parts(plan_recipe(name)):
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, None)
        if type(part).__module__ == run_plan.__name__:
            for field in dataclasses.fields(part):
                described = re.search(rf"^ +{field.name}: \S", type(part).__doc__, re.M)
                assert described, (type(part), field.name)


def test_plan_of_virtual_gpus_counts_them_as_workers():
    plan = make("--virtual_gpus=4", "--per_gpu_batch=2", "--bn_group=2", ranks=3)
    assert (plan.workers, plan.ranks, plan.base_batch) == (12, 3, 24)
    assert (plan.network.parts_per_rank, plan.network.ranks_per_group) == (2, 1)
    assert (plan.normalized_gpus, plan.validation.batch) == (2, 8)


def test_plan_of_batches_that_grow_has_the_batch_of_each_epoch():
    plan = make("--per_gpu_batch=8", "--batch_schedule=2:*2,4:64x4", ranks=2)
    assert [plan.global_batch(epoch) for epoch in (0, 1, 2, 3, 4, 50)] == [16, 16, 32, 32, 512, 512]
    assert plan.values_at(20.0)["learning_rate"] == pytest.approx(
        plan.schedule.values(20.0, 20.0, 512)["learning_rate"]
    )


def test_plan_ends_after_its_epochs_or_its_steps():
    order = SampleOrder(100, seed=0)
    plan = make("--epochs=1.5", "--warmup_epochs=1", "--per_gpu_batch=5", ranks=2)
    assert [span.steps for span in plan.length(order).spans(plan.global_batch)] == [10, 5]
    short = make("--epochs=1.5", "--warmup_epochs=1", "--max_steps=4", ranks=2)
    assert short.length(order).is_over(Cursor(0, 40), 4)


def test_plan_of_decoupled_decay_follows_the_batch():
    plan = make("--optimizer=sgd", "--decoupled_decay", "--weight_decay=1e-4", "--per_gpu_batch=64")
    assert plan.optimizer.options.weight_decay == 1e-4 * 8 * 64 / training_schedule.REFERENCE_BATCH


@pytest.mark.parametrize(
    ("origin", "compiles", "expected"),
    [
        (Origin.COMMAND_LINE, True, run_plan.XlaUse.ON),
        (Origin.EARLIER_START, True, run_plan.XlaUse.ON),
        (Origin.HARDWARE, True, run_plan.XlaUse.IF_POSSIBLE),
        (Origin.RUN, True, run_plan.XlaUse.IF_POSSIBLE),
        (Origin.RUN, False, run_plan.XlaUse.OFF),
    ],
)
def test_plan_requires_xla_only_if_somebody_has_set_it(origin, compiles, expected):
    resolved = config.resolve([]).replace(origin, jit_compile=compiles)
    assert run_plan.make(resolved).step.xla is expected


def test_plan_of_groups_that_do_not_contain_all_gpus_is_an_error():
    with pytest.raises(SharedError, match="--bn_group=3 does not divide 8 GPUs"):
        make("--bn_group=3")


def test_differences_of_more_ranks_are_what_follows_from_their_number():
    before = make("--recipe=hybrid", ranks=2)
    after = make("--recipe=hybrid", ranks=4)
    old = before.optimizer.options
    new = after.optimizer.options
    assert run_plan.differences(before, after) == [
        "workers: 2 -> 4",
        "optimizer.options.learning_rate: 0.2 -> 0.4",
        "optimizer.options.trust_coefficient:"
        f" {old.trust_coefficient:.6g} -> {new.trust_coefficient:.6g}",
    ]


def test_differences_of_another_schedule_list_the_options_of_both():
    before = make("--optimizer=sgd", "--lr_schedule=exponential")
    after = make("--optimizer=sgd", "--lr_schedule=poly", "--lr_power=3")
    assert run_plan.differences(before, after) == [
        "schedule.decay: ExponentialDecay -> PolynomialDecay",
        "schedule.decay.lr_decay: 0.9 -> not set",
        "schedule.decay.lr_decay_exponent: epoch-T-1 -> not set",
        "schedule.decay.lr_power: not set -> 3",
        "schedule.decay.lr_final: not set -> 0",
    ]


def test_differences_of_a_longer_batch_schedule_list_the_new_stage():
    before = make("--per_gpu_batch=8")
    after = make("--per_gpu_batch=8", "--batch_schedule=3:16x2")
    assert run_plan.differences(before, after) == [
        "batches.stages.1: not set -> BatchStage",
        "batches.stages.1.epoch: not set -> 3",
        "batches.stages.1.per_gpu_batch: not set -> 16",
        "batches.stages.1.accumulation: not set -> 2",
    ]


@pytest.mark.parametrize(
    "flag",
    ["--run_dir=other", "--resume", "--max_steps=3", "--data_threads=3", "--progress=plain"],
)
def test_differences_leave_out_how_a_start_reads_and_reports(flag, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_plan.differences(make(), make(flag)) == []
