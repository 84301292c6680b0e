"""Fixtures for TensorFlow's CUDA wheel and XLA's compiler for GPUs, which need no GPU."""

import importlib.metadata
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
CACHE = (
    pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    / "hybrid_imagenet"
    / "kernels"
)


def pinned(requirement):
    """Returns the line of launch/hashes.txt that begins with the requirement."""
    lines = (ROOT / "launch" / "hashes.txt").read_text().splitlines()
    return next(line for line in lines if line.startswith(requirement))


def installed(name, package, requirements):
    """Returns a folder in the user's cache in which a package is installed.

    The requirements, with their hashes, are installed there once.
    """
    folder = CACHE / name
    if not (folder / package).exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        requirements_file = CACHE / f"{name}.txt"
        requirements_file.write_text(requirements)
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--require-hashes",
            "--target",
            str(folder),
        ]
        subprocess.run([*install, "-r", str(requirements_file)], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def cuda_wheel():
    """Returns the folder of TensorFlow's CUDA wheel of the pinned version."""
    version = importlib.metadata.version("tensorflow-cpu")
    return installed(f"tensorflow-{version}", "tensorflow", pinned(f"tensorflow=={version} "))


@pytest.fixture(scope="session")
def compiler():
    """Returns the environment in which compiled.py runs."""
    folder = installed("xla", "jax", (ROOT / "tests" / "gpu" / "compiler.txt").read_text())
    assembler = installed("nvcc", "nvidia", pinned("nvidia-cuda-nvcc-cu12=="))
    flags = f"--xla_gpu_autotune_level=0 --xla_gpu_cuda_data_dir={assembler}/nvidia/cuda_nvcc"
    return os.environ | {"PYTHONPATH": str(folder), "XLA_FLAGS": flags}
