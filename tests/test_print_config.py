"""Tests the tables that --print_config prints."""

import pytest

from hybrid_imagenet import config, main, print_config, run_plan
from hybrid_imagenet.config import flag_checks
from hybrid_imagenet.errors import UserError

FLAGS = ["--epochs=6", "--warmup_epochs=3", "--per_gpu_batch=32"]


def test_describe_lists_every_setting_with_its_origin(tmp_path):
    flagfile = tmp_path / "some.flags"
    flagfile.write_text("--seed=7\n")
    resolved = config.resolve(["--recipe=hybrid_p40", f"--flagfile={flagfile}", *FLAGS], 2)
    lines = {
        line.split()[0]: line for line in print_config.describe(resolved, 1437).splitlines() if line
    }
    assert lines["precision"].split() == ["precision", "float32", "recipe", "hybrid_p40"]
    assert lines["seed"].split() == ["seed", "7", "flagfile"]
    assert lines["epochs"].split() == ["epochs", "6", "command", "line"]
    assert lines["momentum"].split() == ["momentum", "0.9", "default"]
    assert lines["batch_schedule"].split() == ["batch_schedule", "none", "default"]
    assert set(resolved.as_dict()) <= set(lines)


def test_describe_lists_rate_momentum_batch_and_steps_of_each_epoch():
    text = print_config.describe(config.resolve([*FLAGS, "--batch_schedule=2:*2,4:64x4"], 2), 1437)
    rows = text.split("\n\n")[-1].splitlines()[1:]
    assert rows[0].split() == [
        "1",
        "AdaBound",
        "0.2",
        "0.06829",
        "to",
        "643.09",
        "0.9000",
        "32",
        "64",
        "23",
        "224",
    ]
    assert rows[3].split() == ["4", "SGD", "0.4", "0.9000", "64", "128", "11", "224"]
    assert rows[4].split() == ["5", "SGD", "1.44", "0.9000", "64", "x", "4", "512", "3", "224"]


def test_summarize_lists_only_settings_without_their_default():
    resolved = config.resolve(["--recipe=hybrid_p40", "--seed=0", "--print_config", *FLAGS], 2)
    settings, results, table, more = print_config.summarize(resolved, 1437).split("\n\n")
    names = [line.split()[0] for line in settings.splitlines()]
    set_flags = ["recipe", "epochs", "seed", "precision", "per_gpu_batch", "warmup_epochs"]
    # The dataset and the batch set these.
    derived_flags = ["augmentation", "lars_eta"]
    assert sorted(names) == sorted(set_flags + derived_flags)
    assert "precision" in settings and "recipe hybrid_p40" in settings
    assert results.startswith("1437 training images, 2 GPUs, ")
    assert table.splitlines()[1].split()[0] == "1"
    others = len(resolved.as_dict()) - len(names)
    assert (
        more
        == f"{others} other settings have their defaults. --print_config=all prints them, and every"
        " epoch."
    )


def test_summarize_of_defaults_still_names_the_recipe():
    first = print_config.summarize(config.resolve(["--epochs=12"], 2), 1437).splitlines()[0]
    assert first.split() == ["recipe", "hybrid", "default"]


@pytest.mark.parametrize(
    ("flags", "epochs"),
    [
        (["--recipe=hybrid"], [1, 11, 90]),
        (["--recipe=gradual_warmup"], [1, 6, 30, 31, 60, 61, 80, 81, 90]),
        (
            ["--recipe=gradual_warmup", "--batch_schedule=40:*2", "--lr_schedule=poly"],
            [1, 6, 40, 41, 90],
        ),
        (
            [
                "--recipe=gradual_warmup",
                "--lr_schedule=cosine",
                "--image_size_schedule=0:128,18:224",
            ],
            [1, 6, 19, 90],
        ),
        (["--recipe=gradual_warmup", "--epochs=1", "--warmup_epochs=0"], [1]),
    ],
)
def test_boundaries_are_the_epochs_in_which_the_schedule_changes(flags, epochs):
    rows = print_config.plan_epochs(run_plan.make(config.resolve(flags, 64)), 100_000)
    assert [rows[index].epoch for index in print_config.boundaries(rows)] == epochs


def test_summarize_marks_omitted_epochs_with_an_ellipsis():
    table = (
        print_config.summarize(config.resolve(["--recipe=hybrid"], 2), 10_000)
        .split("\n\n")[2]
        .splitlines()[1:]
    )
    assert [line.split()[0] for line in table] == ["1", "...", "11", "...", "90"]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["--print_config"], "other settings have their defaults"),
        (["--print_config=true"], "other settings have their defaults"),
        (["--print-config=all"], "jit_compile"),
        (["--print_config=all", "--print_config_gpus=4"], "jit_compile"),
    ],
)
def test_print_config_prints_all_settings_only_with_all(words, printed, capsys):
    assert main.main([*words, "--dataset=digits", "--per_gpu_batch=32"]) == 0
    output = capsys.readouterr().out
    assert printed in output
    assert ("jit_compile" in output) == (printed == "jit_compile")
    assert "1500 training images" in output


def test_plan_has_the_steps_of_a_loop_over_the_examples():
    resolved = config.resolve([*FLAGS, "--batch_schedule=2:*2,4:64x4"], 2)
    rows = print_config.plan_epochs(run_plan.make(resolved), 1437)
    offset = 0
    expected = []
    for epoch in range(6):
        batch = 2 * (32 if epoch < 2 else 64 if epoch < 4 else 256)
        steps = 0
        while offset < 1437:
            offset += batch
            steps += 1
        offset -= 1437
        expected.append(steps)
    assert [row.steps for row in rows] == expected


def test_plan_with_a_batch_larger_than_the_data_raises():
    resolved = config.resolve([*FLAGS, "--batch_schedule=3:512x2"], 2)
    flag_checks.check_data(resolved, 2048)
    with pytest.raises(
        UserError,
        match=r"--batch_schedule=3:512x2: 512 images x 2 .*batch of 2048 from epoch 3 .*1437",
    ):
        print_config.summarize(resolved, 1437)
    with pytest.raises(
        UserError,
        match=r"--per_gpu_batch=32: 32 images on 64 GPUs make a batch of 2048 from epoch 0",
    ):
        flag_checks.check_data(config.resolve([*FLAGS, "--batch_schedule=3:512x2"], 64), 1437)


@pytest.mark.parametrize(
    "flags", [["--optimizer=adamw"], ["--optimizer=lamb"], ["--optimizer=muon"]]
)
def test_warmup_of_optimizers_with_small_rates_begins_at_zero(flags):
    rows = print_config.plan_epochs(
        run_plan.make(config.resolve([*FLAGS, *flags, "--lr=0.02", "--lr_scaling=none"], 2)), 1437
    )
    rates = [row.learning_rate for row in rows]
    assert rates[0] == 0
    assert rates[:4] == sorted(set(rates[:4]))
    # Steps do not divide an epoch evenly, so an epoch may begin less than a step late.
    expected = [0.02 / 3, 0.04 / 3, 0.02]
    assert rates[1:4] == pytest.approx(expected, rel=1 / rows[0].steps)


@pytest.mark.parametrize("optimizer", ["sgd", "lars", "adabound"])
def test_warmup_of_other_optimizers_begins_at_a_tenth(optimizer):
    assert config.resolve([f"--optimizer={optimizer}"]).get("warmup_start_lr") == 0.1
