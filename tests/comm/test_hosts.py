"""The hosts of ranks and their addresses, before Horovod starts."""

import ipaddress
import subprocess
import sys

import pytest

from hybrid_imagenet.comm import hosts
from hybrid_imagenet.errors import UserError
from tests.ranks import MPIRUN, ROOT, environment


def test_names_are_unique():
    assert hosts.unique_host_names([("a", "1"), ("b", "2"), ("a", "1")]) == ("a", "b", "a")
    assert hosts.unique_host_names([["a", "1"], ["a", "2"], ["b", "3"], ["a", "1"]]) == (
        "a#0",
        "a#1",
        "b",
        "a#0",
    )


def test_gather_by_mpi_without_mpi4py_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"mpi4py, which is missing\. .* pip install 'mpi4py>=4'"):
        hosts.gather_by_mpi(["a"], 1)


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("", "eth0 eth1 docker0 ib0"),
        ("eth1", "eth1"),
        ("eth", "eth0 eth1"),
        ("=eth", ""),
        ("=eth1,ib0", "eth1 ib0"),
        ("^docker,eth", "ib0"),
        ("^=eth,eth1", "eth0 docker0 ib0"),
        ("eth7", ""),
    ],
)
def test_interfaces_are_chosen_as_nccl_chooses_them(asked, names, monkeypatch):
    found = {"eth0": "10.0.0.1", "eth1": "10.1.0.1", "docker0": "172.17.0.1", "ib0": "10.2.0.1"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", asked)
    assert hosts.select_interfaces(found) == {name: found[name] for name in names.split()}


def test_reachable_addresses_are_those_that_only_one_host_has():
    near, far = ["near", "1"], ["far", "2"]
    bridge = "172.17.0.1"
    each = [[bridge, "10.0.0.1"], [bridge, "10.0.0.1"], ["10.0.0.2", bridge]]
    assert hosts.reachable_addresses(each, [near, near, far]) == [
        "10.0.0.1",
        "10.0.0.1",
        "10.0.0.2",
    ]
    with pytest.raises(UserError, match="host far has no unique IPv4 address"):
        hosts.reachable_addresses([*each[:2], [bridge]], [near, near, far])


def test_this_hosts_interfaces_have_addresses():
    assert all(
        ipaddress.IPv4Address(address).is_loopback is False
        for address in hosts.interfaces().values()
    )


WAITS = """
import os, threading, time
from hybrid_imagenet.comm import hosts

def tick():
    while True:
        ticks.append(time.monotonic())
        time.sleep(0.05)

ticks = []
threading.Thread(target=tick, daemon=True).start()
time.sleep(6 * int(os.environ["OMPI_COMM_WORLD_RANK"]))
assert hosts.gather_by_mpi([os.environ["OMPI_COMM_WORLD_RANK"]], 2) == [["0"], ["1"]]
print(max(after - before for before, after in zip(ticks, ticks[1:])) < 4)
"""


def test_threads_run_while_a_rank_waits_for_another():
    command = [
        str(MPIRUN),
        "--oversubscribe",
        "--bind-to",
        "none",
        "-np",
        "2",
        sys.executable,
        "-c",
        WAITS,
    ]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.stdout.count("True") == 2, done.stderr  # two ranks may write into one line
