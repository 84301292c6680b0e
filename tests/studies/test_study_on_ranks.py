"""A study with real ranks: two methods, one seed, one epoch."""

import csv
import json

import pytest

from studies import command as program
from tests.support import program as training


@pytest.mark.slow
def test_a_study_trains_each_arm_once_and_writes_its_results(tiny_data, tmp_path, capsys):
    flags = (*training.FLAGS, "--model=resnet10", "--epochs=1", "--eval_batch=8", f"--data_dir={tiny_data}")
    words = ["gamma", f"--out={tmp_path}", "--seeds=1", "--", *flags]
    assert program.main(words) == 0, "".join(path.read_text() for path in tmp_path.glob("cells/*/output.txt"))
    configs = [json.loads(path.read_text()) for path in tmp_path.glob("cells/*/run/config.json")]
    assert sorted(config["flags"]["zero_last_gamma"] for config in configs) == [False, True]
    assert {config["world_size"] for config in configs} == {2}
    with (tmp_path / "gamma.csv").open() as file:
        rows = list(csv.DictReader(file))
    summaries = {
        json.loads(path.read_text())["flags"]["zero_last_gamma"]: json.loads((path.parent / "summary.json").read_text())
        for path in tmp_path.glob("cells/*/run/config.json")
    }
    for row, zero in zip(rows, (True, False), strict=True):
        assert row["status"] == "finished"
        assert float(row["val_top1"]) == pytest.approx(summaries[zero]["val_top1"], rel=1e-5)
    assert "2 ranks" in (tmp_path / "gamma.md").read_text()
    assert (tmp_path / "gamma.png").stat().st_size > 10_000
    capsys.readouterr()
    assert program.main(words) == 0  # nothing is trained a second time
    assert capsys.readouterr().out.count("(kept)") == 2
