import json

import pytest

from hybrid_imagenet.benchmarks import input as benchmark
from tests.support import fresh


def test_measure_pipeline_returns_rate_and_wait_share():
    arguments = benchmark.make_parser().parse_args(
        ["--seconds=0.2", "--batch=4", "--image_size=32", "--threads=1"]
    )
    row = benchmark.measure_pipeline("synthetic", "synthetic", None, arguments)
    assert row["images_per_second"] > 0
    assert 0 <= row["wait_share"] <= 1


@pytest.mark.slow
def test_bench_input_prints_no_messages_of_tensorflow():
    words = ["--source=synthetic", "--seconds=0.1", "--batch=2", "--image_size=32", "--threads=1"]
    codes, loaded, errors = fresh.run(("hybrid_imagenet.benchmarks.input", words))
    assert (codes, errors) == ([0], "")
    assert "tensorflow" in loaded


def test_write_results_masks_passwords(tmp_path):
    words = ["--data_dir=https://ann:hunter2@host/set", f"--json={tmp_path / 'input.json'}"]
    benchmark.write_results(benchmark.make_parser().parse_args(words), [])
    assert json.loads((tmp_path / "input.json").read_text())["data_dir"] == "https://***@host/set"
