"""Tests that numbers on the pages about studies follow from the runs in studies/records."""

import csv
import math
import pathlib

import pytest

from studies.hypotheses import p_shares
from studies.statistics import estimate, oscillation, welch

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ROOT / "studies" / "records"
STUDIES = ROOT / "docs" / "studies" / "README.md"
CLAIMS = ROOT / "studies" / "claims.csv"
PAPERS = ROOT / "docs" / "papers.md"
METHODS = ROOT / "docs" / "methods.md"
HYBRID = ROOT / "docs" / "hybrid.md"
RECIPES = ROOT / "docs" / "recipes.md"
FIGURE = RECORDS / "figure-3-1.md"
HANDOVER = RECORDS / "handover.md"
CURVES = RECORDS / "rate-curves.md"

# Hybrid with its default readings at 1,024 images, with two relative steps of LARS.
STEP_1_9 = ("figure-3-1", "hybrid_1024")
STEP_0_94 = ("handover", "default")
SGD_1024 = ("figure-3-1", "sgd_kappa_1024")
ADABOUND_1024 = ("figure-3-1", "adabound_1024")
NESTEROV_1024 = ("handover", "nesterov")
CHOSEN_1024 = ("handover", "handover")
ADABOUND_CLOSED = ("rate-curves", "adabound")
ADABOUND_CLOSED_256 = ("adabound-bounds-256", "adabound")
ADABOUND_WARMUP_256 = ("adabound-bounds-256", "warmup_bounds")
NESTEROV_TUNED = ("rate-curves", "nesterov")
CHOSEN_256 = ("handover-256", "handover")
T_256 = "warmup-epochs-256"
FULL_FORM = RECORDS / "full_form_small.md"


def runs(study, arm):
    """Returns the runs of an arm by seed."""
    with (RECORDS / f"{study}.csv").open() as file:
        return {int(row["seed"]): row for row in csv.DictReader(file) if row["arm"] == arm}


def top1(run):
    return 100 * float(run["val_top1"])


def curve(run, split):
    return [100 * float(value) for value in run[f"{split}_top1_by_epoch"].split()]


def zigzag(run):
    """Returns the oscillation in the second half of the run."""
    values = curve(run, "val")
    return oscillation(values[len(values) // 2 :])


def change_after_warmup(run):
    """Returns the change of training top-1 in the epoch after T, which is 3 in these studies."""
    third, fourth = curve(run, "train")[2:4]
    return fourth - third


def difference(first, second, metric=top1, seeds=range(1000)):
    """Returns the mean difference of a metric, first arm minus second, with its interval.

    Runs with equal seeds form pairs.
    """
    first_runs = runs(*first)
    second_runs = runs(*second)
    common_seeds = sorted(first_runs.keys() & second_runs.keys() & set(seeds))
    return estimate([metric(first_runs[seed]) - metric(second_runs[seed]) for seed in common_seeds])


def epochs_to_target(run):
    return float(run["epochs_to_target"] or "nan")


def runs_that_reach_the_target(arm):
    return sum(bool(run["epochs_to_target"]) for run in runs(*arm).values())


def delay(first, second):
    """Returns how many epochs later the first arm reaches its target.

    Only seeds with which both arms reach it count.
    """
    first_runs = runs(*first)
    second_runs = runs(*second)
    delays = [
        epochs_to_target(first_runs[seed]) - epochs_to_target(second_runs[seed])
        for seed in sorted(first_runs.keys() & second_runs.keys())
    ]
    return estimate([value for value in delays if not math.isnan(value)])


def mean_of(arm, metric=top1):
    finished = [run for run in runs(*arm).values() if run["status"] == "finished"]
    return estimate([metric(run) for run in finished])


def check(result, text, pages):
    """Compares an estimate with a text such as "+1.72 ± 0.72", and looks for the text in pages."""
    mean, half_width = (float(number) for number in text.split(" ± "))
    digits = len(text.split(".")[-1])
    assert result.mean == pytest.approx(mean, abs=0.51 * 10**-digits)
    assert result.half_width == pytest.approx(half_width, abs=0.51 * 10**-digits)
    for page in pages:
        assert text in page.read_text(), page


@pytest.mark.parametrize(
    ("first", "second", "text", "pages"),
    [
        (
            ("full_form_small", "hybrid"),
            ("full_form_small", "gradual_sgd"),
            "-4.86 ± 9.07",
            [STUDIES, CLAIMS, PAPERS, FULL_FORM],
        ),
        (
            ("full_form_small", "hybrid_poly"),
            ("full_form_small", "hybrid"),
            "13.45 ± 0.84",
            [STUDIES, HYBRID, RECIPES, FULL_FORM],
        ),
        (
            ("full_form_small", "hybrid_poly"),
            ("full_form_small", "lars_poly"),
            "+0.33 ± 4.21",
            [STUDIES, CLAIMS, PAPERS, FULL_FORM],
        ),
        (STEP_1_9, SGD_1024, "+1.72 ± 0.72", [STUDIES, CLAIMS, FIGURE]),
        (STEP_0_94, SGD_1024, "+2.91 ± 0.71", [STUDIES, CLAIMS, FIGURE]),
        (STEP_0_94, ("figure-3-1", "sgd_poly_1024"), "+2.67 ± 0.57", [FIGURE]),
        (STEP_0_94, ("figure-3-1", "lars_kappa_1024"), "+3.01 ± 0.68", [FIGURE]),
        (STEP_1_9, ("figure-3-1", "sgd_poly_1024"), "+1.48 ± 0.73", [FIGURE]),
        (STEP_1_9, ("figure-3-1", "lars_kappa_1024"), "+1.82 ± 0.76", [FIGURE]),
        (STEP_1_9, NESTEROV_1024, "-1.10 ± 0.89", [STUDIES]),
        (STEP_0_94, NESTEROV_1024, "+0.09 ± 0.75", [STUDIES]),
        (STEP_1_9, ADABOUND_1024, "-0.05 ± 0.41", [STUDIES, CLAIMS, FIGURE]),
        (STEP_0_94, ADABOUND_1024, "+1.14 ± 0.40", [STUDIES, CLAIMS]),
        (STEP_0_94, STEP_1_9, "1.19 ± 0.35", [STUDIES]),
        (STEP_0_94, ADABOUND_CLOSED, "+2.11 ± 0.50", [CLAIMS, CURVES]),
        (STEP_0_94, NESTEROV_TUNED, "-0.25 ± 0.48", [CURVES]),
        (CHOSEN_1024, NESTEROV_TUNED, "1.4 ± 0.4", [STUDIES]),
        (ADABOUND_CLOSED, SGD_1024, "0.80 ± 0.62", [CLAIMS, STUDIES, PAPERS]),
        (ADABOUND_1024, SGD_1024, "+1.77 ± 0.61", [CLAIMS]),
        (
            ("figure-3-1", "hybrid_256"),
            ("figure-3-1", "sgd_kappa_256"),
            "-0.43 ± 0.34",
            [CLAIMS, FIGURE],
        ),
        (("figure-3-1", "hybrid_256"), ("figure-3-1", "adabound_256"), "+1.79 ± 0.32", [CLAIMS]),
        (("figure-3-1", "adabound_256"), ("figure-3-1", "sgd_kappa_256"), "-2.22 ± 0.37", [CLAIMS]),
        (
            ("warmup-method", "linear_256"),
            ("warmup-method", "adabound_256"),
            "0.27 ± 0.23",
            [CLAIMS, STUDIES],
        ),
        (
            ("warmup-method", "adabound_1024"),
            ("warmup-method", "linear_1024"),
            "-0.06 ± 0.53",
            [CLAIMS],
        ),
        (("warmup_epochs", "T3"), ("warmup_epochs", "T1"), "0.81 ± 1.24", [CLAIMS]),
        (("warmup_epochs", "T3"), ("warmup_epochs", "T5"), "1.14 ± 2.08", [CLAIMS]),
        (("warmup_epochs", "T1"), ("warmup_epochs", "T5"), "0.34 ± 0.90", [CLAIMS]),
        ((T_256, "T3"), (T_256, "T1"), "0.17 ± 0.33", [CLAIMS]),
        ((T_256, "T3"), (T_256, "T5"), "0.41 ± 0.36", [CLAIMS, STUDIES]),
        ((T_256, "T1"), (T_256, "T5"), "0.24 ± 0.45", [CLAIMS]),
        (("precision", "bf16"), ("precision", "fp32"), "-0.19 ± 0.31", [CLAIMS]),
        (("batch_norm", "last"), ("batch_norm", "moving"), "+0.03 ± 0.10", [CLAIMS]),
        (("batch_norm", "moving"), ("batch_norm", "sync"), "+0.30 ± 0.49", [CLAIMS]),
        (("batch_norm", "sync"), ("batch_norm", "random"), "-0.33 ± 0.57", [CLAIMS]),
        (("initialization", "kaiming"), ("initialization", "xavier"), "-0.65 ± 3.22", [CLAIMS]),
        (
            ("initialization", "kaiming"),
            ("initialization", "gaussian"),
            "+0.55 ± 0.53",
            [CLAIMS, STUDIES, PAPERS],
        ),
        (("gamma", "zero"), ("gamma", "one"), "+1.67 ± 1.02", [CLAIMS]),
        (
            ("batch_size_control", "exp1"),
            ("batch_size_control", "reference"),
            "0.27 ± 3.62",
            [CLAIMS],
        ),
        (
            ("batch_size_control", "reference"),
            ("batch_size_control", "exp2"),
            "0.44 ± 8.58",
            [CLAIMS],
        ),
        (
            ("batch_size_control", "reference"),
            ("batch_size_control", "exp3"),
            "0.01 ± 7.18",
            [CLAIMS],
        ),
        (
            ("batch_size_control", "reference"),
            ("batch_size_control", "exp4"),
            "1.56 ± 8.77",
            [CLAIMS],
        ),
        (("batch_size_control", "exp2"), ("batch_size_control", "54K"), "+0.16 ± 2.41", [CLAIMS]),
        (("decay", "lars_all"), ("decay", "sgd_all"), "-0.60 ± 1.22", [CLAIMS, PAPERS]),
        (
            ("decay-2048", "lars_all"),
            ("decay-2048", "sgd_all"),
            "-0.16 ± 1.15",
            [CLAIMS, PAPERS],
        ),
        (("decay", "lars"), ("decay", "lars_all"), "+0.46 ± 0.91", [CLAIMS]),
    ],
)
def test_quoted_difference_follows_from_the_runs(first, second, text, pages):
    check(difference(first, second), text, pages)


@pytest.mark.parametrize(
    ("arm", "text", "pages"),
    [
        (STEP_1_9, "80.42 ± 0.31", [STUDIES, HANDOVER, FIGURE]),
        (STEP_0_94, "81.61 ± 0.30", [STUDIES, HANDOVER, FIGURE]),
        (CHOSEN_1024, "83.26 ± 0.26", [STUDIES, HANDOVER]),
    ],
)
def test_quoted_accuracy_of_hybrid_at_1024_follows_from_the_runs(arm, text, pages):
    check(mean_of(arm), text, pages)


@pytest.mark.parametrize(
    ("arm", "text", "pages"),
    [
        (STEP_1_9, "14.7 ± 1.0", [CLAIMS, FIGURE]),
        (STEP_0_94, "6.9 ± 1.6", [CLAIMS, FIGURE, HANDOVER]),
        (CHOSEN_1024, "3.0 ± 1.2", [CLAIMS, STUDIES, HANDOVER]),
        (CHOSEN_256, "2.9 ± 0.3", [CLAIMS, STUDIES, HANDOVER]),
        (("handover-256", "default"), "0.4 ± 0.8", [HANDOVER]),
        (("figure-3-1", "hybrid_256"), "1.0 ± 0.8", [FIGURE]),
    ],
)
def test_quoted_fall_after_the_warmup_follows_from_the_runs(arm, text, pages):
    check(mean_of(arm, lambda run: -change_after_warmup(run)), text, pages)


def test_quoted_rise_after_the_warmup_with_smaller_steps_follows_from_the_runs():
    four_times = mean_of(("hybrid-screening", "hybrid_x4"), change_after_warmup)
    check(four_times, "7.9 ± 4.0", [CLAIMS, METHODS])
    recipe = mean_of(("hybrid-screening", "hybrid_x1"), change_after_warmup)
    assert recipe.count == 1
    assert f"{recipe.mean:.1f}" == "9.9"
    assert "-9.9, a rise (1 seed)" in METHODS.read_text()


@pytest.mark.parametrize(
    ("batch", "tuned", "text"),
    [(256, ("figure-3-1", "hybrid_256"), "5.58 ± 0.50"), (1024, STEP_0_94, "5.16 ± 0.54")],
)
def test_distance_of_the_recipes_step_from_the_tuned_one_follows_from_the_runs(batch, tuned, text):
    ours = {
        seed: 100 * float(run["test_top1"])
        for seed, run in runs("recipe-step", f"recipe_{batch}").items()
    }
    tuned_runs = {seed: top1(run) for seed, run in runs(*tuned).items()}
    result = estimate([tuned_runs[seed] - value for seed, value in ours.items()])
    check(result, text, [METHODS])


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (("figure-3-1", "hybrid_256"), ("figure-3-1", "sgd_kappa_256"), "2.5 ± 0.4"),
        (("figure-3-1", "hybrid_256"), ("figure-3-1", "adabound_256"), "3.5 ± 0.5"),
        (STEP_0_94, ADABOUND_1024, "2.2 ± 1.3"),
        ((T_256, "T5"), (T_256, "T1"), "3.4 ± 0.4"),
        (("initialization", "gaussian"), ("initialization", "kaiming"), "0.8 ± 1.3"),
        (("initialization", "kaiming"), ("initialization", "xavier"), "0.6 ± 6.0"),
    ],
)
def test_quoted_delay_follows_from_the_runs(first, second, text):
    check(delay(first, second), text, [CLAIMS])


def test_quoted_lead_of_hybrid_over_sgd_in_epochs_at_1024_is_a_lower_limit():
    assert runs_that_reach_the_target(STEP_0_94) == 15
    epochs = 16
    found = difference(SGD_1024, STEP_0_94, lambda run: float(run["epochs_to_target"] or epochs))
    check(found, "3.0 ± 1.1", [CLAIMS, FIGURE, PAPERS])


def test_quoted_oscillation_of_bf16_follows_from_the_runs():
    check(
        difference(("precision", "bf16"), ("precision", "fp32"), zigzag), "+0.13 ± 0.45", [CLAIMS]
    )


@pytest.mark.parametrize(("arm", "reached"), [(STEP_1_9, 11), (SGD_1024, 1), (ADABOUND_1024, 13)])
def test_quoted_number_of_runs_that_reach_80_percent_follows_from_the_runs(arm, reached):
    assert runs_that_reach_the_target(arm) == reached


@pytest.mark.parametrize(
    ("arm", "label"),
    [
        (STEP_0_94, "hybrid, step 0.94"),
        (STEP_1_9, "hybrid, step 1.9"),
        (ADABOUND_1024, "AdaBound"),
        (("figure-3-1", "sgd_poly_1024"), "gradual warmup + SGD, polynomial decay"),
        (SGD_1024, "gradual warmup + SGD, kappa"),
        (("figure-3-1", "sgd_steps_1024"), "gradual warmup + SGD, steps"),
        (("figure-3-1", "lars_kappa_1024"), "gradual warmup + LARS, kappa"),
    ],
)
def test_quoted_row_of_runs_that_reach_80_percent_follows_from_the_runs(arm, label):
    row = [label, str(runs_that_reach_the_target(arm))]
    for hybrid in (STEP_0_94, STEP_1_9):
        p = p_shares(
            runs_that_reach_the_target(hybrid),
            len(runs(*hybrid)),
            runs_that_reach_the_target(arm),
            len(runs(*arm)),
        )
        text = "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.01 else f"{p:.2f}"
        row.append("" if hybrid == arm else text)
    lines = FIGURE.read_text().replace("|  |", "| |").splitlines()
    assert f"| {' | '.join(row)} |".replace("|  |", "| |") in lines


@pytest.mark.parametrize(
    ("second", "seeds", "text"),
    [
        (STEP_1_9, range(7), "1.12 ± 0.46"),
        (SGD_1024, range(7, 15), "3.16 ± 0.72"),
        (ADABOUND_1024, range(7, 15), "1.16 ± 0.54"),
        (NESTEROV_1024, range(7, 15), "-0.32 ± 0.95"),
    ],
)
def test_quoted_difference_on_other_seeds_follows_from_the_runs(second, seeds, text):
    check(difference(STEP_0_94, second, seeds=seeds), text, [STUDIES])


@pytest.mark.parametrize(
    ("other", "label", "paired", "unpaired"),
    [
        (SGD_1024, "gradual warmup + SGD, kappa", "+0.80 ± 0.62", "+0.80 ± 0.69"),
        (ADABOUND_1024, "AdaBound with bounds that stay open", "-0.97 ± 0.36", "-0.97 ± 0.45"),
        (STEP_0_94, "hybrid", "-2.11 ± 0.50", "-2.11 ± 0.48"),
        (STEP_1_9, "hybrid, relative step 1.9", "-0.92 ± 0.45", "-0.92 ± 0.49"),
    ],
)
def test_row_of_adabound_with_closing_bounds_follows_from_the_runs(other, label, paired, unpaired):
    closed = runs(*ADABOUND_CLOSED)
    check(difference(ADABOUND_CLOSED, other), paired, [FIGURE])
    found = welch(list(map(top1, closed.values())), list(map(top1, runs(*other).values())))
    check(found, unpaired, [FIGURE])
    reached = runs_that_reach_the_target(ADABOUND_CLOSED)
    others = runs_that_reach_the_target(other)
    p = p_shares(reached, len(closed), others, len(runs(*other)))
    text = "<0.001" if p < 0.001 else f"{p:.3f}" if p < 0.01 else f"{p:.2f}"
    row = f"| {label} | {paired} | {unpaired} | {others} of 15 | {text} |"
    assert row in FIGURE.read_text().splitlines()


KAPPA_256 = ("figure-3-1", "sgd_kappa_256")
OPEN_256 = ("figure-3-1", "adabound_256")
HYBRID_256 = ("figure-3-1", "hybrid_256")
CLOSED_LABEL = "AdaBound with γ = 0.024"  # noqa: RUF001


@pytest.mark.parametrize(
    ("arm", "other", "label", "paired", "unpaired", "pages"),
    [
        (
            ADABOUND_CLOSED_256,
            KAPPA_256,
            "gradual warmup + SGD, kappa",
            "+0.17 ± 0.32",
            "+0.17 ± 0.41",
            [CLAIMS, PAPERS, STUDIES],
        ),
        (
            ADABOUND_CLOSED_256,
            OPEN_256,
            "AdaBound with bounds that stay open",
            "+2.39 ± 0.36",
            "+2.39 ± 0.42",
            [],
        ),
        (ADABOUND_CLOSED_256, HYBRID_256, "hybrid", "+0.60 ± 0.34", "+0.60 ± 0.36", [CLAIMS]),
        (
            ADABOUND_WARMUP_256,
            KAPPA_256,
            "gradual warmup + SGD, kappa",
            "-2.22 ± 0.55",
            "-2.22 ± 0.60",
            [CLAIMS, PAPERS, STUDIES],
        ),
        (
            ADABOUND_WARMUP_256,
            OPEN_256,
            "AdaBound with bounds that stay open",
            "0.00 ± 0.64",
            "0.00 ± 0.61",
            [],
        ),
        (
            ADABOUND_WARMUP_256,
            ADABOUND_CLOSED_256,
            CLOSED_LABEL,
            "-2.39 ± 0.64",
            "-2.39 ± 0.62",
            [],
        ),
        (ADABOUND_WARMUP_256, HYBRID_256, "hybrid", "-1.79 ± 0.62", "-1.79 ± 0.57", [CLAIMS]),
    ],
)
def test_row_of_adabound_at_256_follows_from_the_runs(arm, other, label, paired, unpaired, pages):
    check(difference(arm, other), paired, [FIGURE, *pages])
    found = welch(*(list(map(top1, runs(*name).values())) for name in (arm, other)))
    check(found, unpaired, [FIGURE])
    assert f"| {label} | {paired} | {unpaired} |" in FIGURE.read_text().splitlines()


@pytest.mark.parametrize(
    ("arm", "text"), [(ADABOUND_CLOSED_256, "85.96 ± 0.32"), (ADABOUND_WARMUP_256, "83.57 ± 0.55")]
)
def test_accuracy_of_adabound_at_256_follows_from_15_runs(arm, text):
    assert len(runs(*arm)) == 15
    check(mean_of(arm), text, [FIGURE])


def test_quoted_accuracy_of_adabound_with_closing_bounds_follows_from_the_runs():
    check(mean_of(ADABOUND_CLOSED), "79.51 ± 0.41", [FIGURE, CURVES])
    reached = runs_that_reach_the_target(ADABOUND_CLOSED)
    text = f"in {len(runs(*ADABOUND_CLOSED))} fresh seeds, and {reached} of these reach 80 %"
    assert text in FIGURE.read_text()
