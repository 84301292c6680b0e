import json
import sys

from hybrid_imagenet.benchmarks import input as benchmark
from tests.support import fresh


def test_without_dali_its_row_says_why_it_did_not_run(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    row = benchmark.shown(
        benchmark._ours("shards", "tfrecord", None, benchmark.parser().parse_args([]), "dali")
    )
    assert row["error"].startswith("did not run: --decoder=dali: NVIDIA DALI cannot be loaded")
    assert row["error"] in capsys.readouterr().out


def test_a_source_is_measured():
    arguments = benchmark.parser().parse_args(
        ["--seconds=0.2", "--batch=4", "--image_size=32", "--threads=1"]
    )
    row = benchmark._ours("made up", "synthetic", None, arguments)
    assert row["images_per_second"] > 0
    assert 0 <= row["wait_share"] <= 1


def test_its_table_stands_without_the_greeting_of_tensorflow():
    words = ["--source=synthetic", "--seconds=0.1", "--batch=2", "--image_size=32", "--threads=1"]
    codes, loaded, errors = fresh.run(("hybrid_imagenet.benchmarks.input", words))
    assert (codes, errors) == ([0], "")
    assert "tensorflow" in loaded


def test_no_password_is_written(tmp_path):
    words = ["--data_dir=https://ann:hunter2@host/set", f"--json={tmp_path / 'input.json'}"]
    benchmark.write(benchmark.parser().parse_args(words), [])
    assert json.loads((tmp_path / "input.json").read_text())["data_dir"] == "https://***@host/set"
