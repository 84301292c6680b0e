import json

import pytest

from hybrid_imagenet.benchmarks import start
from hybrid_imagenet.errors import UserError

FLAGS = ["--dataset=digits", "--augmentation=digits", "--model=resnet8", "--image_size=16", "--per_gpu_batch=4"]


@pytest.mark.slow
def test_times_of_help_and_of_a_first_step(tmp_path):
    path = tmp_path / "start.json"
    assert start.main(["--launcher=", f"--json={path}", "--", *FLAGS]) == 0
    report = json.loads(path.read_text())
    assert 0 < report["help_seconds"] < report["first_step_seconds"]
    assert report["flags"] == FLAGS


def test_a_job_that_does_not_get_to_a_step_says_why():
    with pytest.raises(UserError, match="is not installed"):
        start.first_step_seconds(["/nowhere/run"], FLAGS, 60)
    with pytest.raises(UserError, match=r"no first step after .*--model=resnet5"):
        start.first_step_seconds([], ["--model=resnet5"], 60)
