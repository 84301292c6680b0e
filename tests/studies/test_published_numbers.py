"""Tests that numbers on the pages of the studies and of speeds follow from CSV files."""

import csv
import math
import pathlib
import re

import pytest

from hybrid_imagenet import config, print_config
from hybrid_imagenet.schedules import mlperf
from studies import command, recorded_runs, results, statistics

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "studies" / "records"
PAGES = {
    "studies": ROOT / "docs" / "studies" / "README.md",
    "papers": ROOT / "docs" / "papers.md",
    "figure-3-1": RECORDS / "figure-3-1.md",
}
SMALL = ("figure-3-1", "hybrid_256")
CHOSEN_BY_FIGURE = ("figure-3-1", "hybrid_1024")
CHOSEN_BY_HANDOVER = ("handover", "default")
KAPPA = ("figure-3-1", "sgd_kappa_1024")
ADABOUND = ("figure-3-1", "adabound_1024")
NESTEROV = ("handover", "nesterov")


def accuracies(study, arm):
    """Returns the final top-1 accuracy of each seed, in percent."""
    with (RECORDS / f"{study}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["arm"] == arm]
    assert all(row["status"] == "finished" for row in rows)
    return {row["seed"]: 100.0 * float(row["val_top1"]) for row in rows}


def difference(first, second):
    """Returns the mean paired difference over seeds, and half of its 95 % interval."""
    first_accuracies = accuracies(*first)
    second_accuracies = accuracies(*second)
    assert first_accuracies.keys() == second_accuracies.keys()
    assert len(first_accuracies) == 15
    differences = [first_accuracies[seed] - second_accuracies[seed] for seed in first_accuracies]
    estimate = statistics.estimate(differences)
    return estimate.mean, estimate.half_width


def format_estimate(value, half_width):
    return f"{value:+.2f} ± {half_width:.2f}"


@pytest.mark.parametrize(
    ("page", "first", "second"),
    [
        ("figure-3-1", SMALL, ("figure-3-1", "sgd_kappa_256")),
        ("studies", CHOSEN_BY_FIGURE, KAPPA),
        ("studies", CHOSEN_BY_FIGURE, NESTEROV),
        ("studies", CHOSEN_BY_FIGURE, ADABOUND),
        ("studies", CHOSEN_BY_HANDOVER, KAPPA),
        ("studies", CHOSEN_BY_HANDOVER, NESTEROV),
        ("studies", CHOSEN_BY_HANDOVER, ADABOUND),
    ],
)
def test_differences_on_a_page_follow_from_the_csv_files(page, first, second):
    mean, half_width = difference(first, second)
    text = PAGES[page].read_text()
    assert format_estimate(mean, half_width) in text


@pytest.mark.parametrize("arm", [CHOSEN_BY_FIGURE, CHOSEN_BY_HANDOVER])
def test_accuracies_on_the_studies_page_follow_from_the_csv_files(arm):
    estimate = statistics.estimate(list(accuracies(*arm).values()))
    assert f"{estimate.mean:.2f} ± {estimate.half_width:.2f} %" in PAGES["studies"].read_text()


def recipe_runs(arm, column="test_top1"):
    """Returns a column of the runs with the recipe's step, by seed."""
    with (RECORDS / "recipe-step.csv").open() as file:
        return {row["seed"]: row[column] for row in csv.DictReader(file) if row["arm"] == arm}


def recipe_accuracies(arm):
    return {seed: 100 * float(value) for seed, value in recipe_runs(arm).items()}


@pytest.mark.parametrize(
    ("first", "second", "text", "pages"),
    [
        (
            "recipe_256",
            ("figure-3-1", "sgd_kappa_256"),
            "-6.01 ± 0.35",
            ["studies", "papers"],
        ),
        ("recipe_1024", KAPPA, "-2.25 ± 0.71", ["studies", "papers"]),
        ("recipe_x4_256", ("figure-3-1", "sgd_kappa_256"), "-2.04 ± 0.31", ["studies"]),
        ("recipe_x4_1024", KAPPA, "+1.28 ± 0.57", ["studies"]),
        ("recipe_256", ("figure-3-1", "adabound_256"), "-3.79 ± 0.44", ["papers"]),
        ("recipe_1024", ADABOUND, "-4.02 ± 0.34", ["papers"]),
        ("recipe_x4_256", ("recipe-step", "recipe_256"), "+3.96 ± 0.28", []),
        ("recipe_x4_1024", ("recipe-step", "recipe_1024"), "+3.53 ± 0.34", []),
        ("recipe_x4_256", SMALL, "-1.62 ± 0.34", []),
        ("recipe_x4_1024", CHOSEN_BY_HANDOVER, "-1.63 ± 0.46", []),
    ],
)
def test_differences_of_the_recipes_step_follow_from_the_csv_file(first, second, text, pages):
    ours = recipe_accuracies(first)
    study, arm = second
    others = recipe_accuracies(arm) if study == "recipe-step" else accuracies(study, arm)
    assert len(ours) == 15
    assert ours.keys() == others.keys()
    estimate = statistics.estimate([ours[seed] - others[seed] for seed in ours])
    assert format_estimate(estimate.mean, estimate.half_width) == text
    assert text in (RECORDS / "recipe-step.md").read_text()
    for page in pages:
        assert text[1:] in PAGES[page].read_text()


@pytest.mark.parametrize(
    ("arm", "text"),
    [
        ("recipe_256", "79.78 ± 0.39 %"),
        ("recipe_x4_256", "83.74 ± 0.31 %"),
        ("recipe_1024", "76.46 ± 0.44 %"),
        ("recipe_x4_1024", "79.99 ± 0.35 %"),
    ],
)
def test_accuracies_of_the_recipes_step_follow_from_the_csv_file(arm, text):
    estimate = statistics.estimate([100 * float(value) for value in recipe_runs(arm).values()])
    assert f"{estimate.mean:.2f} ± {estimate.half_width:.2f} %" == text
    assert text in (RECORDS / "recipe-step.md").read_text()


@pytest.mark.parametrize("page", ["docs/papers.md", "studies/claims.csv"])
def test_number_of_runs_that_end_at_80_percent_follows_from_the_csv_file(page):
    at_256 = sum(value >= 80 for value in recipe_accuracies("recipe_256").values())
    assert max(recipe_accuracies("recipe_1024").values()) < 80
    assert f"in {at_256} of 15 runs at 256 and in none at 1,024" in (ROOT / page).read_text()


@pytest.mark.parametrize(
    ("arm", "text"),
    [
        ("recipe_256", "+9.33 ± 0.44"),
        ("recipe_x4_256", "+7.33 ± 0.49"),
        ("recipe_1024", "+9.93 ± 0.69"),
        ("recipe_x4_1024", "+8.46 ± 0.95"),
    ],
)
def test_training_accuracy_after_the_warmup_with_the_recipes_step_rises(arm, text):
    changes = []
    for values in recipe_runs(arm, "train_top1_by_epoch").values():
        third, fourth = [100 * float(value) for value in values.split()[2:4]]
        changes.append(fourth - third)
    estimate = statistics.estimate(changes)
    assert format_estimate(estimate.mean, estimate.half_width) == text
    assert text in (RECORDS / "recipe-step.md").read_text()


@pytest.mark.parametrize(
    ("batch", "step", "factor"),
    [(64, 0.23, 16), (256, 0.47, 16), (1024, 0.94, 16), (1024, 1.9, 32)],
)
def test_steps_of_the_studies_are_the_stated_multiples_of_the_default_of_the_recipe(
    batch, step, factor
):
    assert round(step / mlperf.tuned_step(batch)) == factor
    row = rf"^\| {batch:,} \| `continuous`, relative step {step:g}, {factor} times the recipe's"
    assert re.search(row, (ROOT / "docs" / "methods.md").read_text(), re.M)
    assert "16 times the default of `--recipe=hybrid`" in PAGES["studies"].read_text()


def printed_steps():
    """Returns the relative steps that --print_config prints for the recipe at some batches."""
    steps = set()
    for batch in (64, 256, 512, 1024, 3072, 6144):
        flags = ["--recipe=hybrid", "--per_gpu_batch=32", f"--virtual_gpus={batch // 32}"]
        description = print_config.describe(config.resolve(flags), 12_500)
        (step,) = re.findall(r"^relative step (\S+) in epoch 11 ", description, re.M)
        steps.add(step)
    return steps


def test_pages_call_only_the_step_of_the_recipe_the_default():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *RECORDS.glob("*.md")]
    default_steps = set()
    for page in pages:
        without_code = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.M | re.S)
        text = " ".join(without_code.split())
        assert not re.findall(r"default readings|default hand-over", text), page
        # Cells of a table and sentences; a step that is a multiple of the default is named as such.
        for part in re.split(r"(?<=[^\d])\. |\|", text):
            if re.search(r"\bdefault\b", part) and "times the default" not in part:
                default_steps |= set(re.findall(r"relative step (?:of )?(\d\.\d+)", part))
    assert default_steps
    assert {f"{float(step):.2g}" for step in default_steps} <= printed_steps()


def test_difference_from_nesterov_is_not_significant():
    mean, half_width = difference(CHOSEN_BY_HANDOVER, NESTEROV)
    assert math.fabs(mean) < half_width
    assert difference(CHOSEN_BY_FIGURE, NESTEROV)[0] < 0


@pytest.mark.parametrize(
    "name", ["warmup-epochs-256", "precision", "initialization", "batch_size_control"]
)
def test_seeds_that_would_decide_a_claim_follow_from_the_runs(name):
    study = command.STUDIES[name]
    with (RECORDS / f"{name}.csv").open() as file:
        rows = list(csv.DictReader(file))
    arms = []
    for arm in study.arms:
        of_arm = {
            int(row["seed"]): recorded_runs._result(row) for row in rows if row["arm"] == arm.name
        }
        arms.append(results.ArmResults(arm, of_arm, target=0.8))
    seeds = {str(verdict.seeds) for verdict in results.verdicts(study, arms)}
    open_claims = PAGES["studies"].read_text().partition("## What is open")[2]
    stated = re.findall(rf"\| `{name}` \| [^|]+ \| (\d+) \|", open_claims)
    assert stated
    assert set(stated) <= seeds


def test_gpu_speeds_in_readme_and_on_the_performance_page_follow_from_the_csv_file():
    with (ROOT / "docs" / "gpu-speed.csv").open() as file:
        rows = list(csv.DictReader(file))
    speeds = {f"{int(row['images_per_second']):,}" for row in rows}
    readme = (ROOT / "README.md").read_text()
    tested = readme.partition("## What has been tested")[2].partition("## Documentation")[0]
    of_gpus = [line for line in tested.splitlines() if line.startswith("| One H")]
    in_readme = set(re.findall(r"\d,\d{3}", "".join(of_gpus)))
    assert len(in_readme) == 6
    assert in_readme <= speeds
    page = (ROOT / "docs" / "performance.md").read_text()
    assert not {speed for speed in speeds if speed not in page}
