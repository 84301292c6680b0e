"""Configures a rank's GPU before TensorFlow starts, and finds GPUs that TensorFlow cannot use.

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

# Compute capability of the first GPUs with tensor cores. A P40 (6.1) computes in FP16 with 1/64 of
# its speed in FP32.
_VOLTA = (7, 0)
# Compute capability of the Turing generation.
_TURING = (7, 5)
# The first release of cuDNN without kernels for GPUs older than Turing.
_CUDNN_WITHOUT_PRE_TURING = (9, 11)
_DRIVER = "libcuda.so.1"
# Numbers of CUDA for cuDeviceGetAttribute.
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76
# For a GPU newer than all kernels, the driver compiles kernels from PTX code. From Blackwell
# (compute capability 10) on, XLA fails on the result.
_FIRST_MAJOR_WITHOUT_PTX = 10


def configure_gpu_environment(
    local_rank: int,
    local_size: int,
    environ: MutableMapping[str, str],
    persistent: bool,
    root: Path = Path("/"),
) -> None:
    """Sets variables that TensorFlow and CUDA read at their start, and binds this process to cores.

    The cores are those next to the rank's GPU. If the GPUs of several ranks are next to the same
    cores, the ranks are bound only if none gets fewer cores than its share of the host.

    Variables that the user has set stay as they are. Without GPUs the variables have no effect.

    Args:
      local_rank: Number of this process among the ranks of its host. It selects the visible GPU.
      local_size: Number of ranks on this host.
      environ: Environment variables of this process, which are changed.
      persistent: Whether cuDNN normalizes batches in NHWC, the layout of the other layers.
        Otherwise TensorFlow transposes every activation to NCHW and back around each normalization,
        and does not fuse the normalization with the next operation. The NHWC kernels add numbers
        in an order that varies from run to run.
      root: Root of the file system; another directory in tests.
    """
    load_cusolver()
    prefer_fast_kernels(environ, persistent)
    # CUDA then numbers GPUs like nvidia-smi and `pci_addresses`.
    environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    available_cores = os.sched_getaffinity(0)
    cores_by_rank = [
        numa_cores(rank, environ, root) & available_cores for rank in range(local_size)
    ]
    cores = cores_by_rank[local_rank]
    ranks_on_cores = cores_by_rank.count(cores)
    # len(cores) / ranks_on_cores >= len(available_cores) / local_size, without divisions
    has_fair_share = len(available_cores) * ranks_on_cores <= len(cores) * local_size
    if cores != available_cores and has_fair_share:
        os.sched_setaffinity(0, cores)


def load_cusolver() -> None:
    """Loads the cuSOLVER library of this Python environment.

    TensorFlow 2.21 does not find it by itself, and would then see no GPU.
    """
    spec = importlib.util.find_spec("nvidia")
    if spec is None or not spec.submodule_search_locations:
        return
    for directory in spec.submodule_search_locations:
        for library in (Path(directory) / "cusolver/lib").glob("libcusolver.so.*"):
            _can_load(str(library))


def prefer_fast_kernels(environ: MutableMapping[str, str], persistent: bool = True) -> None:
    """Sets how TensorFlow launches kernels and normalizes batches on GPUs.

    Args:
      environ: Environment variables, which are changed.
      persistent: See `configure_gpu_environment`.
    """
    # Kernels get their own threads, which launch them without waiting for other work of the host.
    environ.setdefault("TF_GPU_THREAD_MODE", "gpu_private")
    environ.setdefault("TF_GPU_THREAD_COUNT", "2")
    environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1" if persistent else "0")


def numa_cores(local_rank: int, environ: Mapping[str, str], root: Path = Path("/")) -> set[int]:
    """Returns the cores on the NUMA node of a rank's GPU; an empty set if it is unknown.

    Args:
      local_rank: Number of the rank among the ranks of its host.
      environ: Environment variables of the rank.
      root: Root of the file system.
    """
    addresses = pci_addresses(environ, root)
    if not addresses or environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") != "PCI_BUS_ID":
        return set()
    device = root / "sys/bus/pci/devices" / addresses[local_rank % len(addresses)]
    try:
        node = int((device / "numa_node").read_text())
        if node < 0:
            return set()
        core_list = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except (OSError, ValueError):
        return set()
    cores: set[int] = set()
    # The list has the form 0-3,8-11,16.
    for span in core_list.split(","):
        if not span:
            continue
        first, _, last = span.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores


def in_use() -> bool:
    """Returns whether TensorFlow will compute on GPUs; it need not be imported yet."""
    return is_built_for_gpus() and count() > 0


def is_built_for_gpus() -> bool:
    """Returns whether the installed TensorFlow is built for GPUs; it need not be imported yet."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or spec.origin is None:
        return False
    build_info_file = Path(spec.origin).parent / "python/platform/build_info.py"
    try:
        build_info = build_info_file.read_text(encoding="utf-8")
    except OSError:
        return False
    return "('is_cuda_build', True)" in build_info


def count() -> int:
    """Returns the number of GPUs that CUDA shows this process; 0 without a driver."""
    # CUDA reads the order only once, in the calls below, and `configure_gpu_environment` may be
    # called later.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    device_count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL(_DRIVER)
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(device_count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return device_count.value


def compute_capability() -> tuple[int, int] | None:
    """Returns the lowest compute capability of the GPUs that CUDA shows this process.

    It is None without a GPU, or if the driver does not report it. TensorFlow need not be imported.
    """
    capabilities = []
    for ordinal in range(count()):
        driver = ctypes.CDLL(_DRIVER)
        device = ctypes.c_int()
        major = ctypes.c_int()
        minor = ctypes.c_int()
        has_failed = (
            driver.cuDeviceGet(ctypes.byref(device), ordinal)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
        )
        if has_failed:
            return None
        capabilities.append((major.value, minor.value))
    return min(capabilities, default=None)


def fast_precision(capability: tuple[int, int] | None) -> str:
    """Returns the precision of --precision=auto on a GPU.

    Args:
      capability: Compute capability of the GPU; None if it is unknown.
    """
    has_tensor_cores = capability is not None and capability >= _VOLTA
    return "mixed_float16" if has_tensor_cores else "float32"


def pci_addresses(environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Returns the PCI addresses of the GPUs that CUDA will show this process, in CUDA's order.

    Args:
      environ: Environment variables, with CUDA_VISIBLE_DEVICES.
      root: Root of the file system.

    Returns:
      The addresses; an empty list if they are unknown.
    """
    all_addresses = sorted(
        path.name.lower() for path in (root / "proc/driver/nvidia/gpus").glob("*")
    )
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is None:
        return all_addresses
    addresses = []
    for device in visible_devices.split(","):
        # CUDA stops at the first name that it does not know. UUIDs are not looked up here.
        if not device.strip().isdigit() or int(device) >= len(all_addresses):
            break
        addresses.append(all_addresses[int(device)])
    return addresses


def unsupported_gpu_problem(
    capability: tuple[int, int], kernels: Sequence[str], cudnn: tuple[int, ...] | None
) -> str | None:
    """Returns why TensorFlow cannot train on a GPU, with the remedy; None if it can.

    Args:
      capability: Compute capability of the GPU, such as (8, 0).
      kernels: What TensorFlow was compiled for: sm_80 stands for kernels for GPUs of this and newer
        capabilities of the same generation, compute_90 for code from which the driver makes
        kernels for newer GPUs.
      cudnn: Installed version of cuDNN; None if unknown.
    """
    major, minor = capability
    number = 10 * major + minor
    capability_text = f"compute capability {major}.{minor}"
    if capability < _TURING and cudnn is not None and cudnn >= _CUDNN_WITHOUT_PRE_TURING:
        version = ".".join(map(str, cudnn))
        return (
            f"{capability_text} is not supported by cuDNN {version}. Run launch/setup.sh"
            " --gpu=v100, which installs an older version."
        )
    if not kernels:
        return None
    for kernel in kernels:
        kind = kernel.partition("_")[0]
        kernel_number = int(re.sub(r"\D", "", kernel))
        if kernel_number > number:
            continue
        if kind == "sm" and kernel_number // 10 == major:
            return None
        if kind == "compute" and major < _FIRST_MAJOR_WITHOUT_PTX:
            return None
    return (
        f"{capability_text} has no kernels in this TensorFlow (it has {', '.join(kernels)}). Use a"
        " TensorFlow that is built for this GPU."
    )


def missing_gpu_problem(environ: Mapping[str, str]) -> str | None:
    """Returns why a TensorFlow that is built for GPUs must not train without one.

    Otherwise a job on a host without a driver, or in a container without its GPUs, would train on
    the CPU for days.

    Args:
      environ: Environment variables of the process. CUDA_VISIBLE_DEVICES= or -1 asks for the CPU.

    Returns:
      The problem and the remedy; None if the user has asked for the CPU.
    """
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    if visible_devices is not None and visible_devices.strip() in ("", "-1"):
        return None
    if _can_load(_DRIVER):
        problem = "shows no GPU to TensorFlow"
    else:
        problem = f"has no NVIDIA driver ({_DRIVER})"
    if visible_devices is not None:
        problem += f", with CUDA_VISIBLE_DEVICES={visible_devices}"
    return (
        f"{problem}, but this environment is for GPUs. Compare nvidia-smi, start containers with"
        " their GPUs (launch/docker.sh --gpu), or set CUDA_VISIBLE_DEVICES= to train on the CPU."
    )


def installed_cudnn() -> tuple[int, ...] | None:
    """Returns the version of cuDNN installed with TensorFlow's wheels; None if there is none."""
    try:
        version = importlib.metadata.version("nvidia-cudnn-cu12")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split(".")[:3])


def rdma_problem(root: Path = Path("/")) -> str | None:
    """Returns why NCCL will not use this host's RDMA adapters, with the remedy.

    Args:
      root: Root of the file system.

    Returns:
      The problem; None if NCCL can use the adapters, or there are none.
    """
    if not any((root / "sys/class/infiniband").glob("*")):
        return None
    if not any((root / "dev/infiniband").glob("uverbs*")):
        return (
            "its RDMA adapters have no /dev/infiniband/uverbs*. Pass the devices to the container."
        )
    if not _can_load("libibverbs.so.1"):
        return "it has RDMA adapters but no libibverbs. Install libibverbs1 and ibverbs-providers."
    # The kernel lists verbs for Amazon's EFA too, which NCCL can use only with a plug-in.
    has_efa = any(
        path.resolve().name == "efa"
        for path in (root / "sys/class/infiniband").glob("*/device/driver")
    )
    if has_efa and not _can_load("libnccl-net.so"):
        return (
            "its EFA adapters need libnccl-net.so. Install aws-ofi-nccl, and add it to"
            " LD_LIBRARY_PATH."
        )
    return None


def _can_load(library: str) -> bool:
    """Loads a shared library, and returns whether that succeeded."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
