"""Tests the commands on runs: runs, status, stop and resume."""

import json
import math
import shlex
import socket
import subprocess
import sys

import pytest

from hybrid_imagenet import __main__, config
from hybrid_imagenet.commands import resume
from hybrid_imagenet.config import stored
from hybrid_imagenet.errors import UserError
from tests.commands.report.synthetic import make_run
from tests.ranks import ROOT, environment
from tests.support import program


def test_runs_lists_state_and_results(tmp_path, capsys):
    make_run(tmp_path / "a", recipe="hybrid")
    make_run(tmp_path / "b-longer", epochs=3, finished=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    (tmp_path / "notes").mkdir()
    assert __main__.main(["runs", str(tmp_path)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == [
        "run",
        "recipe",
        "data",
        "state",
        "top-1",
        "epochs",
        "images/s",
        "when",
        "problem",
    ]
    cells = {row.split()[0]: row.split() for row in rows}
    assert cells["a"][1:8] == ["hybrid", "synthetic", "finished", "78.77", "%", "12/12", "167.9"]
    assert cells["b-longer"][3] == "unknown" and "3/12" in cells["b-longer"]
    assert cells["broken"][3] == "damaged" and len(cells) == 3
    assert rows[-1].endswith(
        f"{tmp_path}/broken/config.json is empty, truncated or not JSON. Restore it from a copy."
    )
    # The cells of a column are aligned.
    assert len({row.index(cells[row.split()[0]][3], 5) for row in rows}) == 1
    assert __main__.main(["runs", str(tmp_path / "notes")]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'notes'} contains no runs.")


def test_runs_diff_lists_the_flags_that_differ(tmp_path, capsys):
    one, other = (
        str(make_run(tmp_path / name, lr=lr, epochs=2)) for name, lr in (("a", 0.1), ("b", 0.2))
    )
    assert __main__.main(["runs", "--diff", one, other]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["flag", one, other],
        ["lr", "0.1", "0.2"],
    ]
    assert __main__.main(["runs", "--diff", one, one]) == 0
    assert capsys.readouterr().out == "All flags are the same.\n"


def test_status_prints_the_command_that_continues_the_run(tmp_path, capsys):
    run = make_run(tmp_path / "run", epochs=3, finished=False)
    assert __main__.main(["status", str(run)]) == 0
    first, outcome, following = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run}: unknown, step 48, last record ")
    assert "(unknown after 3 of 12 epochs)" in outcome
    assert (
        following
        == f"To continue it: hybrid-imagenet resume {run}, if it no longer runs on its host"
    )
    assert __main__.main(["stop", str(run)]) == 2
    assert (
        capsys.readouterr().err
        == f"error: {run} does not run on this host. It was started on made-up, so stop it there.\n"
    )
    stopped = make_run(tmp_path / "stopped", epochs=3)
    summary = stopped / "summary.json"
    # The last two steps have no record.
    summary.write_text(json.dumps(json.loads(summary.read_text()) | {"steps": 50}))
    assert __main__.main(["status", str(stopped)]) == 0
    assert ", step 50, last record" in capsys.readouterr().out


def test_status_and_report_of_a_failed_run_print_its_error(tmp_path, capsys):
    run = make_run(tmp_path / "run", epochs=3, finished=False)
    error = "a.jpg is damaged. Repair it."
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "failed", "step": 49, "error": error}) + "\n")
    assert __main__.main(["status", str(run)]) == 0
    first, outcome, following = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{run}: failed, step 49, last record ")
    assert outcome.endswith(f" The error that ended it: {error}")
    assert (
        following == f"To continue it: hybrid-imagenet resume {run}, after you have removed the"
        " cause of the error"
    )
    assert __main__.main(["report", "--text", str(run)]) == 0
    assert error in capsys.readouterr().out
    assert __main__.main(["runs", str(tmp_path)]) == 0
    assert " failed " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ({"summary": "finished"}, "finished at epoch 3, so there is nothing to stop.\n"),
        (
            {"summary": "preempted"},
            (
                "was stopped at epoch 3 and no longer runs, so there is nothing to stop. To"
                " continue it: "
            ),
        ),
        (
            {"last": "diverged"},
            "diverged at epoch 3 and no longer runs, so there is nothing to stop. To continue it: ",
        ),
        (
            {"last": "failed"},
            "failed at epoch 3 and no longer runs, so there is nothing to stop. To continue it: ",
        ),
        (
            {},
            (
                "was killed at epoch 3 and no longer runs, so there is nothing to stop. To continue"
                " it: "
            ),
        ),
    ],
)
def test_stop_of_an_ended_run_prints_how_it_ended(tmp_path, capsys, end, message):
    run = make_run(tmp_path / "run", epochs=3, finished="summary" in end)
    if "summary" in end:
        summary = run / "summary.json"
        summary.write_text(json.dumps(json.loads(summary.read_text()) | {"stop": end["summary"]}))
    if "last" in end:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": end["last"], "step": 49}) + "\n")
    description = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(description | {"hosts": [socket.gethostname()]}))
    assert __main__.main(["stop", str(run)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {run} {message}")


def test_stop_of_a_directory_without_a_run_prints_an_error(tmp_path, capsys):
    assert __main__.main(["stop", str(tmp_path)]) == 2
    assert f"{tmp_path} is not a run" in capsys.readouterr().err


def run_description(*flags, ranks=1, hosts=("here",)):
    """Returns the config.json of a run with these flags."""
    resolved = config.resolve(flags)
    origins = {name: origin.value for name, origin in resolved.origins.items()}
    host_of_each_rank = list(hosts) * ranks
    return {
        "format": stored.FORMAT,
        "flags": resolved.as_masked_dict(),
        "origins": origins,
        "world_size": len(host_of_each_rank),
        "hosts": host_of_each_rank,
    }


FLAGS_OF_RUN = (
    "--recipe=gradual_warmup",
    "--dataset=digits",
    "--epochs=4",
    "--lr_steps=1,2.5",
    "--nokeep_best",
    "--max_steps=7",
)


def test_resume_command_with_new_flags_replaces_those_of_the_run(tmp_path):
    words = resume.resume_command(
        tmp_path, run_description(*FLAGS_OF_RUN), ["--epochs=6", "--keep-best"]
    )
    assert words[0] == "train" and words[-2:] == [f"--run_dir={tmp_path}", "--resume"]
    before = config.resolve(FLAGS_OF_RUN)
    now = config.resolve(words[1:])
    changed = {name for name, value in now.as_dict().items() if value != before.as_dict()[name]}
    assert changed == {"epochs", "keep_best", "max_steps", "run_dir", "resume"}
    assert (now.run.epochs, now.evaluation.keep_best, now.run.max_steps) == (6, True, None)
    assert resume.describe_changes(
        run_description(*FLAGS_OF_RUN)["flags"],
        ["--epochs=6", "--keep_best", "--nokeep_best", "--target_top1=0.9"],
    ) == [
        "--epochs=6 instead of --epochs=4",
        "--keep_best instead of --nokeep_best",
        "--target_top1=0.9 instead of --target_top1=0.75,0.759",
    ]


@pytest.mark.parametrize(
    ("flag", "lines"),
    [
        ("--no_keep_best", ["--nokeep_best instead of --keep_best"]),
        ("--keep-best=no", ["--nokeep_best instead of --keep_best"]),
        ("--keep_best=yes", []),
        ("--epochs=4.0", []),
        ("--target_top1=0.750,0.759", []),
    ],
)
def test_describe_changes_compares_values_and_not_their_spelling(flag, lines):
    flags = {"keep_best": True, "epochs": 4, "target_top1": [0.75, 0.759]}
    assert resume.describe_changes(flags, [flag]) == lines


def test_resume_command_with_a_flag_file_replaces_the_flags_of_the_run(tmp_path):
    (tmp_path / "new.flags").write_text("--epochs=6\n--lr=0.02\n")
    description = run_description(*FLAGS_OF_RUN, "--lr=0.1")
    new_flags = [f"--flagfile={tmp_path / 'new.flags'}"]
    words = resume.resume_command(tmp_path, description, new_flags)
    now = config.resolve(words[1:])
    assert (now.run.epochs, now.optimization.lr) == (6, 0.02)
    assert resume.describe_changes(description["flags"], new_flags) == [
        *new_flags,
        "--epochs=6 instead of --epochs=4",
        "--lr=0.02 instead of --lr=0.1",
    ]


@pytest.mark.parametrize(
    ("before", "change"),
    [
        (("--allreduce=torus", "--torus_grid=2x4"), "--allreduce=ring"),
        (("--lr_schedule=step", "--lr_steps=1,2"), "--lr_schedule=cosine"),
    ],
)
def test_resume_command_with_another_choice_omits_the_options_of_the_old_one(
    tmp_path, before, change
):
    description = run_description("--dataset=digits", "--epochs=4", *before)
    words = resume.resume_command(tmp_path, description, [change])
    assert change in words
    assert not any(word.startswith(("--torus_grid", "--lr_steps")) for word in words)


def test_resume_command_omits_flags_that_a_published_schedule_does_not_use(tmp_path):
    description = run_description("--recipe=flash_a", "--dataset=digits")
    description["flags"]["lr"] = 0.1
    description["origins"]["lr"] = "flagfile"
    assert not [
        word for word in resume.resume_command(tmp_path, description, []) if word.startswith("--lr")
    ]


def test_resume_command_of_a_trial_that_ended_during_the_warmup_is_accepted(tmp_path):
    description = run_description("--flagfile=digits", "--epochs=2")
    assert description["flags"]["warmup_epochs"] > 2
    words = resume.resume_command(tmp_path, description, [])
    assert "--epochs=2" in words
    assert not any(word.startswith("--warmup_epochs") for word in words)


@pytest.mark.parametrize(
    ("ranks", "hosts", "options", "start"),
    [
        (2, ["here"], {}, ["run", "-np", "2", "--"]),
        (1, ["a", "b"], {}, ["run", "-H", "a:1,b:1", "--"]),
        (2, ["here"], {"ranks": 1}, ["train"]),
        (2, ["here"], {"ranks": 4, "hosts": "a:2,b:2"}, ["run", "-np", "4", "-H", "a:2,b:2", "--"]),
    ],
)
def test_resume_command_keeps_ranks_and_hosts_unless_they_are_set(
    tmp_path, ranks, hosts, options, start
):
    description = run_description("--dataset=digits", ranks=ranks, hosts=hosts)
    assert resume.resume_command(tmp_path, description, [], **options)[: len(start)] == start


def test_resume_command_needs_the_flag_with_a_password_again(tmp_path):
    flags = (
        "--dataset=webdataset",
        "--data_dir=https://ann:hunter2@host/set",
        "--data_cache_dir=copies",
    )
    with pytest.raises(UserError, match="because passwords are not stored"):
        resume.resume_command(tmp_path, run_description(*flags), [])
    assert flags[1] in resume.resume_command(tmp_path, run_description(*flags), [flags[1]])


def test_resume_dry_run_prints_the_command_and_the_changes(tmp_path, capsys):
    description = run_description(*FLAGS_OF_RUN, ranks=2)
    (tmp_path / "config.json").write_text(json.dumps(description))
    secret = "--data_dir=https://ann:hunter2@host/set"
    assert (
        __main__.main(["resume", str(tmp_path), "-np", "3", "--lr", "0.5", secret, "--dry_run"])
        == 0
    )
    output, error = capsys.readouterr()
    words = shlex.split(output)
    assert words[:5] == ["hybrid-imagenet", "run", "-np", "3", "--"] and "--lr=0.5" in words
    assert error.startswith("changed: --lr=0.5 instead of --lr=")
    assert "hunter2" not in output + error
    for option in (["-n", "4"], ["--num-processes", "4"], ["--num_proc=4"]):
        assert __main__.main(["resume", str(tmp_path), *option, "--dry_run", secret]) == 0
        assert " run -np 4 -- " in capsys.readouterr().out
    assert __main__.main(["resume", str(tmp_path / "none")]) == 2
    assert __main__.main(["resume", str(tmp_path), "--epoch=3"]) == 2
    assert __main__.main(["resume", str(tmp_path), "--run_dir=other"]) == 2
    assert "--epochs" in capsys.readouterr().err


@pytest.mark.slow
def test_stop_and_resume_of_a_real_run(tmp_path, capsys):
    data = program.make_data(tmp_path)
    run = tmp_path / "run"
    running = program.Running(1, data, run, "--epochs=5000", "--max_steps=100000")
    running.wait_for_step(3)
    assert __main__.main(["status", str(run)]) == 0
    assert f"{run}: running, step " in capsys.readouterr().out
    assert __main__.main(["stop", str(run)]) == 0
    assert running.finish()[0] == 75
    first, _, following = capsys.readouterr().out.splitlines()
    assert (
        first.startswith(f"{run}: stopped, step ")
        and following == f"To continue it: hybrid-imagenet resume {run}"
    )
    steps = [record for record in program.records(run) if record["kind"] == "step"]
    epochs = math.ceil(max(record["position"] for record in steps)) + 1
    words = [sys.executable, "-m", "hybrid_imagenet", "resume", str(run), f"--epochs={epochs}"]
    result = subprocess.run(
        words, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    assert f"changed: --epochs={epochs} instead of --epochs=5000" in result.stderr
    assert "val top-1" in result.stdout and f" {epochs}/{epochs} |" in result.stdout
    description = json.loads((run / "config.json").read_text())
    assert (
        description["world_size"],
        description["flags"]["epochs"],
        description["flags"]["max_steps"],
    ) == (1, epochs, None)
    assert __main__.main(["runs", str(tmp_path)]) == 0
    assert " finished " in capsys.readouterr().out
