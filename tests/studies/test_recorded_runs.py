"""Tests that runs are found in CSV files by their flags."""

import pytest

from hybrid_imagenet.errors import UserError
from studies import trial_runs
from studies.recorded_runs import Records

HEADER = "study,arm,seed,status,val_top1,epochs_to_target,val_top1_by_epoch,flags,reason\n"


def write(directory, *rows):
    (directory / "x.csv").write_text(HEADER + "".join(f"{row}\n" for row in rows))
    return Records(directory)


def test_records_find_a_run_with_flags_in_another_order_and_data_elsewhere(tmp_path):
    records = write(
        tmp_path,
        "x,a,0,finished,0.5,1.5,- 0.4 0.5,--momentum=0.8 --seed=3 --data_dir=DIR,",
    )
    flags = ["--seed=3", "--data_dir=elsewhere", "--momentum=0.8"]
    result = records.find(trial_runs.create(tmp_path, flags, 1))
    assert result.status == trial_runs.FINISHED
    assert result.summary["val_top1"] == 0.5
    assert result.epochs == [
        {"epoch": 1},
        {"epoch": 2, "val_top1": 0.4},
        {"epoch": 3, "val_top1": 0.5},
    ]
    assert records.find(trial_runs.create(tmp_path, ["--seed=4", *flags[1:]], 1)) is None
    assert records.find(trial_runs.create(tmp_path, flags, 2)) is None


def test_records_skip_runs_that_did_not_end_and_flags_that_no_longer_exist(tmp_path):
    records = write(
        tmp_path,
        "x,a,0,missing,,,,--seed=3,",
        "x,a,0,finished,0.5,,0.5,--seed=4 --no_such_flag=1,",
    )
    assert records.find(trial_runs.create(tmp_path, ["--seed=3"], 1)) is None
    assert records.find(trial_runs.create(tmp_path, ["--seed=4"], 1)) is None


def test_records_of_a_directory_without_csv_files_are_an_error(tmp_path):
    with pytest.raises(UserError, match="has no CSV file"):
        Records(tmp_path)
