"""Tests the output of `hybrid-imagenet env`."""

import json

import pytest

from hybrid_imagenet import __main__ as program
from hybrid_imagenet import __version__
from hybrid_imagenet.commands import env
from hybrid_imagenet.errors import UserError
from tests.support import fresh

GPU = {
    "index": "0",
    "uuid": "GPU-1",
    "name": "NVIDIA H100",
    "driver_version": "550.54",
    "compute_cap": "9.0",
    "memory.total": "81559",
}


@pytest.fixture
def host(monkeypatch):
    """Replaces this host by one with a GPU and TensorFlow for CUDA, without Horovod and mpirun."""
    facts = {
        "cores": 8,
        "memory_gb": 64.04,
        "build": {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9"},
        "nccl": None,
        "gpus": [GPU],
    }
    versions = {"tensorflow": "2.21.0", "keras": "3.15.0", "numpy": "2.4.6"}

    def version(name):
        if name not in versions:
            raise env.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def find():
        raise UserError("There is no mpirun on PATH.")

    monkeypatch.setattr(env.probe, "collect_facts", lambda request: facts)
    monkeypatch.setattr(env.importlib.metadata, "version", version)
    monkeypatch.setattr(env.mpirun, "find", find)
    return versions


def test_env_text_has_versions_gpus_and_missing_packages(host):
    lines = env.format_text(env.describe({"NCCL_DEBUG": "INFO", "HOME": "/root"}))
    words = {name: value.strip() for name, _, value in (line.partition("  ") for line in lines)}
    assert words["hybrid_imagenet"].startswith(f"{__version__} (/")
    assert words["tensorflow"] == "2.21.0 (built for CUDA 12.5.1, cuDNN 9)"
    assert words["host"] == "8 cores, 64 GB memory"
    assert (words["horovod"], words["mpi4py"]) == ("not installed", "not installed")
    assert words["mpirun"] == "none: There is no mpirun on PATH."
    assert words["GPU 0"] == "NVIDIA H100, compute capability 9.0, 81559 MiB, driver 550.54"
    assert lines[-2:] == ["environment variables:", "  NCCL_DEBUG=INFO"]


def test_env_prints_a_variable_with_a_newline_in_one_line(host, monkeypatch, capsys):
    monkeypatch.setenv("NCCL_DEBUG", "INFO\nGPU 1  NVIDIA H100")
    assert env.main([]) == 0
    assert r"  NCCL_DEBUG=INFO\nGPU 1  NVIDIA H100" in capsys.readouterr().out.splitlines()


def test_env_package_for_cpus_counts_as_tensorflow(host):
    host["tensorflow-cpu"] = host.pop("tensorflow")
    packages = env.describe({})["packages"]
    assert packages["tensorflow-cpu"] == "2.21.0"
    assert "tensorflow" not in packages


def test_env_masks_secrets(host):
    variables = env.describe(
        {
            "SLURM_JWT": "abc",
            "HYBRID_IMAGENET_API_KEY": "abc",
            "TF_MIRROR": "https://me:abc@host/path",
            "AWS_SECRET_ACCESS_KEY": "abc",
            "OMP_NUM_THREADS": "2",
        }
    )["variables"]
    assert variables == {
        "HYBRID_IMAGENET_API_KEY": "***",
        "OMP_NUM_THREADS": "2",
        "SLURM_JWT": "***",
        "TF_MIRROR": "https://***@host/path",
    }


def test_env_json_is_one_object_with_the_same_facts(host, capsys):
    assert program.main(["env", "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["packages"]["horovod"] is None
    assert description["gpus"] == [GPU]
    assert description["tensorflow_build"] == {"cuda": "12.5.1", "cudnn": "9"}


def test_env_of_this_host_does_not_load_tensorflow():
    codes, loaded, error = fresh.run(("hybrid_imagenet.commands.env", []))
    assert (codes, error) == ([0], "")
    assert not loaded & fresh.FRAMEWORKS


@pytest.mark.parametrize(
    "name",
    ["TF_MYPASS", "TF_PWD", "TF_VAR_db", "TF_my_token", "SLURM_AUTH", "HYBRID_IMAGENET_APIKEY"],
)
def test_variables_with_the_name_of_a_secret_are_masked(name):
    assert env._variables({name: "hunter2"}) == {name: "***"}
