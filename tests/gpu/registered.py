"""Reads operations as JSON and prints where their kernels for GPUs keep their arguments.

It is run with TensorFlow's CUDA wheel on the path. An operation is [type, {attribute: type, ...}].
Kernels are registered when the library is loaded, which needs no GPU. The output is {operation:
{types: arguments in the host's memory, or null without a kernel for GPUs}}, as in
registrations.json.
"""

import json
import sys

import tensorflow as tf
from tensorflow.python.framework import kernels


def on_host(operation: str, types: dict[str, str]) -> list[str] | None:
    """Returns the arguments that a GPU's kernel keeps in the host's memory; None without one."""
    registered_kernels = kernels.get_registered_kernels_for_op(operation).kernel
    # Kernels for DEFAULT serve all devices without a specific kernel.
    for device in ("GPU", "DEFAULT"):
        for kernel in registered_kernels:
            allowed = {
                c.name: {tf.dtypes.as_dtype(t).name for t in c.allowed_values.list.type}
                for c in kernel.constraint
            }
            if kernel.device_type == device and all(
                types.get(name) in names for name, names in allowed.items()
            ):
                return list(kernel.host_memory_arg)
    return None


if not tf.test.is_built_with_cuda():
    raise SystemExit(f"{tf.__file__} is not the wheel with CUDA")
table: dict[str, dict[str, list[str] | None]] = {}
for kind, named in json.load(sys.stdin):
    key = ",".join(f"{name}={named[name]}" for name in sorted(named))
    table.setdefault(kind, {})[key] = on_host(kind, named)
lines = [f"{json.dumps(kind)}: {json.dumps(rows)}" for kind, rows in sorted(table.items())]
print("{\n" + ",\n".join(lines) + "\n}")
