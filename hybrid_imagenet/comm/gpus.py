"""Sets up a rank's GPU before TensorFlow starts, and refuses GPUs that TensorFlow cannot use.

Nothing here imports TensorFlow.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

_TURING = (7, 5)
_CUDNN_WITHOUT_OLDER = (9, 11)  # the first release without kernels for GPUs before Turing
_DRIVER = "libcuda.so.1"
_FIRST_WITHOUT_PTX = (
    10  # XLA fails on the code that the driver makes for Blackwell from older kernels
)


def prepare(
    local_rank: int,
    local_size: int,
    environ: MutableMapping[str, str],
    persistent: bool,
    root: Path = Path("/"),
) -> None:
    """Sets what TensorFlow and CUDA read when they start, and binds this process to the cores next
    to its GPU.

    Variables that the user has set are left alone; without GPUs they have no effect.

    Args:
      local_rank: of this process; it takes the visible GPU of that number, or shares one.
      local_size: ranks of this host. Those whose GPUs share a node are not bound to fewer cores
      than their share.
      environ: of this process.
      persistent: let cuDNN normalize batches in NHWC, as the rest of the network computes.
        Otherwise TensorFlow transposes every activation to NCHW and back around each normalization,
        and does not fuse it with what follows. Its kernels add up in an order that varies.
      root: stands for the root of the file system in tests.
    """
    load_cusolver()
    prefer_fast_kernels(environ, persistent)
    environ.setdefault(
        "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
    )  # numbers GPUs like nvidia-smi and `addresses`
    if environ.get("HYBRID_IMAGENET_BIND", "1") == "0":
        return
    own = os.sched_getaffinity(0)
    near = [near_cores(rank, environ, root) & own for rank in range(local_size)]
    cores = near[local_rank]
    if cores != own and len(own) * near.count(cores) <= len(cores) * local_size:
        os.sched_setaffinity(0, cores)


def load_cusolver() -> None:
    """Loads cuSOLVER of this environment, which TensorFlow 2.21 does not find by itself: it would
    show no GPU.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        for library in (Path(folder) / "cusolver/lib").glob("libcusolver.so.*"):
            _loads(str(library))


def prefer_fast_kernels(environ: MutableMapping[str, str], persistent: bool = True) -> None:
    """Sets how TensorFlow launches kernels and normalizes batches on GPUs; see `prepare`."""
    # Threads of their own launch kernels without waiting for the host's other work.
    environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")
    environ.setdefault("TF_GPU_THREAD_COUNT", "2")
    environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1" if persistent else "0")


def near_cores(local_rank: int, environ: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """Returns the cores on the NUMA node of a rank's GPU; none where that cannot be told."""
    gpus = addresses(environ, root)
    if not gpus or environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") != "PCI_BUS_ID":
        return set()
    try:
        node = int(
            (root / "sys/bus/pci/devices" / gpus[local_rank % len(gpus)] / "numa_node").read_text()
        )
        cores = (
            (root / f"sys/devices/system/node/node{node}/cpulist").read_text() if node >= 0 else ""
        )
    except (OSError, ValueError):
        return set()
    found: set[int] = set()
    for span in filter(None, cores.strip().split(",")):
        first, _, last = span.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def in_use() -> bool:
    """Returns whether TensorFlow, which need not be loaded, will compute on GPUs: it is built for
    them and sees one.
    """
    return is_built_for_gpus() and count() > 0


def is_built_for_gpus() -> bool:
    """Returns whether the installed TensorFlow, which need not be loaded, can compute on GPUs."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return False
    try:
        build = (Path(spec.origin).parent / "python/platform/build_info.py").read_text(
            encoding="utf-8"
        )
    except OSError:
        return False
    return "('is_cuda_build', True)" in build


def count() -> int:
    """Returns how many GPUs CUDA shows this process; 0 without a driver."""
    # CUDA reads the order once, in the call below, and `prepare` may come later.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    found = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(_DRIVER)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(found)):
            return 0
    except (OSError, AttributeError):
        return 0
    return found.value


def addresses(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Returns PCI addresses of the GPUs that CUDA will show this process, in its order; none if
    unknown.
    """
    present = sorted(path.name.lower() for path in (root / "proc/driver/nvidia/gpus").glob("*"))
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return present
    found = []
    for name in chosen.split(","):
        if name.strip().isdigit() and int(name) < len(present):
            found.append(present[int(name)])
        else:  # CUDA stops at the first name that it does not know; UUIDs are not looked up
            break
    return found


def refusal(
    capability: tuple[int, int], kernels: Sequence[str], cudnn: tuple[int, ...] | None
) -> str | None:
    """Returns why TensorFlow cannot train on a GPU, with the remedy; None if it can.

    Args:
      capability: the GPU's compute capability.
      kernels: what TensorFlow was compiled for, such as sm_80 and, for newer GPUs of the driver's
      making, compute_90.
      cudnn: the version that is installed, None if unknown.
    """
    code = 10 * capability[0] + capability[1]
    here = f"compute capability {capability[0]}.{capability[1]}"
    if capability < _TURING and cudnn is not None and cudnn >= _CUDNN_WITHOUT_OLDER:
        version = ".".join(map(str, cudnn))
        return (
            f"{here} is not supported by cuDNN {version}: run launch/setup.sh --gpu=v100, which"
            " installs an older one"
        )
    if not kernels:
        return None
    known = [(name.partition("_")[0], int(re.sub(r"\D", "", name))) for name in kernels]
    if any(
        kind == "sm" and number // 10 == capability[0] and number <= code for kind, number in known
    ):
        return None
    if capability[0] < _FIRST_WITHOUT_PTX and any(
        kind == "compute" and number <= code for kind, number in known
    ):
        return None
    return (
        f"{here} has no kernels in this TensorFlow (it has {', '.join(kernels)}): use a TensorFlow"
        " built for this GPU"
    )


def absence(environ: Mapping[str, str]) -> str | None:
    """Returns why a TensorFlow for GPUs that sees none must not train, with the remedy; None if
    that is what was asked.

    Without this a job on a host without a driver, or in a container without its GPUs, would train
    on the CPU for days.

    Args:
      environ: the process's variables; an empty CUDA_VISIBLE_DEVICES, or -1, asks for the CPU.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None and chosen.strip() in ("", "-1"):
        return None
    reason = (
        "shows no GPU to TensorFlow" if _loads(_DRIVER) else f"has no NVIDIA driver ({_DRIVER})"
    )
    if chosen is not None:
        reason += f", with CUDA_VISIBLE_DEVICES={chosen}"
    return (
        f"{reason}, which this environment is for: compare nvidia-smi, start containers with their"
        " GPUs (launch/docker.sh --gpu), or set CUDA_VISIBLE_DEVICES= to train on the CPU"
    )


def installed_cudnn() -> tuple[int, ...] | None:
    """Returns the version of the cuDNN that TensorFlow's wheels bring; None where it comes from
    elsewhere.
    """
    try:
        version = importlib.metadata.version("nvidia-cudnn-cu12")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split(".")[:3])


def rdma_problem(root: Path = Path("/")) -> str | None:
    """Returns why NCCL will not use this host's RDMA adapters, with the remedy; None if it can or
    there are none.

    The kernel lists verbs for Amazon's EFA too, which NCCL reaches only through a plug-in.
    """
    if not any((root / "sys/class/infiniband").glob("*")):
        return None
    if not any((root / "dev/infiniband").glob("uverbs*")):
        return (
            "its RDMA adapters have no /dev/infiniband/uverbs*: pass the devices to the container"
        )
    if not _loads("libibverbs.so.1"):
        return "it has RDMA adapters but no libibverbs: install libibverbs1 and ibverbs-providers"
    efa = any(
        path.resolve().name == "efa"
        for path in (root / "sys/class/infiniband").glob("*/device/driver")
    )
    if efa and not _loads("libnccl-net.so"):
        return (
            "its EFA adapters need libnccl-net.so: install aws-ofi-nccl, and put it on"
            " LD_LIBRARY_PATH"
        )
    return None


def _loads(library: str) -> bool:
    """Returns whether a shared library can be loaded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
