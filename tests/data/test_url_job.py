"""Tests a job whose images come from a server that dies during an epoch."""

import re

import numpy as np
import pytest

from hybrid_imagenet.errors import EXIT_STALLED
from tests.data import support
from tests.data.http_server import Server
from tests.support import program


@pytest.mark.slow
def test_job_whose_server_dies_prints_one_line_and_resumes_with_the_same_result(
    tmp_path,
):
    directory = tmp_path / "set"
    directory.mkdir()
    for split, count in (("train", program.TRAIN), ("validation", program.VALIDATION)):
        pairs = [
            (support.jpeg(number, 40, 40), number % program.CLASSES) for number in range(count)
        ]
        support.write_tars(directory, split, pairs, per_file=6)
    support.write_info(directory)
    flags = [
        "--dataset=webdataset",
        "--shuffle_window=2",
        "--checkpoint_every_steps=1",
        "--epochs=2",
    ]
    whole = program.train(2, directory, tmp_path / "whole", *flags)
    assert whole.returncode == 0, whole.stdout + whole.stderr

    server = Server(directory, tmp_path / "log", dies_after=6)
    flags += [f"--data_cache_dir={tmp_path / 'copies'}", "--storage_timeout=3"]
    cut = program.train(2, server.url, tmp_path / "cut", *flags)
    assert cut.returncode == EXIT_STALLED, cut.stdout + cut.stderr
    assert "has failed for --storage_timeout=3 seconds" in cut.stderr
    assert "Traceback" not in cut.stderr
    # The server died within the first or the second epoch.
    assert 1 <= max(record["step"] for record in program.records(tmp_path / "cut")) < 8
    server.start()
    resumed = program.train(2, server.url, tmp_path / "cut", *flags, "--resume")
    server.kill()
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert re.search(r"resumed at epoch 0\.[257]\d*, step [123],", resumed.stdout)
    expected = program.arrays(tmp_path / "whole")
    arrays = program.arrays(tmp_path / "cut")
    assert [
        name for name, value in expected.items() if not np.array_equal(value, arrays[name])
    ] == []
    assert program.without_times(tmp_path / "cut") == program.without_times(tmp_path / "whole")
