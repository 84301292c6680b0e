"""Flags that change how a run computes, reads or reports, but not its result."""

from unittest import mock

import numpy as np
import pytest

from hybrid_imagenet.training import build
from tests.support import program

FLAGS = (
    "--optimizer=sgd",
    "--epochs=1",
    "--warmup_epochs=0",
    "--model_width=4",
    "--image_size=8",
    "--nokeep_best",
)


def run(data, folder, *flags):
    """Trains one epoch; returns its record and the arrays of its checkpoint."""
    done = program.train_here(data, folder, *FLAGS, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (epoch,) = [record for record in program.records(folder) if record["kind"] == "epoch"]
    return epoch, program.arrays(folder)


@pytest.fixture(scope="module")
def plain(tiny_data, tmp_path_factory):
    """Returns the results of a run without further flags."""
    return run(tiny_data, tmp_path_factory.mktemp("plain") / "run")


@pytest.mark.slow
def test_jit_compile_gives_the_same_result_except_for_rounding(plain, tiny_data, tmp_path):
    with mock.patch.object(build, "TrainStep", wraps=build.TrainStep) as train_step:
        epoch, arrays = run(tiny_data, tmp_path / "run", "--jit_compile")
    assert train_step.call_args.kwargs["jit_compile"] is True
    assert epoch["train_loss"] == pytest.approx(plain[0]["train_loss"], rel=1e-4)
    for name, value in plain[1].items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
