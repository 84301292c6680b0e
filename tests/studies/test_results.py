"""Tests verdicts on claims, the pages of results, and the command that runs studies."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from studies import bootstrap, hypotheses, plot, results, tables, trial_runs
from studies import command as program
from studies.base import Arm, Claim, Study, ranking
from studies.results import ArmResults
from studies.statistics import estimate
from tests.studies import support


def arm(name, by_seed, **paper):
    return ArmResults(Arm(name, name.upper(), **paper), support.results(by_seed), target=0.9)


def ends(*accuracies):
    """Returns runs by seed, each of which reaches its accuracy in a straight line."""
    return {seed: support.curve(value) for seed, value in enumerate(accuracies)}


CLEAR = arm("clear", ends(0.96, 0.97, 0.98), top1=0.756, epochs=32)
BELOW = arm("below", ends(0.91, 0.93, 0.92), top1=0.75, epochs=42)
NEAR = arm("near", ends(0.955, 0.975, 0.97))


def test_plot_by_epoch_shows_only_methods_with_runs():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    none = arm("none", {0: trial_runs.FAILED})
    study = Study("three", "Three", "a paper", "a statement", (CLEAR.arm, none.arm, BELOW.arm), ())
    figure = plot._by_epoch(pyplot, study, [CLEAR, none, BELOW])
    labels = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    pyplot.close(figure)
    assert labels == ["CLEAR", "BELOW"]


def verdict_on(first, second, relation="above", metric="top1", **claim):
    """Returns the verdict on the only claim of a study of two arms."""
    claims = (Claim(first.arm.name, second.arm.name, relation, metric, **claim),)
    study = Study("two", "Two", "a paper", "a statement", (first.arm, second.arm), claims)
    return results.verdicts(study, [first, second])[0]


def test_verdict_on_a_clear_order_is_seen_and_on_its_opposite_reversed():
    verdict = verdict_on(CLEAR, BELOW)
    assert verdict.outcome == results.SEEN
    expected = estimate([0.05, 0.04, 0.06])
    assert verdict.difference.mean == pytest.approx(expected.mean)
    assert verdict.difference.half_width == pytest.approx(expected.half_width)
    assert verdict.p == pytest.approx(
        stats.ttest_1samp([0.05, 0.04, 0.06], 0, alternative="greater").pvalue
    )
    assert verdict_on(BELOW, CLEAR).outcome == results.REVERSED


def test_verdict_on_an_order_within_the_spread_is_inconclusive_with_the_seeds_needed():
    for pair in ((CLEAR, NEAR), (NEAR, CLEAR)):
        verdict = verdict_on(*pair)
        assert verdict.outcome == results.INCONCLUSIVE
        mean, deviation = abs(verdict.difference.mean), verdict.difference.deviation
        assert hypotheses.power_above(mean, deviation, verdict.seeds) >= 0.8
        assert hypotheses.power_above(mean, deviation, verdict.seeds - 1) < 0.8


def test_verdict_on_equality_is_an_equivalence_within_the_margin():
    close = arm("close", ends(0.9605, 0.9698, 0.9803))
    assert verdict_on(CLEAR, close, "equal").outcome == results.SEEN
    assert verdict_on(CLEAR, BELOW, "equal").outcome == results.REVERSED
    # An interval that contains 0 does not show equality.
    noise = verdict_on(CLEAR, NEAR, "equal")
    assert noise.difference.low < 0 < noise.difference.high
    assert (noise.outcome, noise.seeds > 3) == (results.INCONCLUSIVE, True)
    assert verdict_on(CLEAR, NEAR, "equal", margin=0.05).outcome == results.SEEN
    assert (
        verdict_on(arm("a", ends(0.9)), arm("b", ends(0.9)), "equal").outcome
        == results.INCONCLUSIVE
    )


def test_verdict_with_a_missed_target_has_a_limit_of_the_difference():
    missed = arm(
        "missed", {0: [0.1, 0.2, 0.3, 0.95], 1: [0.1, 0.2, 0.3, 0.4], 2: [0.1, 0.2, 0.3, 0.91]}
    )
    fast = arm("fast", {seed: [0.1, 0.95 - 0.01 * seed, 0.3, 0.4] for seed in range(3)})
    verdict = verdict_on(fast, missed, metric="epochs")
    assert (verdict.outcome, verdict.limit) == (results.SEEN, "at least")
    assert verdict_on(missed, fast, metric="epochs").outcome == results.REVERSED
    none = arm("none", {seed: [0.1, 0.2, 0.3, 0.4] for seed in range(3)})
    assert verdict_on(missed, none, metric="epochs").outcome == results.OPEN
    assert (
        verdict_on(fast, arm("failed", {0: trial_runs.FAILED}), metric="epochs").outcome
        == results.OPEN
    )


def test_verdict_compares_only_equal_seeds():
    part = arm("part", {0: [0.9], 1: trial_runs.DIVERGED, 2: [0.92]})
    verdict = verdict_on(CLEAR, part)
    assert verdict.difference.count == 2
    assert verdict.difference.mean == pytest.approx((0.06 + 0.06) / 2)
    assert verdict_on(CLEAR, arm("none", {0: trial_runs.FAILED})).outcome == results.OPEN


def test_verdicts_on_several_claims_are_corrected_for_their_number():
    # p is 0.019 for CLEAR over BELOW. That is enough for one claim, but not for three.
    slight = arm("slight", ends(0.93, 0.95, 0.965))
    alone = verdict_on(CLEAR, slight)
    assert 0.0167 < alone.p <= 0.05
    assert alone.outcome == results.SEEN
    claims = (Claim("clear", "slight"), Claim("clear", "near"), Claim("near", "clear"))
    study = Study("three", "", "", "", (CLEAR.arm, slight.arm, NEAR.arm), claims)
    first = results.verdicts(study, [CLEAR, slight, NEAR])[0]
    assert first.p == pytest.approx(3 * alone.p)
    assert first.outcome == results.INCONCLUSIVE


def test_verdict_on_runs_with_results_of_images_is_resampled():
    generator = np.random.default_rng(2)
    first, second = (arm(name, ends(0.9, 0.92, 0.91)) for name in "ab")
    rights = {}
    for arm_results, level in ((first, 0.9), (second, 0.8)):
        for seed, result in arm_results.by_seed.items():
            right = generator.random(500) < level
            rights[arm_results.arm.name, seed] = right
            arm_results.by_seed[seed] = dataclasses.replace(result, right=right)
    verdict = verdict_on(first, second)
    rows = [np.stack([rights[name, seed] for seed in range(3)]) for name in "ab"]
    assert verdict.resampled == bootstrap.interval(*rows)
    assert verdict.resampled[0] < 0.1 < verdict.resampled[1]
    first.by_seed[1] = dataclasses.replace(first.by_seed[1], right=None)
    assert verdict_on(first, second).resampled is None


STUDY = Study(
    "tiny",
    "A tiny study",
    "a paper, Table 9",
    "clear is best.",
    (CLEAR.arm, BELOW.arm),
    ranking("clear", "below"),
)


def test_to_markdown_has_means_intervals_numbers_of_the_paper_and_failures():
    part = arm(
        "below", {0: [0.4, 0.95], 1: trial_runs.DIVERGED, 2: [0.3, 0.85]}, top1=0.75, epochs=42
    )
    text = tables.to_markdown(STUDY, [CLEAR, part], 3, ["--epochs=4"], plot=True)
    # The curve rises in a straight line to 96, 97 and 98 % in four epochs, so it reaches 90 % after
    # 3.750, 3.711 and 3.673.
    assert "| CLEAR | 97.00 ± 2.48 % | 97.00 ± 2.48 % | 3.7 ± 0.1 | 3 | 75.60 % | 32 |" in text
    assert (
        "| BELOW | 90.00 ± 63.53 % | 90.00 ± 63.53 % | 1.9 (1 of 2 runs) | 2 of 3; diverged: seed 1"
        " | 75.00 % | 42 |" in text
    )
    assert "epochs to 90 %" in text
    assert "| CLEAR: better than BELOW, in final top-1 | the paper's | +7.00 ± " in text
    assert "inconclusive: " in text
    assert "python -m studies tiny --ranks=2 --seeds=3 -- --epochs=4" in text
    assert "1500 training" in text
    assert "![A tiny study](tiny.png)" in text


def test_studies_command_lists_studies_prints_commands_and_rejects_invalid_words(tmp_path, capsys):
    assert program.main(["list"]) == 0
    assert "batch_norm" in capsys.readouterr().out
    out = tmp_path / "out"
    words = ["gamma", "--dry_run", "--seeds=2", "--ranks=3", f"--out={out}"]
    assert program.main([*words, "--", "--epochs=7", "--virtual_gpus=8"]) == 0
    *lines, price = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and price.startswith("# gamma: 4 runs")
    assert all(" -np 3 " in line and " --epochs=7 " in line for line in lines)
    assert sum("--nozero_last_gamma" in line for line in lines) == 2
    assert sum("--seed=1" in line for line in lines) == 2
    assert not out.exists()
    for words, message in [
        (["gama"], "did you mean gamma?"),
        (["gamma", "beta"], "Unexpected argument: beta"),
        (["gamma", "--sedes=3"], "sedes"),
        (["gamma", "--seeds=0"], "--seeds=0 is not valid"),
        (["gamma", "--dry_run", "--", "--epochs=x"], "--epochs=x"),
        (["gamma", "--", "--seed=4"], "omit it"),
        (
            ["warmup_epochs", "--", "--warmup-epochs=1"],
            "--warmup_epochs after --: the arms of warmup_epochs differ",
        ),
        (
            ["gamma", "--", "--zero_last_gamma"],
            "--zero_last_gamma after --: the arms of gamma differ",
        ),
        (["gamma", "--ranks=2"], "32 virtual GPUs; give --ranks=1"),
    ]:
        assert program.main(words) == 2
        assert message in capsys.readouterr().err


def test_studies_command_without_the_dataset_prints_one_line_before_any_run(
    tmp_path, capsys, monkeypatch
):
    study = dataclasses.replace(
        program.STUDIES["gamma"], base=("--dataset=idx", "--target_top1=0.8")
    )
    monkeypatch.setattr(program, "STUDIES", {"gamma": study})
    out = tmp_path / "out"
    for words, message in [
        ([], "gamma reads its images from a directory. Add `-- --data_dir=DIR`"),
        (["--", f"--data_dir={tmp_path / 'none'}"], "is not a directory"),
        (["--", f"--data_dir={tmp_path}"], "has no train-images-idx3-ubyte"),
    ]:
        assert program.main(["gamma", f"--out={out}", *words]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not out.exists()
    # Commands can be printed, and results rendered, without the images.
    assert program.main(["gamma", f"--out={out}", "--dry_run"]) == 0
    assert program.main(["gamma", f"--out={out}", "--render"]) == 1


def test_studies_command_renders_partial_results_and_continues_after_ctrl_c(
    tmp_path, capsys, monkeypatch
):
    # Two runs are finished. A replacement of the training program runs the others.
    flags = [f"--out={tmp_path / 'out'}", f"--results={tmp_path / 'docs'}", "--seeds=2"]
    study = program.STUDIES["gamma"]
    for study_arm in study.arms:
        cell = trial_runs.create(tmp_path / "out", study.arguments(study_arm, 0), 1)
        support.ended(cell)
        support.finish(cell, support.curve(0.96))
    assert program.main(["gamma", *flags, "--render"]) == 1
    assert capsys.readouterr().out.count("missing") == 2
    assert "1 of 2; missing: seed 1" in (tmp_path / "docs" / "gamma.md").read_text()
    started = []

    def run(cell, arguments, place, stop):
        started.append(cell)
        if len(started) == 1:
            raise KeyboardInterrupt
        support.finish(cell, support.curve(0.9))
        return 0

    monkeypatch.setattr(program.running, "run_process", run)
    assert program.main(["gamma", *flags]) == 75
    assert program.main(["gamma", *flags]) == 0
    assert [cell.flags[-1] for cell in started] == ["--seed=1"] * 3
    assert (tmp_path / "docs" / "gamma.png").read_bytes()[:4] == b"\x89PNG"
    assert len((tmp_path / "docs" / "gamma.csv").read_text().splitlines()) == 1 + 4


@pytest.mark.parametrize(
    ("printed", "accuracies", "words"),
    [
        (0.03, (0.95, 0.951, 0.952), "as printed"),
        (0.06, (0.95, 0.951, 0.952), "smaller than printed"),
        (0.01, (0.95, 0.951, 0.952), "larger than printed"),
        (0.03, (0.93, 0.95, 0.97), "open"),
        (0.03, (0.95,), "open"),
    ],
)
def test_verdict_compares_the_effect_with_that_of_the_paper(
    monkeypatch, printed, accuracies, words
):
    # The search for the number of seeds takes most of the time of a verdict.
    monkeypatch.setattr(hypotheses, "seeds_needed", lambda power: None)
    second = arm("second", ends(*[0.92 + 0.0001 * i for i in range(len(accuracies))]), top1=0.7)
    verdict = verdict_on(arm("first", ends(*accuracies), top1=0.7 + printed), second)
    assert verdict.effect == pytest.approx(printed)
    assert verdict.against_paper == words


def test_crossing_interpolates_between_two_evaluations():
    records = [
        {"epoch": e, "val_top1": v} for e, v in ((1, 0.5), (2, None), (3, 0.7), (4, 0.9), (5, 0.8))
    ]
    assert results.crossing(records, "val_top1", 0.8) == pytest.approx(3.5)
    # Epoch 2 was not evaluated.
    assert results.crossing(records, "val_top1", 0.6) == pytest.approx(2.0)
    assert results.crossing(records, "val_top1", 0.9) == pytest.approx(4.0)
    # There is no value before the first evaluation.
    assert results.crossing(records, "val_top1", 0.5) == 1.0
    assert results.crossing(records, "val_top1", 0.95) is None
    assert results.crossing([], "val_top1", 0.5) is None


def test_to_markdown_counts_runs_that_reach_the_target_only_if_some_do_not():
    missed = arm("missed", ends(0.8, 0.85, 0.95))
    study = Study("two", "Two", "", "a question", (CLEAR.arm, missed.arm), ())
    page = tables.to_markdown(study, [CLEAR, missed], 3, [], False)
    assert "| CLEAR | 3 of 3 | - |" in page
    assert "| MISSED | 1 of 3 | 0.4 |" in page
    assert "Fisher's exact test, two-sided" in page
    page = tables.to_markdown(study, [CLEAR, CLEAR], 3, [], False)
    assert "Fisher" not in page
