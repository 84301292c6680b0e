"""Tests the assessment of a run: outcome, causes and suggestions."""

import dataclasses
import json

import pytest

from hybrid_imagenet import config
from hybrid_imagenet.commands.report import findings, load, page, report_command
from hybrid_imagenet.commands.report.findings import suggestions
from tests.commands.report.synthetic import make_run


def with_flags(run, **flags):
    """Changes flags of a run; returns it."""
    run.flags.update(flags)
    return run


def changes(run):
    """Returns the suggested flags and commands."""
    return [suggestion.change for suggestion in suggestions(run)]


def test_assess_of_a_reached_target_is_good_and_suggests_to_stop_there(tmp_path):
    run = load.load_run(make_run(tmp_path / "run", target_top1=[0.6], seed=3))
    assessment = findings.assess(run)
    assert assessment.verdict == findings.GOOD
    assert assessment.outcome.startswith("Target 60 % top-1 reached in epoch 6 of 12, after ")
    assert changes(run)[0] == "--stop_at_top1=0.6"


def test_assess_of_a_missed_target_is_bad_and_has_the_distance(tmp_path):
    run = load.load_run(make_run(tmp_path / "run", target_top1=[0.9]))
    assessment = findings.assess(run)
    best = run.summary["best_val_top1"]
    assert assessment.verdict == findings.BAD
    assert f"{100 * (0.9 - best):.2f} points off" in assessment.outcome
    assert f"{100 * best:.2f}" in assessment.outcome
    assert "in epoch 12" in assessment.outcome


@pytest.mark.parametrize(
    ("flags", "summary", "expected"),
    [
        # Validation accuracy is rising, and training accuracy is not far above it.
        ({}, {}, ["--epochs=18", "--lr=0.2"]),
        ({"max_steps": 40}, {"epochs": 5}, ["without --max_steps", "--lr=0.2"]),
        ({}, {"train_top1": 1.0}, ["--epochs=18", "--label_smoothing=0.1"]),
        # Accuracy on mixed images is not a cause. The last one belongs to every such run.
        ({"mixup_alpha": 0.2}, {"train_top1": 1.0}, ["--epochs=18", "--eval_every_epochs=2"]),
        ({"cutmix_alpha": 1.0}, {"train_top1": 0.3}, ["--epochs=18", "--eval_every_epochs=2"]),
        # The learning rate of --lr acts after the warmup.
        ({"warmup_epochs": 12.0}, {}, ["--epochs=24", "--eval_every_epochs=2"]),
    ],
    ids=["rising", "cut short", "overfitted", "blended", "cut and pasted", "warmup only"],
)
def test_suggestions_for_a_missed_target_follow_its_cause(tmp_path, flags, summary, expected):
    run = load.load_run(make_run(tmp_path / "run", target_top1=[0.9], **flags))
    run.summary.update(summary)
    assert changes(run)[:2] == expected


@pytest.mark.parametrize(
    ("state", "words"),
    [("running", "top-1 not reached yet, "), ("killed", "top-1 not reached, ")],
)
def test_assess_of_an_unfinished_run_has_the_word_yet_only_while_it_runs(tmp_path, state, words):
    run = load.load_run(make_run(tmp_path / "run", epochs=4, finished=False, target_top1=[0.9]))
    assert words in findings.assess(dataclasses.replace(run, state=state)).outcome


@pytest.mark.parametrize(("best", "expected"), [(0.85, "--lr=0.05"), (0.8, "--lr=0.2")])
def test_suggestions_lower_the_learning_rate_if_validation_fell_far(tmp_path, best, expected):
    run = load.load_run(make_run(tmp_path / "run", target_top1=[0.9]))
    run.summary.update(best_val_top1=best, best_epoch=8)
    suggestion = suggestions(run)[0]
    assert suggestion.change == expected
    fell = "fell from 85 % in epoch 8 to 78.77 % at the end" in suggestion.reason
    assert fell == (best == 0.85)


@pytest.fixture
def run_without_target(tmp_path):
    run = load.load_run(make_run(tmp_path / "run"))
    run.origins["target_top1"] = "default"
    return run


def overfit(run):
    """Makes the validation loss of a run rise from epoch 7 on."""
    for number, record in enumerate(run.epochs[6:]):
        record["val_loss"] = 0.7 + 0.1 * number


def test_assess_without_target_is_good_if_nothing_is_wrong(run_without_target):
    assessment = findings.assess(run_without_target)
    assert assessment.verdict == findings.GOOD
    assert "No overfitting, and input kept up." in assessment.outcome


def test_assess_without_target_is_bad_if_input_bound(run_without_target):
    input_seconds = 0.2 * run_without_target.summary["wall_seconds"]
    run_without_target.summary["time_by_cause"] = {"computation": 1.0, "input": input_seconds}
    assessment = findings.assess(run_without_target)
    assert assessment.verdict == findings.BAD
    assert "Input-bound: 20 % of the time" in assessment.outcome


def test_assess_without_target_is_bad_if_overfitted(run_without_target):
    overfit(run_without_target)
    assessment = findings.assess(run_without_target)
    assert assessment.verdict == findings.BAD
    text = "Overfitting: the validation loss was lowest in epoch 7 (0.7) and ended at 1.2."
    assert text in assessment.outcome


def test_describe_overfitting_is_empty_if_the_training_loss_rises_too(run_without_target):
    overfit(run_without_target)
    for record in run_without_target.epochs:
        record["train_loss"] = record["val_loss"]
    assert findings.describe_overfitting(run_without_target) == ""


def test_assess_without_target_judges_by_the_papers_targets_on_imagenet(run_without_target):
    overfit(run_without_target)
    run_without_target.flags["dataset"] = "imagenet2012"
    assessment = findings.assess(run_without_target)
    assert assessment.verdict == findings.GOOD
    assert "Target 75 % top-1 reached" in assessment.outcome


def test_assess_of_a_stopped_run_is_open_and_has_the_command_to_continue(tmp_path):
    path = make_run(tmp_path / "run", epochs=5, target_top1=[0.78])
    summary = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps(summary | {"stop": "preempted"}))
    run = load.load_run(path)
    assessment = findings.assess(run)
    assert (
        assessment.verdict == findings.OPEN
        and "(stopped after 5 of 12 epochs)" in assessment.outcome
    )
    assert run.next_step == f"To continue it: hybrid-imagenet resume {path}"
    assert f"<p>To continue it: <code>hybrid-imagenet resume {path}</code></p>" in page.build(
        [run], "t"
    )


def test_assess_of_a_diverged_run_is_bad_and_suggests_smaller_steps(tmp_path):
    make_run(tmp_path / "run", epochs=2, finished=False, warmup_epochs=1)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"kind": "diverged", "step": 70, "seconds": 9.0, "train_loss": None}) + "\n"
        )
    run = load.load_run(tmp_path / "run")
    assessment = findings.assess(run)
    assert assessment.verdict == findings.BAD
    assert (
        assessment.outcome
        == "It diverged at step 70, after 2 of 12 epochs: the loss was not finite."
    )
    assert [s.change for s in suggestions(run)] == [
        "--lr=0.033",
        "--warmup_epochs=2",
        "--eval_every_epochs=2",
    ]
    assert "diverged at step 70" in page.build([run], "t")


def test_causes_follow_from_the_times_in_the_records(tmp_path):
    run = load.load_run(make_run(tmp_path / "run"))
    total = run.summary["wall_seconds"]
    run.summary["time_by_cause"] = {
        "computation": 0.6 * total,
        "input": 0.3 * total,
        "slowest rank": 0.08 * total,
        "evaluation": 0.02 * total,
    }
    for record in run.epochs:
        record["slowest_rank"] = int(record["epoch"] > 3)
    run.environment["hosts"] = ["a", "b"]
    lines = findings.assess(run).causes
    assert lines[0].startswith("30 % of the time (") and lines[0].endswith("waiting for input")
    assert lines[1].endswith("waiting for the slowest rank (rank 1 on b in 9 of 12 epochs)")
    # Evaluation took less than 3 % of the time.
    assert "evaluation" not in " ".join(lines)
    assert "Communication was not measured." in lines


CAUSES = [
    (
        "input",
        {"dataset": "folder"},
        ["hybrid-imagenet data prepare --from=folder --resize=256"],
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
def test_suggestions_have_a_remedy_for_each_cause(tmp_path, cause, flags, expected):
    run = with_flags(load.load_run(make_run(tmp_path / "run", target_top1=[0.78])), **flags)
    run.environment.update(gpu="a GPU", hosts=["a", "a"], precision="mixed_float16")
    total = run.summary["wall_seconds"]
    run.summary["time_by_cause"] = {"computation": 0.7 * total, cause: 0.3 * total}
    remedies = suggestions(run)
    assert [s.change for s in remedies][: len(expected)] == expected
    assert "30 % of the time" in remedies[0].reason
    # Every flag exists, and accepts its value.
    for suggestion in remedies:
        if suggestion.change.startswith("--"):
            config.resolve([suggestion.change])


def test_suggestion_to_accumulate_gradients_mentions_the_larger_batch(tmp_path):
    run = load.load_run(make_run(tmp_path / "run", target_top1=[0.78], compression="fp16"))
    run.summary["time_by_cause"] = {"exposed communication": 0.5 * run.summary["wall_seconds"]}
    (accumulation,) = [s for s in suggestions(run) if "accumulation" in s.change]
    assert "changes the optimization: the batch is twice as large" in accumulation.reason


@pytest.mark.parametrize("ends", ["finished", "unknown", "no epoch", "target asked"])
def test_assess_of_a_loss_far_above_guessing_is_bad_and_suggests_smaller_steps(ends, tmp_path):
    target = [0.99] if ends == "target asked" else [0.75]
    path = make_run(tmp_path / "run", epochs=4, finished=ends == "finished", target_top1=target)
    run = with_flags(load.load_run(path), num_classes=10, lr=0.1, warmup_epochs=2.0)
    run.origins["target_top1"] = "command line" if ends == "target asked" else "default"
    run.summary["time_by_cause"] = {"exposed communication": 0.9 * run.summary["wall_seconds"]}
    if ends == "no epoch":
        run.epochs.clear()
        run.summary["best_val_top1"] = None
    assert findings.loss_far_above_guessing(run) is None
    for record in (*run.steps, *run.epochs):
        record["train_loss"] = 24.2
    assessment = findings.assess(run)
    assert assessment.verdict == findings.BAD and assessment.causes_heading == "What held it back"
    assert assessment.outcome.endswith(
        "The training loss is 24.2, far above the 2.3 of guessing: it does not learn."
    )
    # There are no suggestions about speed.
    first, second = suggestions(run)
    assert (first.change, second.change) == ("--lr=0.033", "--warmup_epochs=4")
    assert (
        first.reason
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
def test_loss_far_above_guessing_depends_on_classes_and_loss(
    classes, loss, flags, is_far, tmp_path
):
    run = load.load_run(make_run(tmp_path / "run", epochs=1, num_classes=classes, **flags))
    run.epochs[-1]["train_loss"] = loss
    assert bool(findings.loss_far_above_guessing(run)) == is_far


@pytest.mark.parametrize(
    ("target", "heading"), [(0.6, "Where the time went"), (0.99, "What held it back")]
)
def test_causes_heading_depends_on_whether_the_target_was_missed(target, heading, tmp_path):
    run = load.load_run(make_run(tmp_path / "run", target_top1=[target]))
    assert findings.assess(run).causes_heading == heading
    assert f"<h4>{heading}</h4>" in page.build([run], "t")
    assert f"{heading}:" in report_command.summary_lines(run)


def test_page_names_the_best_of_several_runs_on_the_same_images(runs):
    loaded = load.load_runs(runs)
    text = page.build(loaded, "t")
    assert "Best top-1: two" in text
    for name, value in (("val_fraction", 0.3), ("data_dir", "elsewhere")):
        loaded[0].flags[name] = value
        other = page.build(loaded, "t")
        assert "Best top-1" not in other and "validated on different images" in other
        loaded[0].flags[name] = loaded[1].flags.get(name)
    assert text.count('<article class="answer') == 2


@pytest.fixture
def run_with_update_jump(tmp_path):
    """Returns a run whose updates grew 12-fold after the warmup."""
    run = load.load_run(make_run(tmp_path / "run", hybrid_ramp_epochs=0))
    for record in run.epochs:
        size = 0.01 if record["phase"] == 0 else 0.12
        record["relative_updates"] = {"a": size / 2, "b": size, "c": 2 * size}
    return run


def lower_accuracy_after_warmup(run):
    run.epochs[3]["train_top1"] = 0.45
    run.epochs[4]["train_top1"] = 0.37


def test_handover_note_has_the_growth_of_updates(run_with_update_jump):
    line = "Right after the warmup, in epoch 5, updates grew 12-fold relative to the weights."
    assert findings.assess(run_with_update_jump).handover_note == line
    # Accuracy did not fall, so there is nothing to change.
    assert "--hybrid_ramp_epochs=2" not in changes(run_with_update_jump)


def test_handover_note_has_the_fall_of_accuracy(run_with_update_jump):
    lower_accuracy_after_warmup(run_with_update_jump)
    note = findings.assess(run_with_update_jump).handover_note
    assert "relative to the weights, and training accuracy fell from 45 % to 37 %." in note
    assert f"<p>{note}</p>" in page.build([run_with_update_jump], "t")


def test_suggestions_ramp_lars_if_accuracy_fell_after_the_warmup(run_with_update_jump):
    lower_accuracy_after_warmup(run_with_update_jump)
    assert changes(run_with_update_jump)[0] == "--hybrid_ramp_epochs=2"
    run_with_update_jump.flags["hybrid_ramp_epochs"] = 2
    assert changes(run_with_update_jump)[0] != "--hybrid_ramp_epochs=2"


def test_causes_begin_with_the_update_jump_if_the_target_was_missed(run_with_update_jump):
    run_with_update_jump.summary["targets"][0]["epochs"] = None
    assert findings.assess(run_with_update_jump).causes[0].startswith("Right after the warmup")
