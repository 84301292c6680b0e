"""Recognizes errors that mean that a GPU, or the host, ran out of memory."""

from __future__ import annotations

import re
import sys

from hybrid_imagenet.errors import HostError

# TensorFlow's status RESOURCE_EXHAUSTED also means a full disk or too many open files, so the text
# decides.
_TEXT = re.compile(
    r"OOM when allocating|[Oo]ut of memory|ran out of memory|[Ff]ailed to allocate"
    r" (?:request|memory)"
    r"|CUDA_ERROR_OUT_OF_MEMORY|CU(?:DNN|BLAS)_STATUS_ALLOC_FAILED"
    # when a tensor is copied to a GPU that is full
    r"|Dst tensor is not initialized|unable to allocate output tensor"
)
_GPU_LOG_LINE = re.compile(
    rb"CUDA_ERROR_OUT_OF_MEMORY|CU(?:DNN|BLAS)_STATUS_ALLOC_FAILED|Allocator \(GPU_\d+\w*\) ran out"
)
_HOST = re.compile(r"device:CPU|by allocator (?:cpu|mklcpu|gpu_host|cuda_host)")
_OTHER_RANK = (  # TensorFlow's words on ranks that have lost the one that failed
    "Collective ops is aborted"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error of TensorFlow, XLA, Horovod or NCCL says that memory ran out on this
    rank.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(error, (tf.errors.OpError, RuntimeError)):
        return False
    text = str(error)
    is_own = isinstance(error, tf.errors.ResourceExhaustedError) or _OTHER_RANK not in text
    return is_own and bool(_TEXT.search(text))


def shared_error(error: BaseException, remedy: str) -> HostError:
    """Returns the one-line error for the user. The ranks of a host mostly run out together, so one
    of them prints it.

    Args:
      error: one for which `is_out_of_memory` is true.
      remedy: what to do, as a sentence.
    """
    tf = sys.modules["tensorflow"]
    is_on_host = _HOST.search(str(error)) or not tf.config.get_visible_devices("GPU")
    where = "host" if is_on_host else "GPU"
    return HostError(f"The memory of the {where} is too small for this training. {remedy}")


def is_log_line_of_gpu(line: bytes) -> bool:
    """Returns whether a line of a process's log says that a GPU ran out of memory, as before
    TensorFlow aborts.
    """
    return bool(_GPU_LOG_LINE.search(line))
