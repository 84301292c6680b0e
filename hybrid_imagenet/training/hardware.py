"""Chooses the precision that a machine is good at, and describes the machine for the log."""

from __future__ import annotations

import contextlib
import pathlib
import platform
import subprocess

import tensorflow as tf

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.xla import has_gpu

# TensorFlow has BF16 kernels for both; docs/dev/performance-log.md has the measured ratio to FP32.
_FAST_BF16 = {"amx_bf16", "avx512_bf16"}
_FP16_ON_CPU = ("resnet18", "resnet10", "resnet8")


def cpu_features() -> set[str]:
    """Returns the processor's feature flags as Linux lists them; empty elsewhere."""
    return set(_cpu("flags").split())


def choose_precision(requested: str, model: str) -> str:
    """Resolves `auto`: mixed_float16 on a GPU, mixed_bfloat16 on a processor with BF16
    instructions, else float32.

    Raises:
      UserError: for mixed_float16 on a CPU, except for a small model: convolutions in FP16 have no
        kernels there.
    """
    if requested == "auto":
        if has_gpu():
            return "mixed_float16"
        return "mixed_bfloat16" if _FAST_BF16 & cpu_features() else "float32"
    if requested == "mixed_float16" and not has_gpu() and model not in _FP16_ON_CPU:
        raise UserError(
            f"--precision=mixed_float16 with --model={model} needs a GPU: use --precision=auto, or "
            f"--model={_FP16_ON_CPU[0]} to try FP16 on a CPU"
        )
    return requested


def describe() -> dict[str, str]:
    """Returns host, processor, GPU, versions and commit of this package, for the log of a run."""
    import keras

    gpus = [
        tf.config.experimental.get_device_details(g) for g in tf.config.list_physical_devices("GPU")
    ]
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cpu": _cpu("model name") or platform.processor() or platform.machine(),
        "commit": _commit(),
        "gpu": gpus[0].get("device_name", "unknown") if gpus else "none",
    }


def _cpu(key: str) -> str:
    """Returns what Linux tells of the first processor under a key; "" where it does not."""
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), "")
    return ""


def _commit() -> str:
    """Returns the commit of this package's checkout, with `+` if it was changed since; "" outside
    of one.
    """
    folder = pathlib.Path(__file__).parent
    command = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--abbrev=12",
        "--exclude=*",
        "--dirty=+",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
