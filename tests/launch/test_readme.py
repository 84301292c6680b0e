"""Tests that README's commands for horovodrun and Docker are those of the scripts, and work."""

import os
import re
import shlex
import sys

import pytest

from tests.launch.shell import LAUNCH, ROOT, run
from tests.launch.test_lab import LAB, namespaces


def readme_line(program):
    """Returns README's only command that begins with a program."""
    lines = re.findall(rf"^{program} .*$", (ROOT / "README.md").read_text(), re.M)
    assert len(lines) == 1, lines
    return lines[0]


def printed_words(*command, **variables):
    """Returns the words of the last command that a script's dry run prints."""
    result = run(*command, **variables)
    assert result.returncode == 0, result.stderr
    return shlex.split(result.stdout.splitlines()[-1])


def test_readme_horovodrun_line_is_the_command_of_the_cluster_script():
    hosts = ("node1", "node2", "node3")
    expected = printed_words(
        LAUNCH / "cluster1.sh", "--dry-run", *hosts, "--data_dir=/data/imagenet"
    )
    line = readme_line("horovodrun").replace("$VIRTUAL_ENV", sys.prefix)
    words = shlex.split(line.replace("=flags/", f"={ROOT}/flags/"))
    words[words.index("python")] = f"{sys.prefix}/bin/python"
    assert words == expected


def test_readme_docker_line_is_the_command_of_the_docker_script(tmp_path):
    line = readme_line("docker run")
    start = line.index("hybrid-imagenet run")
    expected = printed_words(
        LAUNCH / "docker.sh",
        "--gpu",
        f"--data={tmp_path}",
        "--dry-run",
        *shlex.split(line[start:]),
        INFINIBAND=str(tmp_path / "none"),
    )
    values = {
        "$(id -u):$(id -g)": f"{os.getuid()}:{os.getgid()}",
        "$PWD": str(ROOT),
        "/data/imagenet:": f"{tmp_path}:",
    }
    for text, value in values.items():
        assert text in line
        line = line.replace(text, value)
    assert shlex.split(line) == expected


@pytest.mark.slow
@namespaces
def test_readme_horovodrun_line_on_three_lab_hosts_trains(tmp_path):
    line = readme_line("horovodrun")
    for text, value in {
        "-np 24": "-np 3",
        "node1:8,node2:8,node3:8": "$HOSTS",
        "flags/cluster1.flags": "flags/digits.flags",
        "--data_dir=/data/imagenet": "--model=resnet8 --max_steps=2 --run_dir=$RUN_DIR",
    }.items():
        assert text in line
        line = line.replace(text, value)
    result = run(
        *(LAB, "--hosts=3", "--slots=1", "--", "bash", "-c"),
        f". {LAUNCH}/env.sh && {line}",
        timeout=300,
        TMPDIR=str(tmp_path),
        RUN_DIR=str(tmp_path / "run"),
        PYTHONPATH=str(ROOT),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resnet8 on digits, 3 ranks" in result.stdout
    assert list((tmp_path / "run" / "checkpoints").glob("step-*2.npz"))
