"""Tests tuning before a report: its runs, its choice, and the other seeds and images of reports."""

import csv
import dataclasses
import io

import pytest

from hybrid_imagenet import config
from studies import command as program
from studies import cost, questions, running, tables, trial_runs, tuning
from studies.base import Arm, Claim, Point, Study
from studies.handover import HANDOVER
from tests.studies import support

STUDY = Study(
    "small",
    "Small",
    "",
    "Which is better?",
    (
        Arm("a", "A", (), points=(Point("low", ("--lr=0.1",)), Point("high", ("--lr=0.4",)))),
        Arm(
            "b",
            "B",
            ("--momentum=0.8",),
            points=(Point("low", ("--lr=0.1",)), Point("high", ("--lr=0.4",))),
        ),
    ),
    (Claim("a", "b", by_paper=False),),
    base=(*questions.BASE, "--optimizer=sgd", "--lr_schedule=constant", "--virtual_gpus=8"),
)


@pytest.fixture
def trained(monkeypatch):
    """Replaces training by results that depend on the flags; returns the flags of each run.

    At a learning rate of 0.4, A has 80 % and B has 60 %. At 0.1, A has 70 % and B diverges.
    """
    configurations = []

    def ensure(cell, run, launcher):
        values = config.resolve(cell.flags)
        configurations.append(values)
        before = trial_runs.read(cell)
        if before.status in (trial_runs.FINISHED, trial_runs.DIVERGED):
            return before, False
        is_a = values.get("momentum") == 0.9
        if values.optimization.lr == 0.1 and not is_a:
            support.ended(cell, 3)
            return trial_runs.read(cell), True
        top1 = (0.7 if is_a else 0.5) if values.optimization.lr == 0.1 else (0.8 if is_a else 0.6)
        support.finish(cell, [top1 / 2, top1 + values.run.seed % 10 / 1000])
        support.ended(cell)
        return trial_runs.read(cell), True

    monkeypatch.setattr(running, "ensure", ensure)
    monkeypatch.setattr(program, "STUDIES", {"small": STUDY})
    return configurations


def test_tuned_study_reports_the_best_point_of_each_arm_on_other_images_and_seeds(
    trained, tmp_path, capsys
):
    assert program.main(["small", f"--out={tmp_path}", "--ranks=1", "--seeds=2"]) == 0
    tried = trained[:4]
    reported = trained[4:]
    assert [(v.get("momentum"), v.optimization.lr) for v in tried] == [
        (0.9, 0.1),
        (0.8, 0.1),
        (0.9, 0.4),
        (0.8, 0.4),
    ]
    assert {(v.run.seed, v.data.eval_split) for v in tried} == {(tuning.SEED, "tuning")}
    assert [(v.get("momentum"), v.optimization.lr, v.run.seed) for v in reported] == [
        (0.9, 0.4, 0),
        (0.8, 0.4, 0),
        (0.9, 0.4, 1),
        (0.8, 0.4, 1),
    ]
    assert {v.data.eval_split for v in reported} == {"validation"}
    assert {v.data.tuning_split for v in trained} == {questions.TUNING}
    page = (tmp_path / "small.md").read_text()
    assert "| A | low: 70.00 %; high: 80.00 % | high, at an end of the range: open |" in page
    assert "| B | low: -; high: 60.00 % | high, at an end of the range: open |" in page
    assert "2 runs for each arm" in page
    assert "    python -m studies small --seeds=2\n" in page
    assert "| A | high | 80.05 " in page
    assert "The paper" not in page and "paper: top-1" not in page
    assert "No paper makes a statement about this. Of 1 statement" in page
    tried_rows = (tmp_path / "small-tuning.csv").read_text().splitlines()
    assert len(tried_rows) == 1 + 4
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("small: 8 runs, 0 of them there; ")
    assert program.main(["small", f"--out={tmp_path}", "--ranks=1", "--seeds=2", "--render"]) == 0
    assert (tmp_path / "small.md").read_text() == page

    # The CSV files are enough to write the page again.
    again = tmp_path / "again"
    records = ["--records", str(tmp_path), f"--out={again}", "--render"]
    assert program.main(["small", *records, "--ranks=1", "--seeds=2"]) == 0
    rewritten = (again / "small.md").read_text()
    assert _without_setting(rewritten) == _without_setting(page)
    assert (again / "small.csv").read_text() == (tmp_path / "small.csv").read_text()
    tuning_rows = (again / "small-tuning.csv").read_text()
    assert tuning_rows == (tmp_path / "small-tuning.csv").read_text()


def _without_setting(page):
    """Returns the page without its last part, which has versions that the CSV files lack."""
    return page.partition("## How it was run")[0]


@pytest.mark.parametrize("status", [trial_runs.MISSING, trial_runs.FAILED])
def test_choose_with_a_missing_tuning_run_chooses_no_point_of_the_arm(tmp_path, status):
    trials = tuning.plan(STUDY, tmp_path, 1)
    results = {
        t.cell: trial_runs.Result(trial_runs.FINISHED, summary={"val_top1": 0.5}) for t in trials
    }
    # The third trial is the point "high" of A.
    results[trials[2].cell] = trial_runs.Result(status)
    choices = tuning.choose(STUDY, trials, results)
    assert [choice.missing for choice in choices] == [1, 0]
    a, b = tuning.reported(STUDY, choices).arms
    assert (a.chosen, b.chosen) == ("", "low")
    assert set(tuning.untuned(a, range(2))) == {0, 1}
    assert not tuning.untuned(b, range(2))
    assert any("3 of these 4 runs are there" in line for line in tuning.lines(choices))
    assert "| A | low: 50.00 %; high: - | not tuned yet |" in tuning.lines(choices)


def test_cost_counts_the_images_of_runs_that_are_missing(tmp_path):
    cells = [trial.cell for trial in tuning.plan(STUDY, tmp_path, 1)]
    assert cost.images(cells[0]) == (60_000 - questions.TUNING) * 16 == 200_000
    # 4 runs and 6 later ones have 0.2 million images each, which at 1,000 images/s are 0.6 hours.
    assert cost.line(cells, 1000.0, later=6) == (
        "10 runs, 0 of them there; 2.0 million images are left: 0.6 hours at 1000 images/s"
    )
    support.finish(cells[0], [0.5, 0.6])
    support.ended(cells[0])
    assert cost.line(cells, 1000.0, later=6).startswith(
        "10 runs, 1 of them there; 1.8 million images are left: 0.5 "
    )
    unknown = trial_runs.create(tmp_path, ["--dataset=folder", "--data_dir=x"], 1)
    assert (
        cost.line([unknown], 1000.0)
        == "1 runs, 0 of them there; the size of the dataset is not known before it is read"
    )


def test_choose_with_several_seeds_uses_their_mean(tmp_path):
    trials = tuning.plan(HANDOVER, tmp_path, 1)
    assert len(trials) == 2 * sum(len(arm.points) for arm in HANDOVER.arms)
    seeds = [config.resolve(trial.cell.flags).run.seed for trial in trials]
    assert seeds == sorted(seeds) and set(seeds) == {tuning.SEED, tuning.SEED + 1}
    assert len({trial.cell for trial in trials}) == len(trials)
    top1 = {
        "a N, step x 0.5, poly, ramp 0": (0.9, 0.7),
        "a N, step x 0.25, poly, ramp 0": (0.81, 0.81),
    }
    results = {}
    for trial, seed in zip(trials, seeds, strict=True):
        value = top1.get(trial.point.label, (0.5, 0.5))[seed - tuning.SEED]
        results[trial.cell] = trial_runs.Result(trial_runs.FINISHED, summary={"val_top1": value})
    choice, *_ = tuning.choose(HANDOVER, trials, results)
    assert choice.point.label == "a N, step x 0.25, poly, ramp 0"
    assert choice.top1[:2] == (pytest.approx(0.8), pytest.approx(0.81))
    assert choice.missing == 0


RACE = dataclasses.replace(
    STUDY,
    arms=(
        dataclasses.replace(
            STUDY.arms[0],
            points=tuple(
                Point(str(number), (f"--lr={0.1 * (number + 1):g}",)) for number in range(5)
            ),
        ),
    ),
    tuning_seeds=3,
    race=True,
)


def race(tmp_path, first, later):
    """Runs a race; points have the top-1 of `first`, and with further seeds that of `later`."""
    trials = tuning.plan(RACE, tmp_path, 1)
    results = {}

    def run(stage):
        for trial in stage(RACE, trials, results):
            number = int(trial.point.label)
            value = first[number] if trial.seed == tuning.SEED else later[number]
            results[trial.cell] = (
                trial_runs.Result(trial_runs.DIVERGED)
                if value is None
                else trial_runs.Result(trial_runs.FINISHED, summary={"val_top1": value})
            )

    run(tuning.first_stage)
    run(tuning.second_stage)
    trials = [trial for trial in trials if trial.cell in results]
    return trials, results, tuning.choose(RACE, trials, results)[0]


def test_race_gives_further_seeds_only_to_points_near_the_best(tmp_path):
    trials, _, choice = race(tmp_path, (0.7, 0.79, 0.8, 0.771, None), (0, 0.79, 0.8, 0.771, 0))
    assert choice.runs == (1, 3, 3, 3, 1)
    assert choice.missing == 0
    assert choice.point.label == "2"
    assert [trial.seed for trial in trials].count(tuning.SEED) == 5


def test_race_chooses_the_maximum_of_the_fitted_curve(tmp_path):
    means = (0.790, 0.806, 0.797, 0.803, 0.792)
    _, _, choice = race(tmp_path, means, means)
    assert choice.runs == (3, 3, 3, 3, 3)
    assert choice.point.label == "2"


def test_race_never_chooses_a_point_that_had_one_seed(tmp_path):
    _, _, choice = race(tmp_path, (0.7, 0.769, 0.8, 0.78, 0.7), (0, 0, 0.75, 0.74, 0))
    assert choice.runs == (1, 1, 3, 3, 1)
    assert choice.point.label == "2"


def test_tuning_csv_has_a_row_per_run_and_marks_the_chosen_point(tmp_path):
    trials, results, choice = race(
        tmp_path, (0.7, 0.79, 0.8, 0.771, None), (0, 0.79, 0.8, 0.771, 0)
    )
    rows = list(csv.DictReader(io.StringIO(tables.tuning_to_csv(RACE, trials, results, [choice]))))
    assert [(row["point"], row["seed"]) for row in rows] == [
        ("0", "1000"),
        *((point, seed) for point in "123" for seed in ("1000", "1001", "1002")),
        ("4", "1000"),
    ]
    assert {row["point"] for row in rows if row["chosen"] == "1"} == {"2"}
    assert [row["val_top1"] for row in rows if row["point"] == "2"] == ["0.8"] * 3
    assert rows[-1]["status"] == trial_runs.DIVERGED
    assert "--lr=0.5" in rows[-1]["flags"]
