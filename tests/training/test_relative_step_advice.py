"""The relative step of a configuration: --print_config agrees with the optimizers."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import config, print_config, run_plan
from hybrid_imagenet.config import Origin
from hybrid_imagenet.training import relative_step_advice

IMAGENET = 1_281_167


def lines(*flags, gpus=24):
    return print_config.describe(config.resolve(flags, gpus), IMAGENET).splitlines()


def advice(*flags, gpus=24):
    """Returns the lines of --print_config on the relative step."""
    return [
        line for line in lines(*flags, gpus=gpus) if line.startswith(("relative step", "warning"))
    ]


@pytest.mark.parametrize(
    "flags",
    [
        *([f"--hybrid_handover={handover}"] for handover in ("continuous", "reset", "rescale")),
        ["--hybrid_handover=continuous", "--lars_variant=larc", "--lars_eta=0.02"],
        ["--hybrid_handover=reset", "--lars_variant=larc", "--lars_eta=0.02"],
        ["--optimizer=lars"],
        ["--optimizer=lars", "--lars_nesterov"],
        ["--optimizer=lamb"],
    ],
)
def test_relative_step_equals_the_distance_that_the_optimizer_moves_a_layer(flags):
    """Takes 120 updates with one gradient, and restores the weights before each update."""
    resolved = config.resolve(["--weight_decay=0", *flags], 24)
    values = {
        "learning_rate": 2.4,
        "momentum": 0.9,
        "phase": 1.0,
        "lower_bound": 2.4,
        "upper_bound": 2.4,
    }
    random = np.random.default_rng(1)
    start, gradient = (random.normal(size=(4, 5)).astype(np.float32) for _ in range(2))
    weights = keras.Variable(start)
    optimizer = run_plan.make(resolved).optimizer.create()
    optimizer.build([weights])
    optimizer.hyperparameters.assign(values)

    @tf.function
    def step():
        weights.assign(start)
        optimizer.apply([tf.constant(gradient)])

    for _ in range(120):
        step()
    moved = np.linalg.norm(weights.numpy() - start) / np.linalg.norm(start)
    assert relative_step_advice.at_step(run_plan.make(resolved).optimizer, values) == pytest.approx(
        moved, rel=1e-4
    )


def test_relative_step_without_lars_is_none():
    warm = {"learning_rate": 2.4, "momentum": 0.9, "phase": 0.0}
    assert relative_step_advice.at_step(run_plan.make(config.resolve([])).optimizer, warm) is None
    for flags in (
        ["--recipe=gradual_warmup"],
        ["--recipe=adabound"],
        ["--lars_variant=none"],
        ["--epochs=5"],
    ):
        resolved = config.resolve(flags, 24)
        assert relative_step_advice.peak(run_plan.make(resolved)) is None
        assert advice(*flags) == []


def test_relative_step_line_names_its_factors_and_the_tuned_step():
    assert advice("--hybrid_handover=continuous", "--lars_eta=0.058") == [
        "relative step 0.14 in epoch 11 (learning rate 2.4 x eta 0.058 x gradient factor 0.1 / (1 -"
        " momentum 0.9)); tuned LARS has 0.14 at batch 6144"
    ]
    (line,) = advice("--hybrid_handover=reset", "--lars_eta=0.0058")
    assert line.startswith(
        "relative step 0.14 in epoch 11 (learning rate 2.4 x eta 0.0058 x gradient factor 1 /"
    )
    (line,) = advice("--recipe=mlperf_lars", gpus=1024)
    assert line.startswith("relative step 0.35 in epoch 17 (learning rate 21.2 x eta 0.001 ")
    assert "handover" not in line


def test_relative_step_of_lamb_is_compared_with_the_rate_of_its_authors():
    lamb = ["--optimizer=lamb", "--lr_scaling=none", "--lr_schedule=poly", "--warmup_epochs=5"]
    assert advice(*lamb, "--lr=0.02") == [
        "relative step 0.02 in epoch 6 (LAMB's learning rate); its authors have 0.017 at batch 6144"
    ]
    _, warning = advice(*lamb, "--lr=0.1")
    assert warning.startswith(
        "warning: the relative step of LAMB, 0.1, is 5.8 times larger than its authors have "
    )
    assert warning.endswith("at batch 6144, 0.017: --lr=0.0173 gives that")


@pytest.mark.parametrize(
    ("flags", "gpus", "side", "remedy"),
    [
        (
            ["--hybrid_handover=continuous", "--lars_eta=0.001"],
            24,
            "59 times smaller",
            "--lars_eta=0.0587 ",
        ),
        (
            ["--optimizer=lars", "--lr_schedule=poly", "--warmup_epochs=5", "--lr=100"],
            24,
            "170 times larger",
            "--lr=0.587 ",
        ),
        (["--recipe=flash_a", "--lars_eta=0.01"], 1024, "9.6 times larger", "--lars_eta=0.00104 "),
    ],
)
def test_relative_step_far_from_the_tuned_one_warns_with_a_working_remedy(
    flags, gpus, side, remedy
):
    _, warning = advice(*flags, gpus=gpus)
    assert warning.startswith("warning: ")
    assert side in warning
    assert remedy in warning
    line, *others = advice(*flags, remedy.strip(), gpus=gpus)
    assert not others
    step = line.split()[2]
    assert f"tuned LARS has {step} " in line


def test_peak_is_after_a_warmup_inside_an_epoch_or_a_batch_growth():
    top = relative_step_advice.peak(
        run_plan.make(
            config.resolve(["--optimizer=lars", "--lr_schedule=poly", "--warmup_epochs=5.5"], 24)
        )
    )
    assert (top.epoch, top.learning_rate, top.batch) == (6, pytest.approx(2.4), 6144)
    flags = [
        "--optimizer=lars",
        "--lr_schedule=constant",
        "--warmup_epochs=1",
        "--batch_schedule=30:*2",
    ]
    top = relative_step_advice.peak(run_plan.make(config.resolve(flags, 24)))
    assert (top.epoch, top.learning_rate, top.batch) == (31, pytest.approx(4.8), 12288)


@pytest.mark.parametrize(
    ("gpus", "step"),
    [
        # Between MLPerf's rows at 4,096 and 8,192.
        (24, 0.100 + (0.170 - 0.100) * np.log2(6144 / 4096)),
        (32, 0.170),
        (256, 0.512),
        # Batches outside the table follow the square-root rule.
        (1, 0.074 * (256 / 1632) ** 0.5),
        (1024, 0.512 * (262144 / 67840) ** 0.5),
    ],
)
@pytest.mark.parametrize(
    "flags", [[], ["--hybrid_handover=reset"], ["--hybrid_ramp_epochs=3"], ["--lars_variant=larc"]]
)
def test_peak_of_hybrid_after_the_ramp_is_the_tuned_step_of_its_batch(gpus, step, flags):
    resolved = config.resolve(flags, gpus)
    assert relative_step_advice.peak(run_plan.make(resolved)).value == pytest.approx(step, rel=2e-3)
    (line,) = [line for line in lines(*flags, gpus=gpus) if line.startswith("lars_eta ")]
    assert line.endswith(f"MLPerf's table at batch {256 * gpus}")
    # There is no warning after the first line.
    assert advice(*flags, gpus=gpus)[1:] == []


def test_lars_eta_that_is_set_is_not_replaced_by_the_tuned_one():
    for flags in (["--lars_eta=0.001"], ["--recipe=hybrid", "--lars_eta=0.001"]):
        assert config.resolve(flags, 24).get("lars_eta") == 0.001
    for flag in ("--optimizer=lars", "--optimizer=sgd", "--lr=0", "--lars_variant=none"):
        assert Origin.BATCH not in config.resolve([flag], 24).origins.values()
    assert config.resolve([], 24).get("lars_eta") != config.resolve([], 32).get("lars_eta")


def test_peak_of_the_papers_clusters_is_the_tuned_step_of_their_batches():
    root = pathlib.Path(__file__).parents[2]
    for number, batch, step in ((1, 6144, 0.141), (2, 3072, 0.102)):
        resolved = config.resolve([f"--flagfile={root}/flags/cluster{number}.flags"], 24)
        top = relative_step_advice.peak(run_plan.make(resolved))
        assert (top.batch, top.value) == (batch, pytest.approx(step, abs=6e-4))


def test_relative_step_during_the_ramp_is_none():
    resolved = config.resolve(["--hybrid_ramp_epochs=2"], 24)
    schedule = run_plan.make(resolved).schedule.values
    values = {
        e: relative_step_advice.at_step(
            run_plan.make(resolved).optimizer, schedule(e, e + 0.01, 6144)
        )
        for e in (9.9, 10.0, 11.99, 12.0, 13.0)
    }
    assert [e for e, value in values.items() if value is None] == [9.9, 10.0, 11.99]
    assert values[13.0] == pytest.approx(0.9 * values[12.0])
    assert relative_step_advice.peak(run_plan.make(resolved)).epoch == 13
