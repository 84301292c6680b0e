"""Tests configuring a rank's GPU on synthetic trees of /proc and /sys, and unsupported GPUs."""

import os
import sys
from unittest import mock

import pytest
import tensorflow as tf

from hybrid_imagenet.cluster import environment, gpus
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.errors import UserError
from tests.cluster.test_environment import Devices
from tests.support import in_process

# Pairs of an address and a NUMA node, as on a host with two sockets. The kernel writes addresses in
# capitals only under /proc.
GPUS = (("0000:3B:00.0", 0), ("0000:5e:00.0", 0), ("0000:af:00.0", 1))
NODES = ("0-3,8-11", "4-7,12")
# The kernels of TensorFlow 2.21.
KERNELS = ("sm_60", "sm_70", "sm_80", "sm_89", "compute_90")


@pytest.fixture
def host(tmp_path):
    for address, node in GPUS:
        (tmp_path / "proc/driver/nvidia/gpus" / address).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / address.lower()
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    for number, cores in enumerate(NODES):
        node = tmp_path / f"sys/devices/system/node/node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(cores + "\n")
    return tmp_path


def test_pci_addresses_follow_cuda_visible_devices(host):
    indices = {None: [0, 1, 2], "": [], "2,0": [2, 0], "1,-1,2": [1], "MIG-1/2/3": [], "7": []}
    for value, expected in indices.items():
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        assert gpus.pci_addresses(environ, host) == [GPUS[i][0].lower() for i in expected], value


def test_numa_cores_are_those_of_the_node_of_the_gpu(host):
    first = {0, 1, 2, 3, 8, 9, 10, 11}
    second = {4, 5, 6, 7, 12}
    assert [gpus.numa_cores(rank, {}, host) for rank in range(4)] == [first, first, second, first]
    assert gpus.numa_cores(0, {"CUDA_VISIBLE_DEVICES": "2"}, host) == second
    assert gpus.numa_cores(0, {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, host) == set(), (
        "the order is not known"
    )
    # A machine with one node reports -1.
    (host / "sys/bus/pci/devices/0000:af:00.0/numa_node").write_text("-1\n")
    assert gpus.numa_cores(2, {}, host) == set()
    (host / "sys/bus/pci/devices/0000:5e:00.0/numa_node").unlink()
    assert gpus.numa_cores(1, {}, host) == set()


def test_configure_gpu_environment_loads_cusolver_from_its_package(tmp_path, monkeypatch):
    library = tmp_path / "nvidia/cusolver/lib/libcusolver.so.11"
    library.parent.mkdir(parents=True)
    for file in (library, tmp_path / "nvidia/__init__.py"):
        file.touch()
    loaded = []
    monkeypatch.setattr(gpus.ctypes, "CDLL", loaded.append)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    gpus.configure_gpu_environment(0, 1, {}, True, tmp_path)
    assert loaded == [str(library)]


def test_rank_is_bound_to_the_cores_of_its_gpu_unless_it_is_bound_already(host, monkeypatch):
    bound_cores = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: bound_cores.append(cores))
    for allowed_cores in (range(13), {5, 6}, {0, 1}):
        monkeypatch.setattr(
            os, "sched_getaffinity", lambda process, allowed_cores=allowed_cores: set(allowed_cores)
        )
        gpus.configure_gpu_environment(2, 3, {}, True, host)
        # Two GPUs share a node that has fewer cores than two ranks need.
        gpus.configure_gpu_environment(1, 2, {}, True, host)
        gpus.configure_gpu_environment(0, 1, {}, True, host)
    assert bound_cores == [{4, 5, 6, 7, 12}]


def test_configure_gpu_environment_sets_only_variables_that_are_not_set(tmp_path):
    environ = {}
    gpus.configure_gpu_environment(0, 1, environ, True, tmp_path)
    assert environ == {
        "TF_GPU_THREAD_MODE": "gpu_private",
        "TF_GPU_THREAD_COUNT": "2",
        "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    environ = dict.fromkeys(environ, "mine")
    gpus.configure_gpu_environment(0, 1, environ, True, tmp_path)
    assert set(environ.values()) == {"mine"}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [((), "1"), (("--persistent_batch_norm=false",), "0"), (("--deterministic",), "0")],
)
def test_persistent_batch_norm_is_on_unless_the_run_is_deterministic(monkeypatch, flags, expected):
    monkeypatch.setattr(
        "hybrid_imagenet.comm.process.configure_tensorflow", lambda placement, threads: None
    )
    monkeypatch.setattr(
        "hybrid_imagenet.comm.process.SingleProcess", mock.Mock(side_effect=UserError("far enough"))
    )
    with mock.patch.dict(os.environ):
        os.environ.pop("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", None)
        code, _, errors = in_process.call(
            "hybrid_imagenet.main", ["--recipe=hybrid", "--dataset=digits", *flags]
        )
        assert code == 2
        assert errors == "error: far enough\n"
        assert os.environ["TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"] == expected


@pytest.mark.parametrize(
    ("capability", "kernels", "cudnn", "reason"),
    [
        ((7, 0), KERNELS, (9, 10, 2), None),
        ((7, 0), KERNELS, (9, 11, 0), "cuDNN 9.11.0. Run launch/setup.sh --gpu=v100"),
        # The system provides cuDNN.
        ((7, 0), KERNELS, None, None),
        ((8, 6), KERNELS, (9, 28, 0), None),
        # The driver compiles the kernels.
        ((9, 0), KERNELS, (9, 28, 0), None),
        ((10, 0), KERNELS, (9, 28, 0), "compute capability 10.0 has no kernels in this TensorFlow"),
        ((10, 0), (*KERNELS, "sm_100"), (9, 28, 0), None),
        ((8, 0), (), (9, 28, 0), None),
    ],
)
def test_unsupported_gpu_problem_names_the_remedy(capability, kernels, cudnn, reason):
    problem = gpus.unsupported_gpu_problem(capability, kernels, cudnn)
    assert problem is None if reason is None else reason in problem


def test_configure_tensorflow_raises_for_an_unsupported_gpu(monkeypatch):
    Devices(monkeypatch)
    details = {"device_name": "Tesla V100", "compute_capability": (7, 0)}
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: details)
    monkeypatch.setattr(gpus, "installed_cudnn", lambda: (9, 28, 0))
    with pytest.raises(
        UserError, match=r"^GPU 0 \(Tesla V100\): compute capability 7.0 .* --gpu=v100"
    ):
        environment.configure_tensorflow(Placement(), threads=1)


@pytest.mark.parametrize(
    ("visible_devices", "driver", "expected"),
    [
        (None, False, "has no NVIDIA driver"),
        (None, True, "shows no GPU to TensorFlow, but"),
        ("0,1", True, "with CUDA_VISIBLE_DEVICES=0,1"),
        ("", False, None),
        ("-1", True, None),
    ],
)
def test_missing_gpu_problem_is_none_only_if_the_user_chose_the_cpu(
    monkeypatch, visible_devices, driver, expected
):
    # Otherwise a job on a host without a driver would train on the CPU for days.
    monkeypatch.setattr(gpus.ctypes, "CDLL", mock.Mock(side_effect=None if driver else OSError))
    variables = {} if visible_devices is None else {"CUDA_VISIBLE_DEVICES": visible_devices}
    problem = gpus.missing_gpu_problem(variables)
    if expected is None:
        assert problem is None
    else:
        assert expected in problem
        assert "CUDA_VISIBLE_DEVICES= to" in problem


def test_rdma_problem_of_adapters_without_libraries_or_devices(tmp_path, monkeypatch):
    assert gpus.rdma_problem(tmp_path) is None
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert "/dev/infiniband" in gpus.rdma_problem(tmp_path)
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch()
    monkeypatch.setattr(gpus.ctypes, "CDLL", mock.Mock(side_effect=OSError))
    assert "Install libibverbs1" in gpus.rdma_problem(tmp_path)
    monkeypatch.setattr(gpus.ctypes, "CDLL", mock.Mock())
    assert gpus.rdma_problem(tmp_path) is None
    (tmp_path / "sys/bus/pci/drivers/efa").mkdir(parents=True)
    (tmp_path / "sys/class/infiniband/mlx5_0/device").mkdir()
    (tmp_path / "sys/class/infiniband/mlx5_0/device/driver").symlink_to(
        tmp_path / "sys/bus/pci/drivers/efa"
    )
    # The plug-in for EFA can be loaded.
    assert gpus.rdma_problem(tmp_path) is None
    monkeypatch.setattr(gpus.ctypes, "CDLL", mock.Mock(side_effect=[None, OSError]))
    assert "libnccl-net.so. Install aws-ofi-nccl" in gpus.rdma_problem(tmp_path)


class FakeDriver:
    """A CUDA driver with GPUs of these compute capabilities; it fails for `failing`."""

    def __init__(self, capabilities, failing=""):
        self.capabilities = capabilities
        self.failing = failing

    def cuInit(self, flags):  # noqa: N802 - a name of CUDA
        return int(self.failing == "cuInit")

    def cuDeviceGetCount(self, count):  # noqa: N802
        count._obj.value = len(self.capabilities)
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device._obj.value = ordinal
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):  # noqa: N802
        # CUDA's header has 75 for the major and 76 for the minor number.
        value._obj.value = self.capabilities[device.value][attribute - 75]
        return int(self.failing == "cuDeviceGetAttribute")


@pytest.mark.parametrize(
    ("capabilities", "failing", "lowest"),
    [
        ([(9, 0)], "", (9, 0)),
        ([(9, 0), (6, 1), (8, 9)], "", (6, 1)),
        ([], "", None),
        ([(9, 0)], "cuInit", None),
        ([(9, 0)], "cuDeviceGetAttribute", None),
    ],
)
def test_compute_capability_is_the_lowest_of_all_gpus(capabilities, failing, lowest, monkeypatch):
    monkeypatch.setattr(gpus.ctypes, "CDLL", lambda name: FakeDriver(capabilities, failing))
    assert gpus.compute_capability() == lowest


def test_compute_capability_without_a_driver_is_unknown(monkeypatch):
    monkeypatch.setattr(gpus.ctypes, "CDLL", mock.Mock(side_effect=OSError))
    assert gpus.compute_capability() is None
