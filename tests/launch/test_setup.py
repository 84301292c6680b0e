"""Tests launch/setup.sh: its errors, and the versions that it would install.

The tests themselves run in an environment that launch/setup.sh has installed.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.launch.shell import LAUNCH, ROOT, environment, error_line, run
from tests.support import processes

SETUP = LAUNCH / "setup.sh"


@pytest.mark.parametrize("argument", ["--tpu", "x", "--cpu=1", "--gpu=k80", "--gpu="])
def test_setup_rejects_unknown_options(argument):
    result = run(SETUP, argument)
    assert result.returncode == 2
    assert argument in error_line(result)


def test_setup_rejects_a_tensorflow_without_pins():
    result = run(SETUP, TENSORFLOW="2.17")
    assert result.returncode == 2
    assert "TENSORFLOW=2.17" in error_line(result) and "2.18, 2.19, 2.20, 2.21" in error_line(
        result
    )


def test_setup_does_not_change_a_directory_that_is_not_an_environment(tmp_path):
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").write_text("x")
    result = run(
        SETUP, HYBRID_IMAGENET_VENV=str(tmp_path / "venv"), XDG_CACHE_HOME=str(tmp_path / "cache")
    )
    assert result.returncode == 1
    assert "is not a virtual environment" in error_line(result)
    assert [path.name for path in (tmp_path / "venv").iterdir()] == ["mine"]


# The functions of setup.sh without its last line, which would start the setup.
FUNCTIONS = """. <(sed -e 's|^[.] .*/lib.sh"|. launch/lib.sh|' -e '$d' launch/setup.sh)"""


@pytest.mark.parametrize(
    ("model", "pin"),
    [("v100", "9.10.2.21"), ("p40", "9.10.2.21"), ("a100", "9.28.0.42"), ("h100", "9.28.0.42")],
)
def test_choose_cudnn_chooses_a_version_for_the_gpu(model, pin):
    # Since 9.11 cuDNN has no kernels for GPUs before Turing, such as the papers' V100 and P40.
    result = run("bash", "-c", f"{FUNCTIONS}; stamp_file=/none choose_cudnn gpu {model}")
    assert (result.stdout.strip(), result.stderr) == (pin, "")


@pytest.mark.parametrize("cudnn", ["none", "9.10.2.21"])
def test_constraints_of_a_cudnn_are_requirements_that_pip_can_read(cudnn):
    lines = run("bash", "-c", f"{FUNCTIONS}; constraints_of {cudnn}").stdout.splitlines()
    requirements = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = [str(each.specifier) for each in requirements if each.name == "nvidia-cudnn-cu12"]
    assert pins == ([] if cudnn == "none" else [f"=={cudnn}"])
    assert len(requirements) > 100


def test_pins_of_an_older_tensorflow_include_its_dependencies():
    def pins(file, tensorflow):
        lines = run(
            "bash", "-c", f". launch/lib.sh && pins {file}", TENSORFLOW=tensorflow
        ).stdout.splitlines()
        return [line for line in lines if line and not line.startswith("#")]

    def versions(tensorflow):
        lines = [line.partition(" --hash")[0] for line in pins("hashes.txt", tensorflow)]
        # There are two versions of cuDNN, for older and newer GPUs.
        lines = [line for line in lines if "cudnn" not in line]
        assert set(lines) <= set(pins("constraints.txt", tensorflow))
        plain = [
            line.split(" ;")[0].split("==") for line in lines if "python_version <" not in line
        ]
        assert len({name for name, _ in plain}) == len(plain), "one version of each"
        return dict(plain)

    newest = versions("")
    older = versions("2.18")
    assert newest["tensorflow-cpu"].startswith("2.21.")
    assert older["tensorflow-cpu"].startswith("2.18.") and older["numpy"].startswith("2.0.")
    assert older["keras"] == newest["keras"]
    assert "tensorboard" in older and "tensorboard" not in newest


@pytest.mark.parametrize("for_tests", ["no", "yes"])
def test_install_hashed_installs_packages_of_tests_only_with_tests(tmp_path, for_tests):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    # Prints the file that pip gets as its last argument.
    python.write_text('#!/bin/bash\nexec cat "${@: -1}"\n')
    python.chmod(0o755)
    command = f"{FUNCTIONS}; venv_dir={tmp_path} for_tests={for_tests} cudnn=none"
    lines = run("bash", "-c", f"{command}; install_hashed cpu").stdout.splitlines()
    names = {line.partition("==")[0] for line in lines}
    assert {"keras", "numpy", "tensorflow-cpu", "onnx"} <= names
    for name in ("matplotlib", "pytest", "scikit-learn", "scipy"):
        assert (name in names) is (for_tests == "yes"), name


def test_setup_print_key_names_everything_that_the_wheel_depends_on():
    key = run(SETUP, "--print-key", "--cpu").stdout.strip()
    version = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for part in (
        "horovod0.28.1",
        "tf2.21.0",
        "openmpi4.1.8",
        version,
        os.uname().machine,
        "-cpu",
        "build",
    ):
        assert part in key
    assert "tf2.18" in run(SETUP, "--print-key", "--cpu", TENSORFLOW="2.18").stdout


def test_horovod_wheel_script_ignores_a_damaged_wheel_in_its_cache(tmp_path):
    def wheel(option):
        # The compiler fails, so nothing is built.
        return run(
            LAUNCH / "horovod_wheel.sh", option, "cpu", sys.executable,
            XDG_CACHE_HOME=str(tmp_path / "cache"), PATH=f"{tmp_path}:{os.environ['PATH']}",
        )  # fmt: skip

    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    path = pathlib.Path(wheel("--path").stdout.strip())
    # The cache is empty.
    assert wheel("--cached").returncode == 1
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("horovod/library.so", b"machine code " * 100)
    content = path.read_bytes()
    for option in ("--cached", "--check", "--build"):
        assert wheel(option).returncode == 0
    for damaged in (b"", content[:-30], content.replace(b"code", b"c0de", 1)):
        path.write_bytes(damaged)
        assert wheel("--cached").returncode == 1
        # The error about the compiler shows that they would build the wheel again.
        for option in ("--check", "--build"):
            assert "g++ cannot compile C++17" in error_line(wheel(option))


# Replaces Python in an environment. Its pip installs one file per call. At its first call it is
# killed together with setup.sh, which started it.
FAKE_PYTHON = r"""#!/bin/bash
case "$*" in
  *sys.executable*) echo "$0 3.11" ;;
  "-m venv "*)
    mkdir -p "$3/bin"
    touch "$3/pyvenv.cfg"
    cp "$0" "$3/bin/python"
    echo "export VIRTUAL_ENV=$3 PATH=$3/bin:\$PATH" >"$3/bin/activate"
    printf '#!/bin/sh\necho "[X] TensorFlow [X] MPI"\n' >"$3/bin/horovodrun"
    printf '#!/bin/sh\n' >"$3/bin/mpirun"
    chmod +x "$3/bin/horovodrun" "$3/bin/mpirun"
    ;;
  *" pip "*)
    environment=$(dirname "$(dirname "$0")")
    if [[ ! -e $environment/../was_killed ]]; then
      touch "$environment/half_a_package" "$environment/../was_killed"
      kill -TERM "$(cut -d " " -f 4 "/proc/$PPID/stat")"
      sleep 20
    fi
    ;;
esac
"""


def test_setup_after_one_that_was_killed_during_pip_install_starts_from_scratch(tmp_path):
    launch = tmp_path / "checkout" / "launch"
    shutil.copytree(LAUNCH, launch)
    shutil.copy(ROOT / "pyproject.toml", launch.parent)
    (launch / "horovod_wheel.sh").write_text("#!/bin/sh\n")
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    venv = tmp_path / "venv"

    def setup(*options):
        return run(
            launch / "setup.sh", "--cpu", *options, HYBRID_IMAGENET_VENV=str(venv),
            HYBRID_IMAGENET_PYTHON=str(python), XDG_CACHE_HOME=str(tmp_path / "cache"),
        )  # fmt: skip

    first = setup()
    assert first.returncode == 143, first.stderr
    assert (venv / "half_a_package").exists()
    again = setup()
    assert again.returncode == 0, again.stderr
    assert (
        f"creating {venv} again, because its last setup stopped while it installed packages"
        in again.stderr
    )
    assert not (venv / "half_a_package").exists()
    # The environment is complete now, and a third setup has nothing to do.
    (venv / "complete").touch()
    assert setup().stderr == ""
    # With --tests it adds packages, which later setups without the option keep.
    assert f"ready: {venv}" in setup("--tests").stderr
    assert setup().stderr == ""
    assert "tests yes" in (venv / ".hybrid_imagenet").read_text()
    # After a change of the pins, setup updates a complete environment in place.
    with (launch / "constraints.txt").open("a") as pins:
        pins.write("# another pin\n")
    updated = setup()
    assert updated.returncode == 0 and f"ready: {venv}" in updated.stderr
    assert (venv / "complete").exists()


def copy_of_setup(tmp_path, **programs):
    """Returns a function that starts a setup with FAKE_PYTHON, and its environment.

    Args:
      tmp_path: Gets the files.
      programs: Scripts by name that replace programs on the PATH.
    """
    launch = tmp_path / "checkout" / "launch"
    shutil.copytree(LAUNCH, launch)
    shutil.copy(ROOT / "pyproject.toml", launch.parent)
    (launch / "horovod_wheel.sh").write_text("#!/bin/sh\n")
    (tmp_path / "bin").mkdir()
    for name, text in {"fake_python": FAKE_PYTHON, **programs}.items():
        program = tmp_path / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
    venv = tmp_path / "venv"

    def start():
        return subprocess.Popen(
            [launch / "setup.sh", "--cpu"],
            env=environment(
                HYBRID_IMAGENET_VENV=str(venv),
                HYBRID_IMAGENET_PYTHON=str(tmp_path / "bin" / "fake_python"),
                XDG_CACHE_HOME=str(tmp_path / "cache"),
                PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            ),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start, venv


# Kills setup.sh when it has removed only one file of an environment.
INTERRUPTED_RM = r"""#!/bin/bash
if [[ -e ${@: -1}/pyvenv.cfg ]]; then
  /bin/rm "${@: -1}/pyvenv.cfg"
  kill -KILL $PPID
  exit
fi
exec /bin/rm "$@"
"""


def test_setup_after_one_that_was_killed_during_a_removal_starts_from_scratch(tmp_path):
    (tmp_path / "was_killed").touch()
    start, venv = copy_of_setup(tmp_path, rm=INTERRUPTED_RM)
    assert start().wait(20) == 0
    (venv / "old").touch()
    # A setup writes the second file at its end.
    (venv / ".hybrid_imagenet_unfinished").touch()
    (venv / ".hybrid_imagenet").unlink()
    assert start().wait(20) == -signal.SIGKILL
    again = start()
    assert again.wait(20) == 0, again.stderr.read()
    assert not (venv / "old").exists()
    assert {path.name for path in tmp_path.glob("venv*")} == {"venv"}


def test_setup_after_one_that_was_killed_before_the_environment_existed_succeeds(tmp_path):
    (tmp_path / "was_killed").touch()
    start, venv = copy_of_setup(tmp_path)
    venv.mkdir()
    (venv / ".hybrid_imagenet_unfinished").touch()
    assert start().wait(20) == 0


@pytest.mark.parametrize("is_group", [False, True])
def test_setup_that_is_killed_ends_its_step_so_that_the_next_one_need_not_wait(tmp_path, is_group):
    (tmp_path / "was_killed").touch()
    slow_pip = f"[[ -e {tmp_path}/fast ]] || {{ echo $$ >{tmp_path}/pip; exec sleep 100; }}"
    start, venv = copy_of_setup(
        tmp_path, fake_python=FAKE_PYTHON.replace('*" pip "*)', f'*" pip "*)\n    {slow_pip}')
    )
    first = start()
    pid_file = tmp_path / "pip"
    processes.wait_for(lambda: pid_file.exists() and pid_file.read_text() != "", 20)
    second = start()
    assert second.stderr.readline() == (
        f"waiting for another setup of {venv} (process {first.pid}) ...\n"
    )
    (tmp_path / "fast").touch()
    (os.killpg if is_group else os.kill)(first.pid, signal.SIGKILL)
    assert processes.gone_within([int(pid_file.read_text())], 20)
    _, error = second.communicate(timeout=20)
    assert second.returncode == 0, error
    assert first.wait(1) == -signal.SIGKILL


RULE = "-" * 74


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            (
                f"started\n{RULE}\nThere are not enough slots available in the\nsystem:\n\n "
                f" true\n\nEither ask\n{RULE}\n"
            ),
            "There are not enough slots available in the system:",
        ),
        (
            (
                f"{RULE}\nIt looks like MPI_INIT failed:\n\n  more\n{RULE}\n{RULE}\nPrimary job"
                f" ended\n{RULE}\n"
            ),
            "It looks like MPI_INIT failed:",
        ),
        (
            f"{RULE}\nPrimary job ended\n{RULE}\nerror: 1 ranks gave the sum 1, not 3\n{RULE}\n",
            "error: 1 ranks gave the sum 1, not 3",
        ),
        (f"the last words\n\n{RULE}\n", "the last words"),
        ("one\ntwo\n", "two"),
    ],
)
def test_last_error_of_a_log_of_open_mpi_is_the_reason(tmp_path, log, reason):
    (tmp_path / "log").write_text(log)
    assert run("bash", "-c", f"{FUNCTIONS}; last_error {tmp_path}/log").stdout == f"{reason}\n"


@pytest.mark.parametrize(
    ("version", "usable"), [("3.10", False), ("3.11", True), ("3.13", True), ("3.14", False)]
)
def test_find_python_accepts_the_versions_that_pyproject_allows(tmp_path, version, usable):
    replacement = tmp_path / "python"
    replacement.write_text(f"#!/bin/sh\necho {replacement} {version}\n")
    replacement.chmod(0o755)
    allowed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "requires-python"
    ]
    assert SpecifierSet(allowed).contains(version) == usable
    result = run(
        "bash",
        "-c",
        f"{FUNCTIONS}; find_python; echo $python",
        HYBRID_IMAGENET_PYTHON=str(replacement),
    )
    if usable:
        assert result.stdout.splitlines()[-1] == str(replacement)
    else:
        assert (
            f"No usable Python 3.11 to 3.13 was found ({replacement} is {version})"
            in error_line(result)
        )


def test_find_python_names_a_chosen_python_that_does_not_run(tmp_path):
    missing = str(tmp_path / "python")
    result = run("bash", "-c", f"{FUNCTIONS}; find_python", HYBRID_IMAGENET_PYTHON=missing)
    assert f"({missing} does not run)" in error_line(result)


def test_env_script_without_an_environment_names_the_remedy(tmp_path):
    result = run(
        "bash", "-c", ". launch/env.sh && echo went on", HYBRID_IMAGENET_VENV=str(tmp_path)
    )
    assert result.returncode == 1
    assert "Run launch/setup.sh first" in error_line(result)


def test_env_script_keeps_variables_of_the_user():
    show = (
        ". launch/env.sh; echo $TF_CPP_MIN_LOG_LEVEL ${OMPI_ALLOW_RUN_AS_ROOT:-unset} $VIRTUAL_ENV"
    )
    assert run("bash", "-c", show, TF_CPP_MIN_LOG_LEVEL="0").stdout.split()[0] == "0"
    env = {k: v for k, v in environment().items() if not k.startswith(("OMPI_", "TF_"))}
    clean = subprocess.run(
        ["bash", "-c", show], cwd=ROOT, env=env, capture_output=True, text=True, timeout=20
    )
    assert clean.stdout.split() == ["2", "1" if os.getuid() == 0 else "unset", sys.prefix]
