"""Tests the names and addresses of hosts, which ranks exchange before Horovod starts."""

import ipaddress
import subprocess
import sys

import pytest

from hybrid_imagenet.cluster import hosts
from hybrid_imagenet.errors import UserError
from tests.ranks import MPIRUN, ROOT, environment


def test_unique_host_names_numbers_hosts_with_the_same_name():
    assert hosts.unique_host_names([("a", "1"), ("b", "2"), ("a", "1")]) == ("a", "b", "a")
    assert hosts.unique_host_names([["a", "1"], ["a", "2"], ["b", "3"], ["a", "1"]]) == (
        "a#0",
        "a#1",
        "b",
        "a#0",
    )


def test_gather_by_mpi_without_mpi4py_raises_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(UserError, match=r"mpi4py, which is missing\. .* pip install 'mpi4py>=4'"):
        hosts.gather_by_mpi(["a"], 1)


@pytest.mark.parametrize(
    ("value", "names"),
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
def test_select_interfaces_follows_the_rules_of_nccl(value, names, monkeypatch):
    addresses = {"eth0": "10.0.0.1", "eth1": "10.1.0.1", "docker0": "172.17.0.1", "ib0": "10.2.0.1"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", value)
    expected = {name: addresses[name] for name in names.split()}
    assert hosts.select_interfaces(addresses) == expected


def test_reachable_addresses_are_those_that_only_one_host_has():
    near = ["near", "1"]
    far = ["far", "2"]
    bridge = "172.17.0.1"
    addresses = [[bridge, "10.0.0.1"], [bridge, "10.0.0.1"], ["10.0.0.2", bridge]]
    assert hosts.reachable_addresses(addresses, [near, near, far]) == [
        "10.0.0.1",
        "10.0.0.1",
        "10.0.0.2",
    ]
    with pytest.raises(UserError, match="host far has no unique IPv4 address"):
        hosts.reachable_addresses([*addresses[:2], [bridge]], [near, near, far])


def test_interfaces_of_this_host_have_addresses_other_than_loopback():
    assert all(
        ipaddress.IPv4Address(address).is_loopback is False
        for address in hosts.interfaces().values()
    )


WAITS = """
import os, threading, time
from hybrid_imagenet.cluster import hosts

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


def test_gather_by_mpi_that_waits_lets_other_threads_run():
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
    result = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    # Lines are not compared, because two ranks may write into one line.
    assert result.stdout.count("True") == 2, result.stderr
