"""The program with --decoder=dali: without the package one line on all ranks; with it the same training."""

import pytest

from tests.data.test_dali import needs_dali
from tests.support import program


def test_a_missing_package_is_one_line_before_training(pools, tiny_data, tmp_path):
    done = program.train_on(pools[2], tiny_data, tmp_path / "run", "--decoder=dali", absent=["nvidia.dali"])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 2
    assert len(lines) == 1, done.stderr
    assert "--decoder=dali: NVIDIA DALI is not installed: install nvidia-dali-cuda120" in lines[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


@needs_dali
def test_training_goes_as_with_tensorflow(pools, tiny_data, tmp_path):
    epochs = {}
    for decoder in ("dali", "tensorflow"):
        done = program.train_on(pools[2], tiny_data, tmp_path / decoder, f"--decoder={decoder}", "--epochs=2")
        assert done.returncode == 0, done.stderr
        epochs[decoder] = program.without_times(tmp_path / decoder)
    assert len(epochs["dali"]) == len(epochs["tensorflow"]) == 2
    for ours, theirs in zip(epochs["dali"], epochs["tensorflow"], strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["val_count"] == program.VALIDATION
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=0.02)
