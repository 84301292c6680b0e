"""Tests all scripts, their help, and the files for containers and schedulers."""

import ast
import copy
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.shell import LAUNCH, ROOT, SCRIPTS, environment, run

SOURCED = {"lib.sh", "lib_cluster.sh", "env.sh"}
PROGRAMS = [path for path in SCRIPTS if path.name not in SOURCED]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda p: p.name)
def test_script_can_be_executed_and_stops_at_the_first_error(path):
    assert path.stat().st_mode & stat.S_IXUSR
    assert "\nset -eu" in path.read_text()


@pytest.mark.parametrize(
    "path",
    [
        p
        for p in PROGRAMS
        if p.name not in ("run", "container_sshd.sh", "container_user.sh", "horovod_wheel.sh")
    ],
    ids=lambda p: p.name,
)
def test_help_of_a_script_begins_with_its_command(path):
    result = run(path, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith(path.relative_to(ROOT).as_posix())
    assert "#" not in result.stdout.splitlines()[0]


def test_dockerfile_passes_hadolint():
    result = run("hadolint", ROOT / "Dockerfile")
    assert result.stdout + result.stderr == ""


def test_dockerignore_keeps_files_that_the_image_needs():
    kept = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {"hybrid_imagenet", "launch", "pyproject.toml", "setup.py"} <= kept
    # The program looks for these directories next to the package.
    shipped = re.search(r"^SHIPPED_DIRECTORIES = (.*)$", (ROOT / "setup.py").read_text(), re.M)
    assert set(ast.literal_eval(shipped[1])) <= kept


STUB_HOROVOD = """
Sum = None
init = lambda: None
rank = local_rank = lambda: 0
size = lambda: 2
allreduce = lambda value, op: 3.0
"""
STUB_TENSORFLOW = """
import contextlib, types
constant = float
device = lambda name: contextlib.nullcontext()
config = types.SimpleNamespace(list_physical_devices=lambda kind: [])
"""


@pytest.mark.parametrize("stage", ["cpu-build", "gpu-build"])
def test_check_of_two_ranks_needs_only_files_that_the_image_build_has_copied(stage, tmp_path):
    # launch/setup.sh builds the image before the sources of the package are copied.
    stub = tmp_path / "stub"
    build = tmp_path / "build"
    (stub / "horovod").mkdir(parents=True)
    (stub / "horovod" / "__init__.py").touch()
    (stub / "horovod" / "tensorflow.py").write_text(STUB_HOROVOD)
    (stub / "tensorflow.py").write_text(STUB_TENSORFLOW)
    commands = (
        (ROOT / "Dockerfile")
        .read_text()
        .partition(f"AS {stage}")[2]
        .partition("RUN launch/setup.sh")[0]
    )
    copies = [line.split()[1:] for line in commands.splitlines() if line.startswith("COPY ")]
    assert ["launch", "launch"] in copies
    for *sources, target in copies:
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, build / target)
            else:
                (build / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, build / target)
    result = subprocess.run(
        [sys.executable, build / "launch" / "check_ranks.py"],
        env={"PYTHONPATH": f"{stub}:{build}"},
        capture_output=True,
        text=True,
    )
    assert result.stdout == "rank 0 of 2: sum 3.0\n", result.stderr


def test_container_user_script_configures_an_sshd_that_a_user_can_run(tmp_path):
    result = run("sh", LAUNCH / "container_user.sh", tmp_path)
    assert result.returncode == 0, result.stderr
    server = (tmp_path / "home/mpiuser/.sshd_config").read_text()
    assert "Port 2222" in server
    assert "PasswordAuthentication no" in server
    client = (tmp_path / "etc/ssh/ssh_config.d/mpiuser.conf").read_text()
    assert "Port 2222" in client
    assert not list(tmp_path.rglob("id_*")), "an image must hold no key"


def _mpi_job() -> dict:
    return yaml.safe_load((LAUNCH / "kubernetes/mpijob.yaml").read_text())


def _validate(documents: list[dict], folder: Path) -> subprocess.CompletedProcess[str]:
    path = folder / "manifest.yaml"
    path.write_text("---\n".join(yaml.safe_dump(d) for d in documents))
    return run("kubernetes-validate", "--strict", path)


def test_kubernetes_volumes_are_valid(tmp_path):
    documents = list(yaml.safe_load_all((LAUNCH / "kubernetes/volumes.yaml").read_text()))
    assert _validate(documents, tmp_path).returncode == 0


@pytest.mark.parametrize("role", ["Launcher", "Worker"])
def test_kubernetes_pods_of_the_job_are_valid(role, tmp_path):
    spec = _mpi_job()["spec"]["mpiReplicaSpecs"][role]["template"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": role.lower()}, "spec": spec}
    result = _validate([pod], tmp_path)
    assert result.returncode == 0, result.stdout
    broken = copy.deepcopy(pod)
    broken["spec"]["containers"][0]["imagge"] = "x"
    assert _validate([broken], tmp_path).returncode != 0, "the check must be able to fail"


def test_kubernetes_job_requests_a_gpu_per_slot_and_mounts_its_claims():
    job = _mpi_job()
    workers = job["spec"]["mpiReplicaSpecs"]["Worker"]
    container = workers["template"]["spec"]["containers"][0]
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == str(job["spec"]["slotsPerWorker"])
    assert workers["replicas"] * job["spec"]["slotsPerWorker"] == 24
    claims = {
        d["metadata"]["name"]
        for d in yaml.safe_load_all((LAUNCH / "kubernetes/volumes.yaml").read_text())
    }
    for role in job["spec"]["mpiReplicaSpecs"].values():
        for volume in role["template"]["spec"]["volumes"]:
            if "persistentVolumeClaim" in volume:
                assert volume["persistentVolumeClaim"]["claimName"] in claims


def test_slurm_script_requests_the_nodes_of_cluster_1():
    lines = (LAUNCH / "slurm.sh").read_text().splitlines()
    options = [line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")]
    assert {"--nodes=3", "--ntasks-per-node=8", "--gpus-per-node=8", "--requeue"} <= set(options)
    assert any(o.startswith("--signal=B:USR1@") for o in options)


@pytest.fixture
def slurm_job(tmp_path):
    """Returns variables of a Slurm job on two nodes that only prints its command."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames n[1-2]' ] && printf 'n1\\nn2\\n'\n")
    scontrol.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{environment()['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "DRY_RUN": "1",
    }


def test_slurm_script_passes_its_nodes_as_hosts(tmp_path, slurm_job):
    # Slurm runs a copy of the script from its spool directory.
    script_copy = shutil.copy(LAUNCH / "slurm.sh", tmp_path / "slurm_script")
    result = run("bash", script_copy, "--epochs=3", cwd=tmp_path, **slurm_job)
    assert result.returncode == 0, result.stderr
    assert "-np 8 -H n1:4,n2:4" in result.stdout
    assert result.stdout.rstrip().endswith("--run_dir=runs/slurm-7 --epochs=3 --resume")


@pytest.mark.parametrize("flags", ["--recipe=mlperf_lars", "--flagfile=my.flags"])
def test_slurm_job_with_a_recipe_or_a_flag_file_has_no_flags_of_cluster_1(slurm_job, flags):
    assert "cluster1.flags" in run(LAUNCH / "slurm.sh", **slurm_job).stdout
    result = run(LAUNCH / "slurm.sh", flags, **slurm_job)
    assert result.stdout.rstrip().endswith(f"-- --run_dir=runs/slurm-7 {flags} --resume")


def test_slurm_script_outside_a_job_prints_how_to_submit_it():
    result = run(LAUNCH / "slurm.sh", SLURM_JOB_ID="")
    assert result.returncode == 2
    assert "sbatch launch/slurm.sh" in result.stderr


def test_kubernetes_launcher_reads_the_hosts_from_the_file_of_the_operator(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(
        "# made by the operator\njob-worker-0.job.ns.svc slots=8\njob-worker-1.job.ns.svc slots=8\n"
    )
    launcher = LAUNCH / "kubernetes/launcher.sh"
    result = run(
        launcher, "--dry-run", "--run_dir=/runs/x", "--flagfile=f", MPI_HOSTFILE=str(hostfile)
    )
    assert "-np 16 -H job-worker-0.job.ns.svc:8,job-worker-1.job.ns.svc:8" in result.stdout
    assert run(launcher, "--epochs=3", MPI_HOSTFILE=str(hostfile)).returncode == 2


def test_docker_script_dry_run_prints_mounts_and_quoted_arguments(tmp_path):
    data = tmp_path / "my data"
    data.mkdir()
    result = run(
        LAUNCH / "docker.sh",
        "--gpu",
        f"--data={data}",
        f"--runs={tmp_path}/r",
        "--dry-run",
        "local.sh",
        "--run_dir=a b",
    )
    build, start = result.stdout.splitlines()
    assert build == f"docker build --target gpu -t hybrid-imagenet:gpu {ROOT}"
    assert f"'{data}:/data:ro'" in start
    assert start.endswith("hybrid-imagenet:gpu local.sh '--run_dir=a b'")
    assert "--gpus all" in start
    assert "CUDA_CACHE_PATH=/workspace/runs/.cuda_cache" in start


def test_docker_script_passes_rdma_adapters_only_to_gpu_containers(tmp_path):
    # --gpus does not pass adapters, and without them NCCL uses TCP and prints nothing.
    (tmp_path / "infiniband").mkdir()
    existing = str(tmp_path / "infiniband")
    missing = str(tmp_path / "none")
    commands = {
        (kind, path): (
            run(LAUNCH / "docker.sh", *kind, "--dry-run", INFINIBAND=path).stdout.splitlines()[1]
        )
        for kind in ((), ("--gpu",))
        for path in (existing, missing)
    }
    assert f"--device {existing}" in commands[("--gpu",), existing]
    assert sum("--device" in line for line in commands.values()) == 1
    for library in ("libibverbs1", "ibverbs-providers", "librdmacm1"):
        assert (
            library
            in (ROOT / "Dockerfile").read_text().partition("AS gpu-base")[2].partition("FROM")[0]
        )


def test_docker_script_rejects_directories_that_cannot_be_mounted(tmp_path):
    for wrong in ("--data=/nowhere/at/all", "--runs=/tmp/a:b", "--epochs=3"):
        result = run(LAUNCH / "docker.sh", wrong, "--dry-run")
        assert result.returncode == 2
        assert len(result.stderr.splitlines()) == 1


def test_hashes_exist_for_every_pin():
    lines = {
        name: (LAUNCH / name).read_text().splitlines() for name in ("constraints.txt", "hashes.txt")
    }
    pins, hashed = (
        [line for line in text if line and not line.startswith("#")] for text in lines.values()
    )
    older = re.search(r"(?m)^CUDNN_BEFORE_TURING=(.*)$", (LAUNCH / "setup.sh").read_text())[1]
    assert {line.partition(" --hash=")[0] for line in hashed} == {
        *pins,
        f"nvidia-cudnn-cu12=={older}",
    }
    for line in hashed:
        hashes = line.split(" --hash=")[1:]
        assert hashes
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", value) for value in hashes), line


@pytest.mark.parametrize(
    "path", sorted(LAUNCH.glob("tensorflow-*.txt")), ids=lambda path: path.stem
)
def test_pins_of_another_tensorflow_are_complete(path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    names = {line.partition("==")[0]: line.partition("==")[2].split(" ")[0] for line in lines}
    version = path.stem.partition("-")[2]
    assert names["tensorflow"] == names["tensorflow-cpu"]
    for name in ("tensorflow", "tf-keras", "tensorboard"):
        assert names[name].startswith(version + ".")
    for line in lines:
        assert all(
            re.fullmatch("sha256:[0-9a-f]{64}", value) for value in line.split(" --hash=")[1:]
        ), line
        assert " --hash=" in line


@pytest.mark.skipif(not shutil.which("dash"), reason="dash is not installed")
def test_env_script_in_another_shell_prints_that_it_needs_bash():
    result = run("dash", "-c", ". launch/env.sh; echo $?")
    assert result.stdout == "1\n"
    text = (
        "error: launch/env.sh needs bash, but this is another shell. Start bash, then run: ."
        " launch/env.sh\n"
    )
    assert result.stderr == text


@pytest.mark.parametrize("script", ["launch/local.sh", "launch/docker.sh"])
def test_script_options_accept_dashes_and_underscores(script):
    outputs = {run("bash", script, option).stdout for option in ("--dry-run", "--dry_run")}
    assert len(outputs) == 1
    assert outputs.pop().split()[0] in (sys.executable, "docker")


def test_workers_of_the_test_script_run_the_tests_of_a_group_together(tmp_path):
    """pytest 9.2 with pytest-xdist 3.8 ignores groups without a message."""
    (tmp_path / "test_groups.py").write_text(
        "import pytest\n"
        "@pytest.mark.xdist_group('ranks')\n"
        "@pytest.mark.parametrize('number', range(8))\n"
        "def test_group(number): pass\n"
    )
    words = re.search(r"set -- (--numprocesses=2 .*)", (LAUNCH / "test.sh").read_text())[1].split()
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", *words, str(tmp_path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    workers = re.findall(r"\[(gw\d)\].*PASSED", result.stdout)
    assert len(workers) == 8, result.stdout
    assert len(set(workers)) == 1
