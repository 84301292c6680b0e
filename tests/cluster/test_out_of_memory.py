"""Tests that errors of exhausted memory are recognized, and the messages that users see."""

import re
import sys

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hybrid_imagenet import train
from hybrid_imagenet.cluster import out_of_memory
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.comm import process
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import EXIT_USAGE
from tests.support import in_process

ON_GPU = (
    "OOM when allocating tensor with shape[256,64,112,112] and type half on"
    " /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc"
)
ON_HOST = ON_GPU.replace("GPU:0 by allocator GPU_0_bfc", "CPU:0 by allocator cpu")
BY_XLA = "Out of memory while trying to allocate 17179869184 bytes."


def exhausted(text=ON_GPU):
    return tf.errors.ResourceExhaustedError(None, None, text)


@pytest.mark.parametrize(
    "error",
    [
        exhausted(),
        exhausted(ON_HOST),
        exhausted(BY_XLA),
        exhausted(f"Collective ops is aborted by: {ON_GPU}"),
        tf.errors.InternalError(
            None, None, "cudaSetDevice() on GPU:0 failed. Status: out of memory"
        ),
        tf.errors.InternalError(None, None, "Dst tensor is not initialized."),
        tf.errors.UnknownError(None, None, "CUDNN_STATUS_ALLOC_FAILED in cudnnCreate"),
        RuntimeError("failed call to cuCtxCreate: CUDA_ERROR_OUT_OF_MEMORY: out of memory"),
        HorovodInternalError("ncclCommInitRank failed: unhandled cuda error: out of memory"),
    ],
)
def test_is_out_of_memory_is_true_for_errors_of_exhausted_memory(error):
    assert out_of_memory.is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        exhausted("/data/cache; No space left on device"),
        exhausted("/data/train-00000; Too many open files"),
        # This is the error of another rank, which TensorFlow repeats here.
        tf.errors.UnavailableError(None, None, f"Collective ops is aborted by: {ON_GPU}"),
        HorovodInternalError("Horovod has been shut down"),
        ValueError("out of memory"),
    ],
)
def test_is_out_of_memory_is_false_for_other_errors(error):
    assert not out_of_memory.is_out_of_memory(error)


@pytest.mark.parametrize(
    ("text", "gpus", "where"),
    [
        (ON_GPU, ["gpu"], "GPU"),
        (BY_XLA, ["gpu"], "GPU"),
        (BY_XLA, [], "host"),
        (ON_HOST, ["gpu"], "host"),
    ],
)
def test_user_error_names_the_memory_that_ran_out(text, gpus, where, monkeypatch):
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    error = out_of_memory.user_error(exhausted(text), "Use less.")
    assert str(error) == f"The memory of the {where} is too small for this training. Use less."


def fail(*_):
    raise exhausted()


def test_training_that_runs_out_of_memory_prints_the_batch_to_try(monkeypatch):
    monkeypatch.setattr(train, "run", fail)
    flags = ["--recipe=hybrid", "--dataset=synthetic", "--progress=none", "--per_gpu_batch=64"]
    code, _, errors = in_process.call("hybrid_imagenet.main", flags)
    assert code == EXIT_USAGE
    assert errors.startswith("error: The memory of the ")
    assert "64 images per GPU. Try --per_gpu_batch=32 --gradient_accumulation_steps=2" in errors
    assert errors.count("\n") == 1


def test_command_that_runs_out_of_memory_prints_one_line(capfd):
    assert command_line.run_command(fail, []) == EXIT_USAGE
    output = capfd.readouterr().err
    assert output.endswith("Use a smaller batch.\n")
    assert output.count("\n") == 1


def test_fit_on_ranks_that_runs_out_of_memory_prints_one_line(capfd, monkeypatch):
    placement = Placement(rank=4, size=8, local_rank=0, local_size=4)
    monkeypatch.setattr(process, "_current_placement", lambda: placement)
    monkeypatch.setattr(process.rank_failure.os, "_exit", sys.exit)
    monkeypatch.setattr(process.sys, "excepthook", sys.__excepthook__)
    error = exhausted()
    process.install_excepthook()
    try:
        with pytest.raises(SystemExit, match="2"):
            sys.excepthook(type(error), error, None)
    finally:
        process.shutdown()
    assert re.match(r"error: rank 4 on \S+: The memory of the ", capfd.readouterr().err)
