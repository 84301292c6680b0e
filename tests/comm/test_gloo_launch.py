"""What is run on a host of a job with Gloo."""

import subprocess

import pytest

from hybrid_imagenet.comm.gloo_launch import Plan, Ranks


@pytest.mark.parametrize(("command", "code"), [("sh -c 'kill -KILL $$'", 137), ("sh -c 'exit 75'", 75), ("true", 0)])
def test_a_rank_that_is_killed_on_another_host_is_told_from_a_host_that_is_lost(command, code):
    words = Ranks(Plan(1, ssh_options=("-o", "X=y")))._command(command, "10.99.99.99")
    assert words[0] == "ssh"
    assert words[-2] == "10.99.99.99"
    assert subprocess.run(["sh", "-c", words[-1]]).returncode == code  # ssh has 255 for a negative one
    here = Ranks(Plan(1))._command(command, "localhost")
    assert subprocess.run(here).returncode == (-9 if code == 137 else code)


def test_its_standard_input_is_the_ranks():
    words = Ranks(Plan(1, orders="ORDERS"))._command("sh -c 'cat; echo $ORDERS'", "10.99.99.99")
    done = subprocess.run(["sh", "-c", words[-1]], input="end\n", capture_output=True, text=True)
    assert done.stdout == "end\nstdin\n"


def test_variables_do_not_stand_in_the_command_line_of_the_shell_that_waits():
    words = Ranks(Plan(1))._command(
        "env A='b c' KEY=secret sh -c 'echo $A $KEY; cat /proc/$PPID/cmdline'", "10.99.99.99"
    )
    done = subprocess.run(["sh", "-c", words[-1]], capture_output=True, text=True)
    assert done.stdout.startswith("b c secret\n/bin/sh")
    assert done.stdout.count("secret") == 1
