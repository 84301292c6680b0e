import json

import pytest

from hybrid_imagenet.runlog import summary

TOP1 = [0.40, 0.76, 0.70, 0.80]


def records():
    """Returns four epochs of 1000 images with 2 s of validation each.

    The speeds are 100, 200, 250 and 200 images/s.
    """
    seconds = 0.0
    rows = []
    for epoch, (top1, rate) in enumerate(zip(TOP1, [100.0, 200.0, 250.0, 200.0], strict=True), 1):
        seconds += 1000 / rate + 2
        rows.append(
            {"kind": "step", "epoch": epoch, "step": epoch * 10 - 5, "seconds": seconds - 4}
        )
        rows.append(
            {
                "kind": "epoch",
                "epoch": epoch,
                "step": epoch * 10,
                "seconds": seconds,
                "images_per_second": rate,
                "train_seconds": 1000 / rate,
                "validation_seconds": 2.0,
                "data_wait_fraction": 0.1,
                "communication_seconds": 0.05,
                "train_loss": 1 / epoch,
                "val_loss": 2 / epoch,
                "val_top1": top1,
                "val_top5": round(top1 + 0.15, 2),
            }
        )
    return rows


def summarized(rows=None, **options):
    """Returns the summary of `rows`, or of the four epochs of `records`."""
    rows = records() if rows is None else rows
    return summary.summarize(rows, **{"world_size": 2, "images_per_epoch": 1000, **options})


def test_summarize_returns_results_epochs_and_throughput():
    result = summarized(targets=(0.75, 0.99), name="x")
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["name"] == "x"
    assert (result["val_top1"], result["val_top5"], result["val_loss"]) == (0.80, 0.95, 0.5)
    assert (result["best_val_top1"], result["best_epoch"], result["epochs"], result["steps"]) == (
        0.80,
        4,
        4,
        40,
    )
    assert result["wall_seconds"] == 10 + 5 + 4 + 5 + 8
    assert result["images_per_second"] == pytest.approx(4000 / 24)
    assert result["steady_images_per_second"] == 200
    assert (result["target"], result["epochs_to_target"], result["world_size"]) == (0.75, 2, 2)
    assert result["scaling_efficiency"] is None


def test_summarize_computes_the_criteria_of_a_target_as_defined():
    result = summarized(targets=(0.75,), single_gpu_images_per_second=125)
    assert result["scaling_efficiency"] == pytest.approx(200 / 250)
    goal, top5 = result["targets"]
    assert (goal["metric"], goal["target"], goal["epochs"], goal["seconds"]) == (
        "val_top1",
        0.75,
        2,
        19,
    )
    assert goal["convergence_rate"] == 0.5
    # Rate * single-GPU speed * GPUs * efficiency. The speed is in passes over 1000 images per
    # second.
    speed = 0.5 * (125 / 1000) * 2 * 0.8
    assert goal["actual_training_speed"] == pytest.approx(speed)
    assert goal["actual_training_seconds"] == pytest.approx(1 / speed)
    assert goal["actual_average_single_gpu_seconds"] == pytest.approx(1 / (0.5 * 0.125 * 0.8))
    assert (top5["metric"], top5["target"], top5["epochs"]) == ("val_top5", 0.93, 4)


def test_summary_of_a_run_on_two_numbers_of_gpus_has_no_speed():
    rows = records()
    for row in rows:
        row |= {
            "global_batch": 64 if row["epoch"] < 3 else 32,
            "per_gpu_batch": 8,
            "accumulation": 1,
        }
    result = summarized(rows, targets=(0.75,), single_gpu_images_per_second=125)
    assert result["scaling_efficiency"] is result["steady_images_per_second"] is None
    assert result["targets"][0]["epochs"] == 2
    assert result["targets"][0]["actual_average_single_gpu_seconds"] is None
    assert (
        "images/s on 2 ranks (before on a different number of ranks), "
        in summary.summary_lines(result)[1]
    )
    same_number = [row | {"global_batch": 64} for row in rows]
    assert summarized(same_number, workers=8)["steady_images_per_second"] == 200
    # The last session had 4 GPUs, but no step.
    assert summarized(same_number, workers=4)["steady_images_per_second"] is None


def test_dropped_images_are_summed_and_printed():
    rows = records()
    before = summarized(rows)
    assert (before["images_dropped"], before["bad_records"], before["val_dropped"]) == (
        None,
        None,
        None,
    )
    assert not [line for line in summary.summary_lines(before) if "dropped" in line]
    for epoch, row in enumerate(rows[1::2]):
        row |= {
            "train_count": 998,
            "train_dropped": 2,
            "bad_records": 2 - epoch % 2,
            "val_dropped": 3,
        }
    result = summarized(rows)
    assert (result["images_dropped"], result["bad_records"], result["val_dropped"]) == (8, 2, 3)
    line = (
        "8 training images dropped in all epochs for 2 bad records, 3 validation images in the last"
    )
    assert line in summary.summary_lines(result)


def test_target_not_reached_leaves_every_criterion_open():
    goal, _ = summarized(targets=(0.9,))["targets"]
    assert {k: v for k, v in goal.items() if v is not None} == {"metric": "val_top1", "target": 0.9}


def test_time_by_cause_adds_up_to_the_wall_time():
    result = summarized(single_gpu_images_per_second=125)
    causes = result["time_by_cause"]
    assert causes["computation"] == pytest.approx(4000 / 250)
    assert causes["input"] == pytest.approx(2.4)
    assert causes["exposed communication"] == pytest.approx(40 * 0.05)
    assert causes["evaluation"] == 8
    assert "checkpoints" not in causes
    assert sum(causes.values()) == pytest.approx(result["wall_seconds"])
    # The speed of a run on one rank does not show what that run lost.
    for ranks in (1, 2):
        unknown = summarized(world_size=ranks)["time_by_cause"]
        assert "computation" not in unknown
        assert sum(unknown.values()) == pytest.approx(32)


def test_summary_of_a_run_without_an_epoch_has_no_results():
    result = summarized([{"kind": "step", "step": 3, "seconds": 1.5}])
    assert (result["epochs"], result["steps"], result["val_top1"], result["wall_seconds"]) == (
        0,
        3,
        None,
        1.5,
    )
    assert summarized([])["wall_seconds"] is None
    assert summary.summary_lines(result)[0] == "nothing validated after 3 steps"
    # The last two steps have no record.
    saved = summarized([{"kind": "step", "step": 3}], steps=5)
    assert summary.summary_lines(saved)[0] == "nothing validated after 5 steps"


def test_summary_lines_name_results_speed_and_targets():
    result = summarized(targets=(0.75, 0.99), single_gpu_images_per_second=125, num_classes=1000)
    text = "\n".join(summary.summary_lines(result))
    for part in (
        *("top-1 80.00 %", "after 4 epochs", "2 ranks", "efficiency 80.00 %", "19.0 s"),
        *("reached target 75 % in epoch 2, after", "reached target top-5 93 % in epoch 4, after"),
        "did not reach target 99 %: the best is 19.00 points below",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("facts", "goals", "measures"),
    [
        ({"num_classes": 1000, "gpus": True, "target_asked": False}, ["75 %", "top-5 93 %"], 2),
        ({"num_classes": 1000, "gpus": False, "target_asked": False}, ["75 %", "top-5 93 %"], 0),
        ({"num_classes": 10, "gpus": True, "target_asked": True}, ["75 %"], 0),
        ({"num_classes": 10, "gpus": False, "target_asked": False}, [], 0),
    ],
)
def test_summary_lines_print_only_relevant_targets_and_measures(facts, goals, measures):
    text = summary.summary_lines(summarized(targets=(0.75,), epochs_planned=9, **facts))
    assert [line.split(" in ")[0] for line in text if "target" in line] == [
        f"reached target {goal}" for goal in goals
    ]
    assert len([line for line in text if "Lu et al.: convergence rate" in line]) == measures
    assert text[0].endswith("after 4 of 9 epochs")


@pytest.mark.parametrize(
    ("epochs", "text"),
    [(90, "90"), (0.853333, "0.85"), (12.5, "12.5"), (3.0, "3"), (0, "0"), (0.001, "0.001")],
)
def test_format_epochs_has_at_most_two_digits_after_the_point(epochs, text):
    assert summary.format_epochs(epochs) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (59.9, "59.9 s"), (60, "1 min 00 s"), (3599.7, "1 h 00 min")],
)
def test_format_duration(seconds, text):
    assert summary.format_duration(seconds) == text


def test_last_throughput_after_a_resume_on_other_gpus_uses_the_last_epochs():
    def record(epoch, gpus, rate, **more):
        sizes = {"per_gpu_batch": 8, "global_batch": 8 * gpus}
        return {
            "kind": "epoch",
            "epoch": epoch,
            "images_per_second": rate,
            "train_seconds": 10.0,
            **sizes,
            **more,
        }

    rows = [
        record(1, 1, 50.0),
        record(2, 1, 60.0),
        record(3, 2, 10.0, train_start_seconds=9.0),
        record(4, 2, 110.0),
        record(5, 2, 120.0),
    ]
    assert summarized(rows, workers=2)["steady_images_per_second"] is None
    assert summary.last_throughput(rows) == 115.0
    # The step that was compiled does not count.
    assert summary.last_throughput(rows[:3]) == pytest.approx(100.0)
    assert summary.last_throughput([]) is None


def test_epochs_without_records_are_listed_and_their_steps_do_not_count():
    rows = [row for row in records() if row["epoch"] not in (2, 3)]
    result = summarized(rows)
    assert result["lost_epochs"] == [2, 3]
    assert any("no records of 2 epochs" in line for line in summary.summary_lines(result))
    # Only the first epoch counts: the number of steps of the fourth is unknown.
    assert result["time_by_cause"]["exposed communication"] == pytest.approx(10 * 0.05)
