"""Tuning before a report: what runs, what is chosen, and that the report has other seeds and
images.
"""

import pytest

from hybrid_imagenet import config
from studies import command as program
from studies import cost, questions, running, trial_runs, tuning
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
    """Runs end at once: at lr .4 A has 80 %, B 60 %; at .1 A has 70 % and B diverges. Gives the
    flags of each run.
    """
    seen = []

    def ensure(cell, run, launcher):
        values = config.resolve(cell.flags)
        seen.append(values)
        before = trial_runs.read(cell)
        if before.status in (trial_runs.FINISHED, trial_runs.DIVERGED):
            return before, False
        good = values.momentum == 0.9
        if values.lr == 0.1 and not good:
            support.ended(cell, 3)
            return trial_runs.read(cell), True
        top1 = (0.7 if good else 0.5) if values.lr == 0.1 else (0.8 if good else 0.6)
        support.finish(cell, [top1 / 2, top1 + values.seed % 10 / 1000])
        support.ended(cell)
        return trial_runs.read(cell), True

    monkeypatch.setattr(running, "ensure", ensure)
    monkeypatch.setattr(program, "STUDIES", {"small": STUDY})
    return seen


def test_the_best_point_of_each_arm_is_reported_on_other_images_with_other_seeds(
    trained, tmp_path, capsys
):
    assert program.main(["small", f"--out={tmp_path}", "--ranks=1", "--seeds=2"]) == 0
    tried, reported = trained[:4], trained[4:]
    assert [(v.momentum, v.lr) for v in tried] == [(0.9, 0.1), (0.8, 0.1), (0.9, 0.4), (0.8, 0.4)]
    assert {(v.seed, v.eval_split) for v in tried} == {(tuning.SEED, "tuning")}
    assert [(v.momentum, v.lr, v.seed) for v in reported] == [
        (0.9, 0.4, 0),
        (0.8, 0.4, 0),
        (0.9, 0.4, 1),
        (0.8, 0.4, 1),
    ]
    assert {v.eval_split for v in reported} == {"validation"}
    assert {v.tuning_split for v in trained} == {questions.TUNING}
    page = (tmp_path / "small.md").read_text()
    assert "| A | low: 70.00 %; high: 80.00 % | high, at an end of the range: open |" in page
    assert "| B | low: -; high: 60.00 % | high, at an end of the range: open |" in page
    assert "2 runs for each arm" in page
    assert "    python -m studies small --seeds=2\n" in page
    assert "| A | high | 80.05 " in page
    assert "The paper" not in page and "paper: top-1" not in page
    assert "No paper makes a statement about this. Of 1 statement" in page
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("small: 8 runs, 0 of them there; ")
    assert program.main(["small", f"--out={tmp_path}", "--ranks=1", "--seeds=2", "--render"]) == 0
    assert (tmp_path / "small.md").read_text() == page


@pytest.mark.parametrize("status", [trial_runs.MISSING, trial_runs.FAILED])
def test_an_arm_with_fewer_tuning_runs_than_the_others_is_not_reported(tmp_path, status):
    trials = tuning.plan(STUDY, tmp_path, 1)
    found = {
        t.cell: trial_runs.Result(trial_runs.FINISHED, summary={"val_top1": 0.5}) for t in trials
    }
    found[trials[2].cell] = trial_runs.Result(status)  # A, high
    choices = tuning.choose(STUDY, trials, found)
    assert [choice.missing for choice in choices] == [1, 0]
    a, b = tuning.reported(STUDY, choices).arms
    assert (a.chosen, b.chosen) == ("", "low")
    assert set(tuning.untuned(a, range(2))) == {0, 1}
    assert not tuning.untuned(b, range(2))
    assert any("3 of these 4 runs are there" in line for line in tuning.lines(choices))
    assert "| A | low: 50.00 %; high: - | not tuned yet |" in tuning.lines(choices)


def test_cost_counts_images_left_and_takes_off_what_is_there(tmp_path):
    cells = [trial.cell for trial in tuning.plan(STUDY, tmp_path, 1)]
    assert cost.images(cells[0]) == (60_000 - questions.TUNING) * 16 == 200_000
    # 4 runs and 6 later ones of 0.2 million images each: 2 million, at 1,000 images/s 0.6 hours.
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


def test_several_seeds_choose_by_their_mean(tmp_path):
    trials = tuning.plan(HANDOVER, tmp_path, 1)
    assert len(trials) == 2 * sum(len(arm.points) for arm in HANDOVER.arms)
    seeds = [config.resolve(trial.cell.flags).seed for trial in trials]
    assert seeds == sorted(seeds) and set(seeds) == {tuning.SEED, tuning.SEED + 1}
    assert len({trial.cell for trial in trials}) == len(trials)
    top1 = {
        "a N, step x 0.5, poly, ramp 0": (0.9, 0.7),
        "a N, step x 0.25, poly, ramp 0": (0.81, 0.81),
    }
    found = {}
    for trial, seed in zip(trials, seeds, strict=True):
        value = top1.get(trial.point.label, (0.5, 0.5))[seed - tuning.SEED]
        found[trial.cell] = trial_runs.Result(trial_runs.FINISHED, summary={"val_top1": value})
    choice, *_ = tuning.choose(HANDOVER, trials, found)
    assert choice.point.label == "a N, step x 0.25, poly, ramp 0"
    assert choice.top1[:2] == (pytest.approx(0.8), pytest.approx(0.81))
    assert choice.missing == 0
