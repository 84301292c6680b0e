"""Chooses the precision that is fast on a machine, and describes the machine for the log."""

from __future__ import annotations

import contextlib
import pathlib
import platform
import subprocess

import tensorflow as tf

from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.xla import has_gpu

# TensorFlow has BF16 kernels for both; docs/dev/measurements.md has the measured ratio to FP32.
_BF16_INSTRUCTIONS = {"amx_bf16", "avx512_bf16"}
# FP16 on a CPU is slow, but on these models it is fast enough to try it.
_MODELS_FOR_FP16_ON_CPU = ("resnet18", "resnet10", "resnet8")


def cpu_features() -> set[str]:
    """Returns the processor's feature flags as Linux lists them; empty elsewhere."""
    return set(_cpu_info("flags").split())


def choose_precision(requested: str, model: str) -> str:
    """Returns the precision of --precision on this machine.

    `auto` is mixed_float16 on a GPU with tensor cores, mixed_bfloat16 on a processor with BF16
    instructions, and float32 otherwise.

    Args:
      requested: The value of --precision.
      model: The value of --model.

    Raises:
      UserError: For mixed_float16 on a CPU, unless the model is small, because CPUs have no kernels
        for convolutions in FP16.
    """
    if requested == "auto":
        if has_gpu():
            return gpus.fast_precision(gpus.compute_capability())
        return "mixed_bfloat16" if _BF16_INSTRUCTIONS & cpu_features() else "float32"
    if requested == "mixed_float16" and not has_gpu() and model not in _MODELS_FOR_FP16_ON_CPU:
        raise UserError(
            f"--precision=mixed_float16 with --model={model} needs a GPU. Use --precision=auto, or"
            f" --model={_MODELS_FOR_FP16_ON_CPU[0]} to try FP16 on a CPU."
        )
    return requested


def describe() -> dict[str, str]:
    """Returns host, processor, GPU, versions and commit of this package, for the log of a run."""
    # Only this function needs Keras, which takes long to load.
    import keras

    devices = tf.config.list_physical_devices("GPU")
    gpu = "none"
    if devices:
        details = tf.config.experimental.get_device_details(devices[0])
        gpu = details.get("device_name", "unknown")
    return {
        "host": platform.node(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "cpu": _cpu_info("model name") or platform.processor() or platform.machine(),
        "commit": _commit(),
        "gpu": gpu,
    }


def _cpu_info(key: str) -> str:
    """Returns the first value of a key in Linux's /proc/cpuinfo; "" if there is none."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(key):
                return line.split(":", 1)[1].strip()
    return ""


def _commit() -> str:
    """Returns the commit of this package's checkout; "" if it does not run from one.

    It ends with `+` if files were changed since.
    """
    directory = str(pathlib.Path(__file__).parent)
    options = ["--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    command = ["git", "-C", directory, "describe", *options]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""
