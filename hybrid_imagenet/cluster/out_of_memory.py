"""Recognizes errors that mean that a GPU or the host ran out of memory."""

from __future__ import annotations

import re
import sys

from hybrid_imagenet.errors import HostError

# TensorFlow's status RESOURCE_EXHAUSTED also means a full disk or too many open files, so the text
# of the error decides.
_OUT_OF_MEMORY = re.compile(
    r"OOM when allocating|[Oo]ut of memory|ran out of memory|[Ff]ailed to allocate"
    r" (?:request|memory)"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CU(?:DNN|BLAS)_STATUS_ALLOC_FAILED"
    # These two appear when a tensor is copied to a GPU that is full.
    r"|Dst tensor is not initialized|unable to allocate output tensor"
)
_GPU_LOG_LINE = re.compile(
    rb"CUDA_ERROR_OUT_OF_MEMORY|CU(?:DNN|BLAS)_STATUS_ALLOC_FAILED|Allocator \(GPU_\d+\w*\) ran out"
)
_HOST_MEMORY = re.compile(r"device:CPU|by allocator (?:cpu|mklcpu|gpu_host|cuda_host)")
# TensorFlow repeats the error of the rank that failed in the errors of all other ranks, after
# these words.
_ERROR_OF_OTHER_RANK = "Collective ops is aborted"


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that memory ran out on this rank.

    Args:
      error: An error of TensorFlow, XLA, Horovod or NCCL.
    """
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is None or not isinstance(error, (tensorflow.errors.OpError, RuntimeError)):
        return False
    text = str(error)
    is_of_this_rank = (
        isinstance(error, tensorflow.errors.ResourceExhaustedError)
        or _ERROR_OF_OTHER_RANK not in text
    )
    return is_of_this_rank and bool(_OUT_OF_MEMORY.search(text))


def user_error(error: BaseException, remedy: str) -> HostError:
    """Returns the error for the user, with a message of one line.

    It is a HostError, because the ranks of a host mostly run out of memory together, and then one
    of them prints it.

    Args:
      error: An error for which `is_out_of_memory` is true.
      remedy: What to do, as a sentence.
    """
    tensorflow = sys.modules["tensorflow"]
    has_gpu = bool(tensorflow.config.get_visible_devices("GPU"))
    is_host_memory = bool(_HOST_MEMORY.search(str(error))) or not has_gpu
    where = "host" if is_host_memory else "GPU"
    return HostError(f"The memory of the {where} is too small for this training. {remedy}")


def is_log_line_of_gpu(line: bytes) -> bool:
    """Returns whether a line of a process's log says that a GPU ran out of memory.

    TensorFlow writes such a line before it aborts.
    """
    return bool(_GPU_LOG_LINE.search(line))
