"""Tests scripts that list a job's hosts, also ones that hang, fail, or print invalid names."""

import time

import pytest

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience.discovery import Discovery, list_by_script, parse_host
from tests.support.processes import wait_for


@pytest.fixture
def discovery(tmp_path):
    """Yields a function that makes a Discovery with the script `text`.

    The function also returns one that replaces the script.
    """
    path = tmp_path / "hosts.sh"
    discoveries = []

    def change(text):
        new = path.with_suffix(".new")
        new.write_text(f"#!/bin/sh\n{text}\n")
        new.chmod(0o755)
        new.replace(path)

    def make(text, **options):
        change(text)
        listed = list_by_script(str(path), options.pop("limit", 2.0))
        discoveries.append(
            Discovery(listed, check_seconds=0.05, **{"answers": lambda host: True} | options)
        )
        return discoveries[-1], change

    yield make
    for created in discoveries:
        created.stop()


def test_parse_host_reads_name_and_slots_and_rejects_everything_else():
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


def test_discovery_follows_the_script(discovery):
    hosts, _ = discovery("echo a; echo b", answers=lambda host: host == "a", check_first=True)
    assert hosts.hosts() == {"a": 1}
    hosts, change = discovery("echo a; echo b:3; echo")
    assert hosts.hosts() == {"a": 1, "b": 3}
    change("echo d")
    wait_for(lambda: hosts.hosts() == {"d": 1})
    change("true")
    time.sleep(0.3)
    # A script that prints nothing changes nothing.
    assert hosts.hosts() == {"d": 1}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sleep 60", "gave no answer within 0.5 s"),
        ("echo z; exit 3", "ended with code 3"),
        ("head -c 1100000 /dev/zero", "printed more than"),
        ("setsid sleep 60 & sleep 60", "gave no answer within 0.5 s"),
        ("echo b; echo 'c;touch /tmp/x'", "'c;touch /tmp/x' is not HOST"),
    ],
)
def test_discovery_keeps_its_hosts_without_delay_when_the_script_fails_later(
    discovery, text, reason, capfd
):
    hosts, change = discovery("echo a", limit=0.5)
    change(text)
    errors = ""

    def is_printed():
        nonlocal errors
        errors += capfd.readouterr().err
        return reason in errors

    wait_for(is_printed)
    began = time.monotonic()
    assert hosts.hosts() == {"a": 1}
    assert time.monotonic() - began < 0.2
    assert "The earlier hosts are kept." in errors


def test_discovery_prints_several_errors_in_a_row_once(discovery, tmp_path, capfd):
    _, change = discovery("echo a")
    change('echo "\'$(date +%N)"; echo >>$0.runs')
    runs = tmp_path / "hosts.sh.runs"
    wait_for(lambda: runs.exists() and runs.stat().st_size >= 3)
    assert capfd.readouterr().err.count("The earlier hosts are kept.") == 1


@pytest.mark.parametrize("text", ["exit 1", "sleep 60", "echo '$(x)'"])
def test_discovery_raises_if_the_first_run_of_the_script_fails(discovery, text):
    with pytest.raises(
        UserError, match=r"--host_discovery_script=.*hosts\.sh (ended|gave|printed)"
    ):
        discovery(text, limit=0.3)


def test_discovery_raises_if_the_script_cannot_be_run():
    with pytest.raises(UserError, match="--host_discovery_script=/nowhere/at/all cannot be run"):
        Discovery(list_by_script("/nowhere/at/all"), answers=lambda host: True)
    with pytest.raises(UserError, match="No closing quotation"):
        list_by_script("./hosts.sh 'a")


@pytest.mark.parametrize("hangs", [False, True])
def test_discovery_omits_a_host_until_it_answers_even_while_the_script_hangs(
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
    assert (
        capfd.readouterr().err
        == "host discovery: b does not answer. The job continues without it.\n"
    )
