import pytest

from hybrid_imagenet.runlog import gaps, mlperf, summary


def epoch(number, top1=None, **more):
    return {"kind": "epoch", "epoch": number, "step": 10 * number, "seconds": 5.0 * number, "val_top1": top1, **more}


def gap(lost, finished, best, best_epoch=None):
    values = {"best_val_top1": best, "best_epoch": best_epoch}
    return {"kind": "gap", "epoch": finished, "step": 10 * finished, "lost_epochs": lost, **values}


@pytest.mark.parametrize(
    ("records", "finished", "missing"),
    [
        ([], 0, []),
        ([], 3, [1, 2, 3]),
        ([epoch(1), {"kind": "step", "epoch": 2}], 2, [2]),
        ([epoch(3)], 4, [1, 2, 4]),
        ([epoch(1), gap([2, 3], 3, 0.5), epoch(4)], 4, []),
        ([gap([1, 2], 2, 0.5)], 4, [3, 4]),
    ],
)
def test_missing_epochs_are_found_once(records, finished, missing):
    assert gaps.find(records, finished) == missing


def test_numbers_in_words():
    assert gaps.ranges([1, 2, 3, 7, 9, 10]) == "1 to 3, 7, 9 to 10"
    assert gaps.ranges([]) == ""


def summarized(records, target=0.75):
    return summary.summarize(records, world_size=1, images_per_epoch=100, targets=(target,))


def test_the_best_result_is_that_of_the_checkpoint():
    """A run whose metrics.jsonl was deleted ended with the best of the epochs after that."""
    result = summarized([gap([1, 2], 2, 0.8, 2), epoch(3, 0.5)])
    assert (result["best_val_top1"], result["best_epoch"]) == (0.8, 2)
    assert (result["epochs"], result["lost_epochs"], result["val_top1"]) == (3, [1, 2], 0.5)
    assert summarized([gap([1, 2], 2, 0.8), epoch(3, 0.5)])["best_epoch"] is None
    assert summarized([gap([1, 2], 2, 0.8, 2), epoch(3, 0.9)])["best_epoch"] == 3
    assert summarized([gap([1, 2], 2, None)])["epochs"] == 2
    assert "epochs 1 to 2" in " ".join(summary.lines(result))


@pytest.mark.parametrize(
    ("records", "found", "known"),
    [
        ([epoch(1, 0.5), epoch(2, 0.8)], 2, True),
        ([gap([1], 1, 0.5), epoch(2, 0.8)], 2, True),  # none of the lost reached it
        ([gap([1], 1, 0.8), epoch(2, 0.8)], None, False),  # perhaps the first did
        ([gap([1], 1, 0.8)], None, False),
        ([gap([1], 1, 0.5)], None, True),
        ([epoch(1, 0.8), gap([2, 3], 3, 0.9)], 1, True),
    ],
)
def test_a_target_that_a_lost_epoch_may_have_reached_is_not_known(records, found, known):
    goal, top5 = summarized(records)["targets"]
    assert (goal["epochs"], goal.get("known", True)) == (found, known)
    assert goal["convergence_rate"] == (None if found is None else 1 / found)
    assert top5.get("known", True) == (not gaps.lost(records))  # nothing is known of the top-5 of lost epochs


def test_steps_of_lost_epochs_are_not_those_of_the_next():
    measured = {"communication_seconds": 0.1, "train_seconds": 1.0, "images_per_second": 100.0}
    whole = [epoch(number, 0.5, **measured) for number in (1, 2, 3)]
    assert summarized(whole)["time_by_cause"]["exposed communication"] == pytest.approx(3.0)
    cut = [gap([1, 2], 2, 0.5), *whole[2:]]
    assert summarized(cut)["time_by_cause"].get("exposed communication", 0.0) == 0.0


def test_mlperf_logs_success_that_the_checkpoint_knows_of():
    log = mlperf.log([gap([1], 1, 0.8), epoch(2, 0.5)], {"flags": {"target": [0.75]}}, 0.0)
    assert '"status": "success"' in log.splitlines()[-1]
