"""A profile that cannot be written is reported; training continues."""

import pytest
import tensorflow as tf

from hybrid_imagenet.training.profiler import Profiler


def exhausted(*_, **__):
    raise tf.errors.ResourceExhaustedError(None, None, "plugins/profile: No space left on device")


@pytest.mark.parametrize("where", ["start", "stop"])
def test_a_full_disk_does_not_end_training(tmp_path, monkeypatch, where):
    monkeypatch.setattr(tf.profiler.experimental, "start", exhausted if where == "start" else lambda folder: None)
    monkeypatch.setattr(tf.profiler.experimental, "stop", exhausted if where == "stop" else lambda: None)
    told = []
    profiler = Profiler([2, 3], tmp_path, lambda: None, told.append)
    for step in range(5):
        profiler.step_begins(step + 1)
        profiler.step_ends(step + 1)
    profiler.finish()
    [line] = told
    assert line.startswith(f"--profile_steps: no profile in {tmp_path}, training continues: ")
    assert "No space left on device" in line
