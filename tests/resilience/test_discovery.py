"""Scripts that name a job's hosts: those that hang, fail, or print what is no name."""

import time

import pytest

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience.discovery import Discovery, list_by_script, parse_host
from tests.support.processes import wait_for


@pytest.fixture
def discovery(tmp_path):
    """Makes a Discovery of the script `text`, which `change` replaces."""
    path, made = tmp_path / "hosts.sh", []

    def change(text):
        new = path.with_suffix(".new")
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.replace(path)

    def make(text, **options):
        change(text)
        listed = list_by_script(str(path), options.pop("limit", 2.0))
        made.append(
            Discovery(listed, check_seconds=0.05, **{"answers": lambda host: True} | options)
        )
        return made[-1], change

    yield make
    for one in made:
        one.stop()


def test_names_and_slots_are_read_and_what_is_no_name_never_reaches_a_shell():
    assert [parse_host(word, 2) for word in ("a", "node-1.x:8", "10.0.0.7")] == [
        ("a", 2),
        ("node-1.x", 8),
        ("10.0.0.7", 2),
    ]
    for word in (
        "",
        "a;touch x",
        "$(x)",
        "a b",
        "-oProxyCommand=x",
        "a:0",
        "a:-1",
        "a:1:2",
        "7",
        "../a",
        "a\x1b[2J",
    ):
        with pytest.raises(ValueError, match="is not HOST"):
            parse_host(word, 2)


def test_hosts_follow_the_script(discovery):
    hosts, _ = discovery("echo a; echo b", answers=lambda host: host == "a", check_first=True)
    assert hosts.hosts() == {"a": 1}
    hosts, change = discovery("echo a; echo b:3; echo")
    assert hosts.hosts() == {"a": 1, "b": 3}
    change("echo d")
    wait_for(lambda: hosts.hosts() == {"d": 1})
    change("true")
    time.sleep(0.3)
    assert hosts.hosts() == {"d": 1}  # a script that prints nothing ends no job


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("sleep 60", "gave no answer within 0.5 s"),
        ("echo z; exit 3", "ended with code 3"),
        ("head -c 1100000 /dev/zero", "printed more than"),
        ("setsid sleep 60 & sleep 60", "gave no answer within 0.5 s"),
        ("echo b; echo 'c;touch /tmp/x'", "'c;touch /tmp/x' is not HOST"),
    ],
)
def test_a_script_that_fails_later_leaves_the_hosts_as_they_are_and_makes_nobody_wait(
    discovery, text, why, capfd
):
    hosts, change = discovery("echo a", limit=0.5)
    change(text)
    told = ""

    def said():
        nonlocal told
        told += capfd.readouterr().err
        return why in told

    wait_for(said)
    began = time.monotonic()
    assert hosts.hosts() == {"a": 1}
    assert time.monotonic() - began < 0.2
    assert "host discovery keeps the hosts known so far: " in told


def test_rubbish_that_is_another_each_time_is_told_once(discovery, tmp_path, capfd):
    _, change = discovery("echo a")
    change('echo "\'$(date +%N)"; echo >>$0.runs')
    runs = tmp_path / "hosts.sh.runs"
    wait_for(lambda: runs.exists() and runs.stat().st_size >= 3)
    assert capfd.readouterr().err.count("keeps the hosts known so far") == 1


@pytest.mark.parametrize("text", ["exit 1", "sleep 60", "echo '$(x)'"])
def test_a_script_that_fails_at_once_is_a_mistake(discovery, text):
    with pytest.raises(UserError, match="--host_discovery_script: "):
        discovery(text, limit=0.3)


def test_words_that_are_no_command_are_a_mistake():
    with pytest.raises(UserError, match="cannot be run"):
        Discovery(list_by_script("/nowhere/at/all"), answers=lambda host: True)
    with pytest.raises(UserError, match="No closing quotation"):
        list_by_script("./hosts.sh 'a")


@pytest.mark.parametrize("hangs", [False, True])
def test_a_host_that_does_not_answer_is_left_out_until_it_does_also_while_the_script_hangs(
    discovery, hangs, capfd
):
    down = set()
    hosts, change = discovery("echo a; echo b", limit=60.0, answers=lambda host: host not in down)
    assert hosts.hosts() == {"a": 1, "b": 1}
    if hangs:
        change("sleep 20")
        time.sleep(0.2)
    down.add("b")
    wait_for(lambda: hosts.hosts() == {"a": 1})
    down.clear()
    wait_for(lambda: hosts.hosts() == {"a": 1, "b": 1})
    assert capfd.readouterr().err == "host discovery omits b: it does not answer\n"
