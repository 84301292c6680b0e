import csv
import io

import pytest

from hybrid_imagenet.tools.study import command as program
from hybrid_imagenet.tools.study import results, tables, trial_runs
from hybrid_imagenet.tools.study.base import Arm, Claim, Study, ranking
from hybrid_imagenet.tools.study.results import ArmResults
from hybrid_imagenet.tools.study.statistics import estimate
from tests.tools.study import support


def arm(name, by_seed, **paper):
    return ArmResults(Arm(name, name.upper(), **paper), support.results(by_seed), target=0.9)


def ends(*accuracies):
    """One run per accuracy, which it reaches in a straight line."""
    return {seed: support.curve(value) for seed, value in enumerate(accuracies)}


CLEAR = arm("clear", ends(0.96, 0.97, 0.98), top1=0.756, epochs=32)
BELOW = arm("below", ends(0.91, 0.93, 0.92), top1=0.75, epochs=42)
NEAR = arm("near", ends(0.955, 0.975, 0.97))


def outcome(first, second, relation="above", metric="top1"):
    claim = Claim(first.arm.name, second.arm.name, relation, metric)
    return results.verdict(claim, first, second)


def test_metrics_of_an_arm():
    peak = arm("peak", {0: [0.2, 0.95, 0.8], 1: [0.5, 0.6, 0.7]})
    assert peak.values("top1") == {0: 0.8, 1: 0.7}
    assert peak.values("best") == {0: 0.95, 1: 0.7}
    assert peak.values("epochs") == {0: 2.0}  # the other run never reached 90 %
    assert peak.estimate("top1") == estimate([0.8, 0.7])
    assert [(e, found.mean) for e, found in peak.curve("val_top1")] == [
        (1, pytest.approx(0.35)), (2, pytest.approx(0.775)), (3, pytest.approx(0.75)),
    ]  # fmt: skip


def test_an_order_beyond_the_spread_is_seen_and_the_reverse_is_told():
    found = outcome(CLEAR, BELOW)
    assert found.outcome == results.SEEN
    expected = estimate([0.05, 0.04, 0.06])
    assert found.difference.mean == pytest.approx(expected.mean)
    assert found.difference.half_width == pytest.approx(expected.half_width)
    assert outcome(BELOW, CLEAR).outcome == results.REVERSED


def test_an_order_within_the_spread_is_one_of_means():
    assert outcome(CLEAR, NEAR).outcome == results.TENDENCY
    assert outcome(NEAR, CLEAR).outcome == results.UNSEEN


def test_equality_is_an_interval_around_0():
    assert outcome(CLEAR, NEAR, "equal").outcome == results.SEEN
    assert outcome(CLEAR, BELOW, "equal").outcome == results.UNSEEN
    assert outcome(arm("a", ends(0.9)), arm("b", ends(0.9)), "equal").outcome == results.OPEN


def test_fewer_epochs_are_better():
    slow = arm("slow", {seed: [0.1, 0.2, 0.3, 0.4, 0.95] for seed in range(3)})
    fast = arm("fast", {seed: [0.1, 0.95, 0.3, 0.4, 0.5] for seed in range(3)})
    found = outcome(fast, slow, metric="epochs")
    assert (found.outcome, found.difference.mean) == (results.SEEN, 3.0)
    assert outcome(slow, fast, metric="epochs").outcome == results.REVERSED


def test_a_missed_target_decides_where_one_method_alone_missed_it():
    some = arm("some", {0: [0.95], 1: [0.5]})
    none = arm("none", {0: [0.8], 1: [0.5]})
    assert outcome(CLEAR, some, metric="epochs").outcome == results.MISSED
    assert outcome(some, CLEAR, metric="epochs").outcome == results.UNSEEN
    assert outcome(some, none, metric="epochs").outcome == results.OPEN
    assert outcome(CLEAR, arm("failed", {0: trial_runs.FAILED}), metric="epochs").outcome == results.OPEN


def test_differences_use_equal_seeds_only():
    part = arm("part", {0: [0.9], 1: trial_runs.DIVERGED, 2: [0.92]})
    found = outcome(CLEAR, part)
    assert found.difference.count == 2
    assert found.difference.mean == pytest.approx((0.06 + 0.06) / 2)
    assert outcome(CLEAR, arm("none", {0: trial_runs.FAILED})).outcome == results.OPEN


def test_one_seed_gives_means_only():
    assert outcome(arm("a", ends(0.95)), arm("b", ends(0.9))).outcome == results.TENDENCY


STUDY = Study(
    "tiny", "A tiny study", "a paper, Table 9", "clear is best.", (CLEAR.arm, BELOW.arm), ranking("clear", "below")
)


@pytest.mark.parametrize(
    ("outcomes", "start"),
    [
        ([results.SEEN, results.SEEN], "The paper's result appeared: of 2 statements, 2 seen."),
        ([results.TENDENCY], "The paper's result appeared in the means: of 1 statement, 1 means only."),
        (
            [results.SEEN, results.REVERSED],
            "The paper's result appeared in part: of 2 statements, 1 seen, 1 the opposite.",
        ),
        ([results.UNSEEN], "The paper's result did not appear: of 1 statement, 1 not seen."),
        ([results.MISSED], "The paper's result appeared in the means: of 1 statement, 1 reached by the first only."),
        ([results.OPEN], "The paper's result did not appear: of 1 statement, 1 not comparable."),
    ],
)
def test_the_sentence_follows_from_the_outcomes(outcomes, start):
    found = [results.Verdict(Claim("clear", "below"), value, None) for value in outcomes]
    assert results.sentence(STUDY, found) == start


def rows(arms, study=STUDY):
    return list(csv.DictReader(io.StringIO(tables.to_csv(study, arms))))


def test_csv_has_every_run():
    part = arm("below", {0: [0.4, 0.95], 1: trial_runs.DIVERGED, 2: trial_runs.MISSING}, top1=0.75, epochs=42)
    found = rows([CLEAR, part])
    assert [(r["arm"], r["seed"], r["status"]) for r in found] == [
        ("clear", "0", "finished"), ("clear", "1", "finished"), ("clear", "2", "finished"),
        ("below", "0", "finished"), ("below", "1", "diverged"), ("below", "2", "missing"),
    ]  # fmt: skip
    first, last = found[3], found[4]
    assert (first["val_top1"], first["epochs_to_target"], first["paper_top1"]) == ("0.95", "2", "0.75")
    assert first["val_top1_by_epoch"] == "0.4 0.95"
    assert first["train_top1_by_epoch"] == "0.2 0.475"
    assert (last["val_top1"], last["reason"]) == ("", "exit code 3: error: diverged")
    assert "--seed=1" in last["flags"]


def test_markdown_shows_means_intervals_the_paper_and_failures():
    part = arm("below", {0: [0.4, 0.95], 1: trial_runs.DIVERGED, 2: [0.3, 0.85]}, top1=0.75, epochs=42)
    text = tables.to_markdown(STUDY, [CLEAR, part], 3, ["--epochs=4"], plot=True)
    assert "| CLEAR | 97.00 ± 2.48 % | 97.00 ± 2.48 % | 4.0 ± 0.0 | 3 | 75.60 % | 32 |" in text
    assert (
        "| BELOW | 90.00 ± 63.53 % | 90.00 ± 63.53 % | 2.0 (1 of 2 runs) | 2 of 3; diverged: seed 1 | 75.00 % | 42 |"
        in text
    )
    assert "epochs to 90 %" in text
    assert "CLEAR: better than BELOW, in final top-1 |" in text
    assert "hybrid-imagenet study tiny --seeds=3 -- --epochs=4" in text
    assert "1500 training" in text
    assert "![A tiny study](tiny.png)" in text


def test_program_lists_dry_runs_and_refuses(tmp_path, capsys):
    assert program.main(["list"]) == 0
    assert "batch_norm" in capsys.readouterr().out
    out = tmp_path / "out"
    assert program.main(["gamma", "--dry_run", "--seeds=2", "--ranks=3", f"--out={out}", "--", "--epochs=7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all(" -np 3 " in line and " --epochs=7 " in line for line in lines)
    assert sum("--nozero_last_gamma" in line for line in lines) == 2
    assert sum("--seed=1" in line for line in lines) == 2
    assert not out.exists()
    for words, message in [
        (["gama"], "did you mean gamma?"),
        (["gamma", "beta"], "give one study"),
        (["gamma", "--sedes=3"], "sedes"),
        (["gamma", "--seeds=0"], "--seeds=0"),
        (["gamma", "--dry_run", "--", "--epochs=x"], "--epochs=x"),
        (["gamma", "--", "--seed=4"], "leave it out"),
    ]:
        assert program.main(words) == 2
        assert message in capsys.readouterr().err


def test_program_renders_what_is_there_and_goes_on(tmp_path, capsys, monkeypatch):
    """Two finished runs, then the rest by a stand-in for the training program; the exit code tells of failures."""
    flags = [f"--out={tmp_path / 'out'}", f"--results={tmp_path / 'docs'}", "--seeds=2"]
    study = program.STUDIES["gamma"]
    for found in study.arms:
        cell = trial_runs.create(tmp_path / "out", study.arguments(found, 0), 2)
        support.ended(cell)
        support.finish(cell, support.curve(0.96))
    assert program.main(["gamma", *flags, "--render"]) == 1
    assert capsys.readouterr().out.count("missing") == 2
    assert "1 of 2; missing: seed 1" in (tmp_path / "docs" / "gamma.md").read_text()
    started = []

    def run(cell, arguments):
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
    assert len(rows_of(tmp_path / "docs" / "gamma.csv")) == 4


def rows_of(path):
    return list(csv.DictReader(io.StringIO(path.read_text())))
