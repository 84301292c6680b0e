"""launch/setup.sh: what it refuses, and what it would install. The full set-up is what the tests themselves run in."""

import os
import subprocess
import sys

import pytest

from tests.launch.shell import LAUNCH, ROOT, environment, error_line, run

SETUP = LAUNCH / "setup.sh"


@pytest.mark.parametrize("argument", ["--tpu", "x", "--cpu=1", "--gpu=k80", "--gpu="])
def test_unknown_options_are_refused(argument):
    result = run(SETUP, argument)
    assert result.returncode == 2
    assert argument in error_line(result)


def test_a_tensorflow_without_pins_is_refused():
    result = run(SETUP, TENSORFLOW="2.17")
    assert result.returncode == 2
    assert "TENSORFLOW=2.17" in error_line(result) and "2.18, 2.19, 2.20, 2.21" in error_line(result)


def test_a_directory_that_is_no_environment_is_not_touched(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").write_text("x")
    result = run(SETUP, HYBRID_IMAGENET_VENV=str(tmp_path / "venv"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert result.returncode == 1
    assert "is not a virtual environment" in error_line(result)
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("model", "pin"), [("v100", "9.10.2.21"), ("p40", "9.10.2.21"), ("a100", "9.28.0.42"), ("h100", "9.28.0.42")]
)
def test_cudnn_suits_the_gpus_that_are_named(model, pin):
    """cuDNN 9.11 has no kernels for GPUs before Turing, the papers' V100 and P40 among them."""
    functions = """. <(sed -e 's|^[.] .*/lib.sh"|. launch/lib.sh|' -e '$d' launch/setup.sh)"""
    result = run("bash", "-c", f"{functions}; stamp_file=/none choose_cudnn gpu {model}")
    assert (result.stdout.strip(), result.stderr) == (pin, "")


def test_the_tensorflow_of_a_cluster_is_pinned_with_what_it_needs():
    def pins(file, tensorflow):
        lines = run("bash", "-c", f". launch/lib.sh && pins {file}", TENSORFLOW=tensorflow).stdout.splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    def versions(tensorflow):
        lines = [line.partition(" --hash")[0] for line in pins("hashes.txt", tensorflow)]
        lines = [line for line in lines if "cudnn" not in line]  # there are two, for older and newer GPUs
        assert set(lines) <= set(pins("constraints.txt", tensorflow))
        plain = [line.split(" ;")[0].split("==") for line in lines if "python_version <" not in line]
        assert len({name for name, _ in plain}) == len(plain), "one version of each"
        return dict(plain)

    newest, older = versions(""), versions("2.18")
    assert newest["tensorflow-cpu"].startswith("2.21.")
    assert older["tensorflow-cpu"].startswith("2.18.") and older["numpy"].startswith("2.0.")
    assert older["keras"] == newest["keras"]
    assert "tensorboard" in older and "tensorboard" not in newest


def test_the_key_of_the_built_wheel_names_all_it_depends_on():
    key = run(SETUP, "--print-key", "--cpu").stdout.strip()
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for part in ("horovod0.28.1", "tf2.21.0", "openmpi4.1.8", version, os.uname().machine, "-cpu", "build"):
        assert part in key
    assert "tf2.18" in run(SETUP, "--print-key", "--cpu", TENSORFLOW="2.18").stdout


def test_env_says_what_to_do_without_an_environment(tmp_path):
    result = run("bash", "-c", ". launch/env.sh && echo went on", HYBRID_IMAGENET_VENV=str(tmp_path))
    assert result.returncode == 1
    assert "run launch/setup.sh first" in error_line(result)


def test_env_keeps_what_the_user_has_set():
    show = ". launch/env.sh; echo $TF_CPP_MIN_LOG_LEVEL ${OMPI_ALLOW_RUN_AS_ROOT:-unset} $VIRTUAL_ENV"
    assert run("bash", "-c", show, TF_CPP_MIN_LOG_LEVEL="0").stdout.split()[0] == "0"
    env = {k: v for k, v in environment().items() if not k.startswith(("OMPI_", "TF_"))}
    clean = subprocess.run(["bash", "-c", show], cwd=ROOT, env=env, capture_output=True, text=True, timeout=20)
    assert clean.stdout.split() == ["2", "1" if os.getuid() == 0 else "unset", sys.prefix]
