"""Tests reading the placement of a rank, and configuring its process."""

import os
import subprocess
import sys
from unittest import mock

import pytest
import tensorflow as tf

from hybrid_imagenet.cluster import environment
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.comm import process, start
from hybrid_imagenet.errors import SharedError, UserError
from tests.ranks import ROOT

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


def test_placement_reads_the_variables_of_open_mpi():
    assert environment.read_placement({}) == Placement(0, 1, 0, 1)
    assert environment.read_placement(OPEN_MPI) == Placement(5, 8, 1, 4)
    with pytest.raises(UserError, match="OMPI_COMM_WORLD_RANK=five"):
        environment.read_placement(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "five"})


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"PMI_SIZE": "2"}, "PMI_SIZE=2 says that an mpirun with PMI"),
        (
            {"PMI_SIZE": "2", "PMI_RANK": "0"},
            "PMI_SIZE=2 and PMI_RANK=0 say that an mpirun with PMI",
        ),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2"),
        ({"MV2_COMM_WORLD_SIZE": "2"}, "MVAPICH"),
        ({"JSM_NAMESPACE_SIZE": "2"}, "jsrun"),
        (
            TORCHRUN,
            "WORLD_SIZE=2 and RANK=0 say that a launcher of PyTorch, such as torchrun, has started",
        ),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "WORLD_SIZE=4 and LOCAL_RANK=1"),
        ({"FLUX_JOB_SIZE": "2", "FLUX_TASK_RANK": "0"}, "FLUX_JOB_SIZE=2 and FLUX_TASK_RANK=0"),
        ({"PALS_LOCAL_SIZE": "2", "PALS_RANKID": "0"}, "PALS_LOCAL_SIZE=2 and PALS_RANKID=0"),
        ({"PALS_LOCAL_SIZE": "1", "PALS_RANKID": "1"}, "PALS_RANKID=1"),
        ({"PMIX_RANK": "1"}, "PMIX_RANK=1"),
        ({"SM_HOSTS": '["algo-1", "algo-2"]'}, "SM_HOSTS="),
    ],
)
def test_placement_under_another_launcher_is_rejected(environ, expected):
    with pytest.raises(UserError, match="Start the job once, with hybrid-imagenet run") as error:
        environment.read_placement(environ)
    assert expected in str(error.value)
    assert environment.read_placement(environ | OPEN_MPI).rank == 5
    assert (
        environment.read_placement(environ | {"HYBRID_IMAGENET_IGNORE_LAUNCHER": "1"})
        == Placement()
    )


@pytest.mark.parametrize(
    "environ",
    [
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        TORCHRUN | {"WORLD_SIZE": "1"},
        # The variable remained in a container, where no launcher has numbered this process.
        {"WORLD_SIZE": "2"},
        {"RANK": "3"},
        {"WORLD_SIZE": "two", "RANK": "0"},
        {"FLUX_JOB_SIZE": "1", "FLUX_TASK_RANK": "0"},
        {"PALS_LOCAL_SIZE": "1", "PALS_RANKID": "0"},
        {"SM_HOSTS": '["algo-1"]'},
        {"SM_HOSTS": "algo-1,algo-2"},
    ],
)
def test_placement_of_a_single_process_under_another_launcher_is_rank_0_of_1(environ):
    assert environment.read_placement(environ) == Placement()


def test_placement_rejects_ranks_that_mpirun_does_not_connect():
    with pytest.raises(UserError, match="has started 2 ranks, but mpirun connects 1 of them"):
        environment.read_placement({"HYBRID_IMAGENET_RANKS": "2"})
    with pytest.raises(UserError, match="has started 4 ranks, but mpirun connects 8 of them"):
        environment.read_placement(OPEN_MPI | {"HYBRID_IMAGENET_RANKS": "4"})
    assert environment.read_placement(OPEN_MPI | {"HYBRID_IMAGENET_RANKS": "8"}).size == 8


@pytest.mark.parametrize(
    ("cores", "host_cores", "local_size", "expected"),
    [
        (8, 8, 1, 8),
        (8, 8, 4, 2),
        (8, 8, 3, 2),
        # There are more ranks than cores.
        (2, 2, 8, 1),
        # The launcher has bound each rank to two cores.
        (2, 8, 4, 2),
        # The launcher has bound each rank to one core.
        (1, 8, 4, 1),
        # The launcher has bound ranks to sockets of four cores, with two ranks on each.
        (4, 8, 4, 2),
        # A container has two cores.
        (2, 2, 1, 2),
    ],
)
def test_threads_per_rank_divides_the_cores_of_the_host(
    monkeypatch, tmp_path, cores, host_cores, local_size, expected
):
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda process: set(range(host_cores if process else cores))
    )
    # The tests themselves may run in a container, as ranks, or with init as their parent.
    monkeypatch.setattr(environment, "CPU_LIMIT", tmp_path / "none")
    monkeypatch.setattr(os, "getppid", lambda: 1234)
    monkeypatch.setattr(environment.Path, "read_bytes", lambda path: b"HOME=/root\0")
    assert environment.threads_per_rank(Placement(local_size=local_size)) == expected
    # The environment of Slurm's daemon cannot be read.
    monkeypatch.setattr(environment.Path, "read_bytes", mock.Mock(side_effect=PermissionError))
    assert environment.threads_per_rank(Placement(local_size=local_size)) == expected


def test_threads_per_rank_in_a_container_respects_its_limit_of_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(environment, "CPU_LIMIT", tmp_path / "cpu.max")
    environment.CPU_LIMIT.write_text("450000 100000\n")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)))
    assert environment.threads_per_rank(Placement(local_size=2)) == 2


def test_launcher_cores_of_a_rank_started_by_a_script_are_those_of_the_host():
    # Such a script is bound to the cores of its rank, which must not be taken for all cores.
    cores = os.sched_getaffinity(0)
    count = (
        f"{sys.executable} -c 'from hybrid_imagenet.cluster import environment as e;"
        " print(e._launcher_cores())'; true"
    )
    result = subprocess.run(
        ["bash", "-c", count],
        cwd=ROOT,
        env=os.environ | OPEN_MPI,
        preexec_fn=lambda: os.sched_setaffinity(0, {min(cores)}),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout == f"{len(cores)}\n", result.stderr


@pytest.mark.parametrize(
    ("is_cuda_build", "gpus", "expected"), [(True, 1, "0"), (True, 0, "1"), (False, 1, "1")]
)
def test_choose_onednn_turns_it_off_with_gpus(is_cuda_build, gpus, expected, monkeypatch, tmp_path):
    (tmp_path / "python" / "platform").mkdir(parents=True)
    (tmp_path / "python/platform/build_info.py").write_text(
        f"build_info = dict([('is_cuda_build', {is_cuda_build})])"
    )
    spec = mock.Mock(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(environment.gpus.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(environment.gpus, "count", lambda: gpus)
    variables = {}
    environment.choose_onednn(variables)
    assert variables == {"TF_ENABLE_ONEDNN_OPTS": expected}


def test_configure_environment_keeps_variables_of_the_user():
    with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "7", "TF_ENABLE_ONEDNN_OPTS": "0"}):
        os.environ.pop("TF_CPP_MIN_LOG_LEVEL", None)
        assert environment.configure_environment(Placement(), threads=3) == 3
        assert [os.environ[name] for name in ("OMP_NUM_THREADS", "TF_ENABLE_ONEDNN_OPTS")] == [
            "7",
            "0",
        ]
        assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"


def test_start_without_horovod_raises_with_the_remedy(monkeypatch):
    for name, value in OPEN_MPI.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(__import__("sys").modules, "hybrid_imagenet.comm.horovod_engine", None)
    with pytest.raises(UserError, match="Horovod cannot be used"):
        start()


@pytest.mark.parametrize(
    ("placement", "engine", "variable", "is_rejected"),
    [
        (Placement(1, 2, 0, 1), "auto", None, True),
        (Placement(1, 2, 0, 1), "auto", "tensorflow", False),
        (Placement(1, 2, 0, 1), "tensorflow", None, False),
        (Placement(1, 2, 1, 2), "auto", None, False),
        (Placement(), "auto", None, False),
    ],
)
def test_check_trust_rejects_the_engine_of_tensorflow_on_several_hosts_unless_asked(
    placement, engine, variable, is_rejected, monkeypatch
):
    monkeypatch.delenv(process.ENGINE_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(process.ENGINE_VARIABLE, variable)
    monkeypatch.setattr(process, "resolve_engine", lambda engine: "tensorflow")
    if is_rejected:
        with pytest.raises(SharedError, match="set HYBRID_IMAGENET_ENGINE=tensorflow if srun"):
            process.check_trust(placement, engine)
    else:
        process.check_trust(placement, engine)


def test_restart_with_huge_pages_happens_once(tmp_path):
    variables = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    running = []
    for number, (mode, variables_of_user) in enumerate(
        (
            ("always [madvise] never", {}),
            ("[always] madvise never", {}),
            ("always [madvise] never", {"GLIBC_TUNABLES": "glibc.malloc.check=1"}),
        )
    ):
        path = tmp_path / str(number)
        path.write_text(mode)
        command = [sys.executable, "-m", "tests.cluster.restart", str(path), "a b", "--c"]
        running.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables | variables_of_user,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120)[0] for process in running]
    words = ("glibc.malloc.hugetlb=1", "None", "glibc.malloc.check=1")
    assert outputs == [f"{word} ['a b', '--c'] True\n" for word in words]


class Devices:
    """Replaces tf.config as on a host with two GPUs, and records the calls."""

    def __init__(self, monkeypatch):
        self.calls = []
        for module, name in (
            (tf.config.threading, "set_intra_op_parallelism_threads"),
            (tf.config.threading, "set_inter_op_parallelism_threads"),
            (tf.config, "set_visible_devices"),
            (tf.config.experimental, "set_memory_growth"),
        ):
            monkeypatch.setattr(
                module, name, lambda *values, name=name: self.calls.append((name, *values))
            )
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["gpu a", "gpu b"])
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: {})


def test_configure_tensorflow_gives_each_rank_one_gpu_whose_memory_grows(monkeypatch):
    devices = Devices(monkeypatch)
    environment.configure_tensorflow(
        Placement(rank=5, size=8, local_rank=1, local_size=2), threads=4
    )
    assert ("set_visible_devices", "gpu b", "GPU") in devices.calls
    assert ("set_memory_growth", "gpu b", True) in devices.calls
    assert ("set_intra_op_parallelism_threads", 4) in devices.calls


def test_configure_tensorflow_raises_if_a_rank_has_no_gpu(monkeypatch):
    Devices(monkeypatch)
    placement = Placement(rank=2, size=3, local_rank=2, local_size=3)
    with pytest.raises(UserError, match=r"local rank 2 has no GPU \(this host shows 2\)"):
        environment.configure_tensorflow(placement, threads=1)
    # Here mpirun's daemon is the task of srun, so all ranks of the host see its only GPU.
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", "1")
    monkeypatch.setenv(environment.RANK_VARIABLE, "2")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: ["gpu a"])
    with pytest.raises(UserError, match=r"local rank 2 has no GPU \(this host shows 1\)"):
        environment.configure_tensorflow(placement, threads=1)


@pytest.mark.parametrize(
    ("variable", "visible_gpus"),
    [("NCCL_MULTI_RANK_GPU_ENABLE", ["gpu a", "gpu b"]), ("SLURM_GPUS_PER_TASK", ["gpu a"])],
)
def test_ranks_share_gpus_if_nccl_allows_it_or_srun_shows_each_rank_one_gpu(
    variable, visible_gpus, monkeypatch
):
    monkeypatch.setenv(variable, "1")
    monkeypatch.delenv(environment.RANK_VARIABLE, raising=False)
    devices = Devices(monkeypatch)
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: visible_gpus)
    environment.configure_tensorflow(
        Placement(rank=2, size=3, local_rank=2, local_size=3), threads=1
    )
    assert ("set_visible_devices", "gpu a", "GPU") in devices.calls


def test_keep_freed_memory_reuses_the_memory_of_the_last_batch():
    script = (
        "import resource; from hybrid_imagenet.cluster import environment;"
        " environment.keep_freed_memory()\ndef faults(): return"
        " resource.getrusage(resource.RUSAGE_SELF).ru_minflt\ndef batch(): return [bytes(100_000)"
        " for _ in range(100)]\nbatch(); batch(); before = faults(); batch(); print(faults() -"
        " before)"
    )
    environ = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True
    )
    # The batch takes 2,441 pages.
    assert int(result.stdout) < 500
