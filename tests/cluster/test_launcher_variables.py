"""Tests reading ranks and their addresses from TF_CONFIG and Slurm's variables, without mpirun."""

import json
import os
import signal
import subprocess

import pytest

from hybrid_imagenet.cluster import environment, launcher_variables
from hybrid_imagenet.cluster.environment import Placement
from hybrid_imagenet.errors import UserError
from tests.ranks import ROOT
from tests.support import processes, program


def tf_config(kind, index, **jobs):
    return {"TF_CONFIG": json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})}


SLURM = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[09-10],big",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "40007",
}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (tf_config("worker", 1, worker=["a:1", "a:2", "b:1"]), Placement(1, 3, 1, 2)),
        (tf_config("worker", 1, chief=["c:1"], worker=["a:1", "b:1"]), Placement(2, 3, 0, 1)),
        (tf_config("chief", 0, chief=["c:1"], worker=["a:1"]), Placement(0, 2, 0, 1)),
        # The job is a single process.
        (tf_config("worker", 0, worker=["a:1"]), Placement()),
        (tf_config("master", 0, master=["m:1"], worker=["a:1"]), Placement(0, 2, 0, 1)),
        (tf_config("worker", 0, master=["m:1"], worker=["a:1"]), Placement(1, 2, 0, 1)),
        (tf_config("master", 0, master=["m:1"]), Placement()),
        ({"TF_CONFIG": "{}"}, Placement()),
        ({"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'}, Placement()),
        (SLURM | {"TF_CONFIG": "{}"}, Placement(3, 5, 1, 2)),
        (SLURM, Placement(3, 5, 1, 2)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, Placement()),
        # A batch script of Slurm runs outside srun.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, Placement()),
        # mpirun runs inside srun.
        (
            SLURM
            | {
                "OMPI_COMM_WORLD_RANK": "0",
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_RANK": "0",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            },
            Placement(0, 2, 0, 2),
        ),
    ],
)
def test_placement_from_tf_config_or_srun(environ, expected):
    assert environment.read_placement(environ) == expected


def test_ranks_under_srun_agree_on_addresses():
    servers = {
        launcher_variables.read_launcher_placement(SLURM | {"SLURM_PROCID": str(rank)}).servers
        for rank in range(5)
    }
    assert servers == {("n09:24544", "n09:24545", "n10:24544", "n10:24545", "big:24544")}
    # The next job on the same nodes must use other ports.
    servers_of_next_job = launcher_variables.read_launcher_placement(
        SLURM | {"SLURM_PROCID": "0", "SLURM_JOB_ID": "40008"}
    ).servers
    assert not {*servers_of_next_job} & {*next(iter(servers))}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("n[1-3,7],m2", ["n1", "n2", "n3", "n7", "m2"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("n[1-2]-ib0", ["n1-ib0", "n2-ib0"]),
        ("cpn-m[11-12]-[16-17]", ["cpn-m11-16", "cpn-m11-17", "cpn-m12-16", "cpn-m12-17"]),
        ("n[1-3]r[1-2]", ["n1r1", "n1r2", "n2r1", "n2r2", "n3r1", "n3r2"]),
        ("a-1,n[1,3-4]-ib0.site,b[2]", ["a-1", "n1-ib0.site", "n3-ib0.site", "n4-ib0.site", "b2"]),
    ],
)
def test_expand_node_list_returns_the_names_of_all_nodes(text, names):
    assert launcher_variables.expand_node_list(text) == names


@pytest.mark.parametrize(
    "environ",
    [
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": "[]"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}'},
        # srun was started with --distribution=cyclic.
        SLURM | {"SLURM_LOCALID": "0"},
        tf_config("worker", 2, worker=["a:1", "b:1"]),
        tf_config("chief", 1, chief=["c:1"], worker=["a:1", "b:1"]),
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'},
        *(
            SLURM | {"SLURM_STEP_NODELIST": text}
            for text in ("n[1-3", "n1]", "n[1-3],", "n[]", "n[3-1]", "n[[1]]", "")
        ),
        SLURM | {"SLURM_STEP_NODELIST": "n[1-999999999]"},
        SLURM | {"SLURM_STEP_TASKS_PER_NODE": "x"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "x"},
        SLURM | {"SLURM_PROCID": "5"},
        {name: value for name, value in SLURM.items() if name != "SLURM_JOB_ID"},
    ],
)
def test_placement_from_unreadable_variables_raises(environ):
    with pytest.raises(UserError, match=r"cannot be read|host by host"):
        environment.read_placement(environ)


@pytest.mark.parametrize(
    ("environ", "role"),
    [
        (tf_config("evaluator", 0, worker=["a:1", "b:1"]), "evaluator"),
        (tf_config("ps", 0, worker=["a:1", "b:1"], ps=["p:1"]), "ps"),
        # All tasks must raise the same error.
        (tf_config("worker", 0, worker=["a:1", "b:1"], ps=["p:1"]), "ps"),
        (tf_config("evaluator", 0, chief=["a:1"], evaluator=["e:1"]), "evaluator"),
        (tf_config("boss", 0, worker=["a:1", "b:1"]), "boss"),
    ],
)
def test_placement_names_the_role_of_tf_config_that_is_not_supported(environ, role):
    with pytest.raises(UserError, match=f"the role {role}, which is not supported"):
        environment.read_placement(environ)


SRUN = """
for task in 0 1; do
  SLURM_JOB_ID=$$ SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 \
    SLURM_PROCID=$task "$@" &
  tasks="$tasks $!"
done
for task in $tasks; do wait $task || exit; done
"""


@pytest.mark.slow
def test_tasks_of_srun_train_together(tmp_path):
    data = program.make_data(tmp_path)
    flags = (
        *program.FLAGS,
        "--engine=tensorflow",
        f"--data_dir={data}",
        f"--run_dir={tmp_path}/run",
        "--epochs=1",
    )
    command = ("sh", "-c", SRUN, "srun", *program.command(1, *flags))
    result = subprocess.run(
        command, cwd=ROOT, env=program.environment(), capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "2 ranks x 8 images" in result.stdout
    (epoch,) = [record for record in program.records(tmp_path / "run") if record["kind"] == "epoch"]
    assert epoch["train_count"] == program.TRAIN


@pytest.mark.slow
def test_tasks_of_srun_save_at_sigterm(tmp_path):
    data = program.make_data(tmp_path)
    flags = (*program.FLAGS, f"--data_dir={data}", f"--run_dir={tmp_path}/run", "--epochs=9999")
    flags += ("--checkpoint_every_epochs=9999", "--nokeep_best")
    command = ("sh", "-c", SRUN, "srun", *program.command(1, *flags))
    running = subprocess.Popen(
        command, cwd=ROOT, env=program.environment(), stderr=subprocess.PIPE, text=True
    )
    try:
        processes.wait_for(lambda: len(program.records(tmp_path / "run")) > 4, 240)
        for task in processes.descendants(running.pid):
            os.kill(task, signal.SIGTERM)
        errors = running.communicate(timeout=60)[1]
    finally:
        for task in processes.descendants(running.pid):
            os.kill(task, signal.SIGKILL)
    (saved,) = (tmp_path / "run" / "checkpoints").glob("step-*.npz")
    assert running.returncode == 75, errors
    assert int(saved.stem.removeprefix("step-")) >= program.records(tmp_path / "run")[-1]["step"]
