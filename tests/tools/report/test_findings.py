"""What a report says first: outcome, causes, suggestions."""

import dataclasses
import json

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.tools.report import findings, load, page, report_command
from hybrid_imagenet.tools.report.findings import suggestions
from tests.tools.report.synthetic import make_run


def changed(run, **flags):
    """The run with other flags."""
    run.flags.update(flags)
    return run


def test_a_target_that_was_reached_and_what_it_would_have_taken(tmp_path):
    run = load.load(make_run(tmp_path / "run", target_top1=[0.6], seed=3))
    found = findings.answers(run)
    assert found.verdict == findings.GOOD
    assert found.outcome.startswith("Target 60 % top-1 reached in epoch 6 of 12, after ")
    changes = [suggestion.change for suggestion in suggestions(run)]
    assert changes[0] == "--stop_at_top1=0.6"


def test_a_target_that_was_missed_says_by_how_much(tmp_path):
    run = load.load(make_run(tmp_path / "run", target_top1=[0.9]))
    found = findings.answers(run)
    best = run.summary["best_val_top1"]
    assert found.verdict == findings.BAD
    assert f"{100 * (0.9 - best):.2f} points off" in found.outcome
    assert f"{100 * best:.2f}" in found.outcome and "in epoch 12" in found.outcome
    assert [s.change for s in suggestions(run)][:2] == [
        "--epochs=18",
        "--lr=0.2",
    ]  # rising, and not overfitted
    run.summary["epochs"] = 5
    assert suggestions(changed(run, max_steps=40))[0].change == "without --max_steps"
    for record in (run.summary, run.epochs[-1]):
        record["train_top1"] = 1.0
    assert "--label_smoothing=0.1" in [s.change for s in suggestions(run)]


def test_a_target_that_a_running_run_has_not_reached_is_not_missed_yet(tmp_path):
    run = load.load(make_run(tmp_path / "run", epochs=4, finished=False, target_top1=[0.9]))
    assert (
        "top-1 not reached yet, "
        in findings.answers(dataclasses.replace(run, state="running")).outcome
    )
    assert (
        "top-1 not reached, " in findings.answers(dataclasses.replace(run, state="killed")).outcome
    )


def test_advice_for_a_run_whose_validation_fell_is_no_higher_learning_rate(tmp_path):
    run = load.load(make_run(tmp_path / "run", target_top1=[0.9]))
    run.summary.update(best_val_top1=0.85, best_epoch=8)
    assert suggestions(run)[0].change == "--lr=0.05"
    assert "fell from 85 % in epoch 8 to 78.77 % at the end" in suggestions(run)[0].why
    run.summary["best_val_top1"] = 0.8
    assert suggestions(run)[0].change == "--lr=0.2"


def test_without_a_target_a_run_is_judged_by_its_curves_and_its_input(tmp_path):
    run = load.load(make_run(tmp_path / "run"))
    run.origins["target_top1"] = "default"
    found = findings.answers(run)
    assert found.verdict == findings.GOOD and "No overfitting, and input kept up." in found.outcome
    run.summary["time_by_cause"] = {"computation": 1.0, "input": 0.2 * run.summary["wall_seconds"]}
    found = findings.answers(run)
    assert found.verdict == findings.BAD and "Input-bound: 20 % of the time" in found.outcome
    for number, record in enumerate(run.epochs[6:]):
        record["val_loss"] = 0.7 + 0.1 * number
    text = findings.answers(run).outcome
    assert "Overfitting: the validation loss was least in epoch 7 (0.7) and ended at 1.2." in text
    for record in run.epochs:
        record["train_loss"] = record["val_loss"]
    assert findings.overfitting(run) == ""  # both rise: that is not overfitting
    run.flags["dataset"] = "imagenet2012"
    assert findings.answers(run).verdict != findings.OPEN  # there the papers' targets count


def test_a_run_that_was_stopped_goes_on_and_is_not_judged(tmp_path):
    path = make_run(tmp_path / "run", epochs=5, target_top1=[0.78])
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"stop": "preempted"}))
    run = load.load(path)
    found = findings.answers(run)
    assert found.verdict == findings.OPEN and "(stopped after 5 of 12 epochs)" in found.outcome
    assert run.following == f"To continue it: hybrid-imagenet resume {path}"
    assert f"<p>To continue it: <code>hybrid-imagenet resume {path}</code></p>" in page.build(
        [run], "t"
    )


def test_a_diverged_run(tmp_path):
    make_run(tmp_path / "run", epochs=2, finished=False, warmup_epochs=1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "diverged", "step": 70, "seconds": 9.0, "train_loss": None}) + "\n"
        )
    run = load.load(tmp_path / "run")
    found = findings.answers(run)
    assert found.verdict == findings.BAD
    assert found.outcome == "It diverged at step 70, after 2 of 12 epochs: the loss was not finite."
    assert [s.change for s in suggestions(run)] == [
        "--lr=0.033",
        "--warmup_epochs=2",
        "--eval_every_epochs=2",
    ]
    assert "diverged at step 70" in page.build([run], "t")


def test_what_held_it_back_is_what_the_records_say(tmp_path):
    run = load.load(make_run(tmp_path / "run"))
    whole = run.summary["wall_seconds"]
    run.summary["time_by_cause"] = {
        "computation": 0.6 * whole,
        "input": 0.3 * whole,
        "slowest rank": 0.08 * whole,
        "evaluation": 0.02 * whole,
    }
    for record in run.epochs:
        record["slowest_rank"] = int(record["epoch"] > 3)
    run.environment["hosts"] = ["a", "b"]
    lines = findings.answers(run).held_back
    assert lines[0].startswith("30 % of the time (") and lines[0].endswith("waiting for input")
    assert lines[1].endswith("waiting for the slowest rank (rank 1 on b in 9 of 12 epochs)")
    assert "evaluation" not in " ".join(lines)  # less than 3 %
    assert "Communication was not measured." in lines


CAUSES = [
    (
        "input",
        {"data_cache": "none", "decoder": "tensorflow"},
        ["--data_cache=encoded", "--decoder=dali"],
    ),
    (
        "exposed communication",
        {"compression": "none", "gradient_accumulation_steps": 1},
        ["--compression=fp16", "--gradient_accumulation_steps=2"],
    ),
    (
        "exposed communication",
        {"compression": "fp16", "gradient_accumulation_steps": 2},
        ["--gradient_accumulation_steps=4"],
    ),
    ("slowest rank", {}, ["hybrid-imagenet doctor"]),
]


@pytest.mark.parametrize(("cause", "flags", "expected"), CAUSES)
def test_each_cause_has_its_remedy(tmp_path, cause, flags, expected):
    run = changed(load.load(make_run(tmp_path / "run", target_top1=[0.78])), **flags)
    run.environment.update(gpu="a GPU", hosts=["a", "a"], precision="mixed_float16")
    whole = run.summary["wall_seconds"]
    run.summary["time_by_cause"] = {"computation": 0.7 * whole, cause: 0.3 * whole}
    found = suggestions(run)
    assert [s.change for s in found][: len(expected)] == expected
    assert "30 % of the time" in found[0].why
    for suggestion in found:  # every flag is one of the program's, with a value that it takes
        if suggestion.change.startswith("--"):
            config.resolve([suggestion.change])


def test_advice_that_changes_the_optimization_says_so(tmp_path):
    run = changed(load.load(make_run(tmp_path / "run", target_top1=[0.78])), compression="fp16")
    run.summary["time_by_cause"] = {"exposed communication": 0.5 * run.summary["wall_seconds"]}
    (accumulation,) = [s for s in suggestions(run) if "accumulation" in s.change]
    assert "changes the optimization: the batch is twice as large" in accumulation.why


@pytest.mark.parametrize("ends", ["finished", "unknown", "no epoch", "target asked"])
def test_a_loss_far_above_guessing_is_bad_and_its_advice_is_a_lower_learning_rate(ends, tmp_path):
    target = [0.99] if ends == "target asked" else [0.75]
    path = make_run(tmp_path / "run", epochs=4, finished=ends == "finished", target_top1=target)
    run = changed(load.load(path), num_classes=10, lr=0.1, warmup_epochs=2.0)
    run.origins["target_top1"] = "command line" if ends == "target asked" else "default"
    run.summary["time_by_cause"] = {"exposed communication": 0.9 * run.summary["wall_seconds"]}
    if ends == "no epoch":
        run.epochs.clear()
        run.summary["best_val_top1"] = None
    assert findings.far_above_guessing(run) is None
    for record in (*run.steps, *run.epochs):
        record["train_loss"] = 24.2
    found = findings.answers(run)
    assert found.verdict == findings.BAD and found.heading == "What held it back"
    assert found.outcome.endswith(
        "The training loss is 24.2, far above the 2.3 of guessing: it does not learn."
    )
    first, second = suggestions(run)  # and none about speed
    assert (first.change, second.change) == ("--lr=0.033", "--warmup_epochs=4")
    assert (
        first.why
        == "the training loss of 24.2 is far above the 2.3 of guessing; a third of the step"
    )


@pytest.mark.parametrize(
    ("classes", "loss", "flags", "is_far"),
    [
        (10, 3.4, {}, False),
        (10, 3.6, {}, True),
        (2, 1.6, {}, False),
        (2, 1.8, {}, True),
        (1000, 10.3, {}, False),
        (1000, 10.4, {}, True),
        (1000, 11.0, {"loss": "sigmoid"}, False),
        (1000, 12.0, {"loss": "sigmoid"}, True),
        (1000, 693.0, {"loss": "sigmoid", "model": "nets:own"}, False),
        (1, 5.0, {}, False),
    ],
)
def test_far_above_guessing_depends_on_classes_and_loss(classes, loss, flags, is_far, tmp_path):
    run = changed(load.load(make_run(tmp_path / "run", epochs=1)), num_classes=classes, **flags)
    run.epochs[-1]["train_loss"] = loss
    assert bool(findings.far_above_guessing(run)) == is_far


@pytest.mark.parametrize(
    ("target", "heading"), [(0.6, "Where the time went"), (0.99, "What held it back")]
)
def test_the_heading_of_a_run_that_reached_its_target_blames_nothing(target, heading, tmp_path):
    run = load.load(make_run(tmp_path / "run", target_top1=[target]))
    assert findings.answers(run).heading == heading
    assert f"<h4>{heading}</h4>" in page.build([run], "t")
    assert f"{heading}:" in report_command.text(run)


def test_of_several_runs_the_best_and_the_first_are_named(runs):
    loaded = load.load_all(runs)
    text = page.build(loaded, "t")
    assert "Best top-1: two" in text
    for name, value in (("val_fraction", 0.3), ("data_dir", "elsewhere")):
        loaded[0].flags[name] = value
        other = page.build(loaded, "t")
        assert "Best top-1" not in other and "validated on different images" in other
        loaded[0].flags[name] = loaded[1].flags.get(name)
    assert text.count('<article class="answer') == 2


def test_a_handover_whose_updates_jump_is_named(tmp_path):
    run = load.load(make_run(tmp_path / "run", hybrid_ramp_epochs=0))
    for record in run.epochs:
        size = 0.01 if record["phase"] == 0 else 0.12
        record["relative_updates"] = {"a": size / 2, "b": size, "c": 2 * size}
    line = findings.answers(run).handover
    assert (
        line == "Right after the warmup, in epoch 5, updates grew 12-fold relative to the weights."
    )
    assert "--hybrid_ramp_epochs=2" not in [s.change for s in suggestions(run)]  # nothing was lost
    run.epochs[3]["train_top1"], run.epochs[4]["train_top1"] = 0.45, 0.37
    assert (
        "relative to the weights, and training accuracy fell from 45 % to 37 %."
        in findings.answers(run).handover
    )
    assert suggestions(run)[0].change == "--hybrid_ramp_epochs=2"
    assert suggestions(changed(run, hybrid_ramp_epochs=2))[0].change != "--hybrid_ramp_epochs=2"
    assert f"<p>{findings.answers(run).handover}</p>" in page.build([run], "t")
    run.summary["targets"][0]["epochs"] = (
        None  # the target was missed: now it comes first among the causes
    )
    assert findings.answers(run).held_back[0].startswith("Right after the warmup")
