"""Tests the summary of HAL's records."""

import csv
import hashlib
import math
import pathlib
import re

import pytest

from studies import hal_records

RECORDS = pathlib.Path(__file__).parents[2] / "studies" / "records"


def write_records(path, runs):
    """Writes the records of runs; top-5 is 15 points above top-1.

    Args:
      path: Path of the file to write.
      runs: Top-1 and images/s of each epoch, by (gpus, images per GPU).
    """
    lines = ["gpus,per_gpu_batch,epoch,train_top1,val_top1,val_top5,images_per_second"]
    for (gpus, images), epochs in runs.items():
        for epoch, (top1, speed) in enumerate(epochs, start=1):
            lines.append(f"{gpus},{images},{epoch},0,{top1},{top1 + 15},{speed}")
    path.write_text("\n".join(lines) + "\n")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_summarize_two_runs_gives_accuracy_zigzag_and_efficiency(tmp_path, monkeypatch):
    straight = [(float(epoch), 100.0) for epoch in range(1, 61)]
    # Up and down by 2 points around 74, so every second difference is ±4 points.
    zigzag = [(75.0 if epoch % 2 else 73.0, 300.0) for epoch in range(1, 61)]
    path = tmp_path / "records.csv"
    digest = write_records(path, {(2, 208): straight, (4, 208): zigzag})
    monkeypatch.setattr(hal_records, "SHA256", digest)
    first, second = hal_records.summarize(hal_records.read(path))
    assert (first["final_top1"], first["final_top5"], first["first_epoch_at_75"]) == (
        "60.00",
        "75.00",
        "",
    )
    assert (first["zigzag_1_30"], first["mean_top1_31_60"], first["efficiency"]) == (
        "0.00",
        "45.5",
        "1.000",
    )
    assert (second["global_batch"], second["epochs"], second["first_epoch_at_75"]) == (832, 60, 1)
    assert (second["zigzag_1_30"], second["zigzag_31_60"], second["efficiency"]) == (
        "4.00",
        "4.00",
        "1.500",
    )


def test_hal_records_with_another_digest_prints_it_and_writes_nothing(tmp_path, capsys):
    path = tmp_path / "records.csv"
    write_records(path, {(2, 208): [(1.0, 1.0)]})
    assert hal_records.main([str(path), f"--results={tmp_path}"]) == 2
    assert f"instead of {hal_records.SHA256}" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == [path]


def test_hal_page_has_the_numbers_of_the_csv_file():
    page = (RECORDS / "hal.md").read_text()
    rows = re.findall(r"^\| (\d.*) \|$", page, re.M)
    with (RECORDS / "hal.csv").open() as file:
        expected = list(csv.DictReader(file))
    assert len(rows) == len(expected) == 11
    for row, values in zip(rows, expected, strict=True):
        cells = [cell.strip().replace(",", "").removesuffix(" %") for cell in row.split("|")]
        *others, efficiency = [values[name] or "never" for name in hal_records.COLUMNS]
        assert cells[:-1] == others
        assert math.isclose(float(cells[-1]), 100 * float(efficiency), abs_tol=1e-6)
    assert hal_records.SHA256 in page


@pytest.mark.parametrize("statement", ["76.24 to 76.29 %", "75.91 %", "75.14 %", "71.93 %"])
def test_hal_page_states_only_accuracies_of_the_csv_file(statement):
    with (RECORDS / "hal.csv").open() as file:
        accuracies = {row["final_top1"] for row in csv.DictReader(file)}
    assert set(re.findall(r"\d\d\.\d\d", statement)) <= accuracies
    assert statement in (RECORDS / "hal.md").read_text()
