"""Flags that change how a run computes, reads or reports, and not what it comes to."""

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
    done = program.train_here(data, folder, *FLAGS, *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    (epoch,) = [record for record in program.records(folder) if record["kind"] == "epoch"]
    return epoch, program.arrays(folder)


@pytest.fixture(scope="module")
def plain(tiny_data, tmp_path_factory):
    return run(tiny_data, tmp_path_factory.mktemp("plain") / "run")


def test_images_are_kept_in_memory(plain, tiny_data, tmp_path):
    epoch, arrays = run(tiny_data, tmp_path / "run", "--data_cache=encoded")
    for name, value in plain[1].items():
        np.testing.assert_array_equal(arrays[name], value, err_msg=name)
    assert epoch["reads"] == plain[0]["reads"] == program.TRAIN


@pytest.mark.slow
def test_a_step_that_xla_compiles_differs_by_roundings(plain, tiny_data, tmp_path):
    with mock.patch.object(build, "TrainStep", wraps=build.TrainStep) as made:
        epoch, arrays = run(tiny_data, tmp_path / "run", "--jit_compile")
    assert made.call_args.kwargs["jit_compile"] is True
    assert epoch["train_loss"] == pytest.approx(plain[0]["train_loss"], rel=1e-4)
    for name, value in plain[1].items():
        np.testing.assert_allclose(arrays[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
