"""Started with the CUDA wheel of TensorFlow on its path: reads operations as JSON, writes those without a GPU kernel.

An operation is [type, {attribute: type, ...}]. Kernels are registered when the library is loaded, which needs no GPU.
"""

import json
import sys

import tensorflow as tf
from tensorflow.python.framework import kernels


def has_kernel(operation: str, types: dict[str, str]) -> bool:
    """Whether a kernel for GPUs, or for any device, takes these types."""
    for kernel in kernels.get_registered_kernels_for_op(operation).kernel:
        if kernel.device_type not in ("GPU", "DEFAULT"):
            continue
        allowed = {c.name: {tf.dtypes.as_dtype(t).name for t in c.allowed_values.list.type} for c in kernel.constraint}
        if all(types.get(name) in names for name, names in allowed.items()):
            return True
    return False


if not tf.test.is_built_with_cuda():
    raise SystemExit(f"{tf.__file__} is not the wheel with CUDA")
json.dump([item for item in json.load(sys.stdin) if not has_kernel(*item)], sys.stdout)
