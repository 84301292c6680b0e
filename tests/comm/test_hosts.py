"""Hosts of the ranks, as they are found before Horovod starts. The ranks of the store are threads here."""

import ipaddress
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from horovod.runner.http.http_server import RendezvousServer

from hybrid_imagenet.comm import hosts
from hybrid_imagenet.comm.environment import Placement
from hybrid_imagenet.errors import UserError


@pytest.fixture
def store():
    server = RendezvousServer()
    port = server.start()
    server.init([])
    yield f"127.0.0.1:{port}"
    server.stop()


@pytest.fixture
def launcher(monkeypatch):
    """Sets the variables of a launcher, and no others."""

    def call(**variables):
        for name in ("OMPI_COMM_WORLD_RANK", *hosts._STORE):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return call


def test_names_are_unique():
    assert hosts.names([("a", "1"), ("b", "2"), ("a", "1")]) == ("a", "b", "a")
    assert hosts.names([["a", "1"], ["a", "2"], ["b", "3"], ["a", "1"]]) == ("a#0", "a#1", "b", "a#0")


def test_a_process_has_one_key():
    assert hosts.key() == hosts.key()
    assert all(isinstance(part, str) for part in hosts.key())


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("", "eth0 eth1 docker0 ib0"),
        ("eth1", "eth1"),
        ("eth", "eth0 eth1"),
        ("=eth", ""),
        ("=eth1,ib0", "eth1 ib0"),
        ("^docker,eth", "ib0"),
        ("eth7", ""),
    ],
)
def test_interfaces_are_chosen_as_nccl_chooses_them(asked, names, monkeypatch):
    found = {"eth0": "10.0.0.1", "eth1": "10.1.0.1", "docker0": "172.17.0.1", "ib0": "10.2.0.1"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", asked)
    assert hosts.asked_for(found) == {name: found[name] for name in names.split()}


def test_ranks_meet_at_addresses_that_no_two_hosts_have():
    near, far = ["near", "1"], ["far", "2"]
    bridge = "172.17.0.1"
    each = [[bridge, "10.0.0.1"], [bridge, "10.0.0.1"], ["10.0.0.2", bridge]]
    assert hosts.meeting_places(each, [near, near, far]) == ["10.0.0.1", "10.0.0.1", "10.0.0.2"]
    with pytest.raises(UserError, match="host far has no IPv4 address of its own"):
        hosts.meeting_places([*each[:2], [bridge]], [near, near, far])


def test_this_hosts_interfaces_have_addresses():
    assert all(ipaddress.IPv4Address(address).is_loopback is False for address in hosts.interfaces().values())


def test_every_rank_finds_all_keys_in_the_store(store):
    keys = [["near", "1"], ["far", "2"], ["far", "2"]]

    def rank(number):
        time.sleep(0.1 * (number == 0))  # the others have to wait
        return hosts.through_store(store, Placement(number, 3), keys[number], "one")

    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(rank, range(3))) == [keys] * 3


def test_ranks_that_gather_again_do_not_find_what_they_put_before(store):
    def rank(number):
        time.sleep(0.1 * (number == 1))  # rank 0 looks for what rank 1 has put into the store, twice
        first = hosts.through_store(store, Placement(number, 2), ["first", str(number)], "one")
        time.sleep(0.1 * (number == 1))
        return first, hosts.through_store(store, Placement(number, 2), ["second", str(number)], "another")

    expected = tuple([[word, "0"], [word, "1"]] for word in ("first", "second"))
    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(rank, range(2))) == [expected] * 2


def test_the_launcher_names_the_store(store, launcher):
    address, port = store.split(":")
    launcher(HOROVOD_GLOO_RENDEZVOUS_ADDR=address, HOROVOD_GLOO_RENDEZVOUS_PORT=port)
    assert hosts.gather(Placement(0, 1), ["here", ""], "one") == [["here", ""]]


def test_a_rank_that_does_not_come_is_named(store):
    with pytest.raises(UserError, match=f"rank 1 did not reach the launcher at {store} within 0.1 s"):
        hosts.through_store(store, Placement(0, 2), ["here", ""], "one", timeout=0.1)


def test_a_store_that_does_not_answer_ends_with_one_line(store):
    closed = "127.0.0.1:9"
    with pytest.raises(UserError, match=f"did not reach the launcher at {closed}"):
        hosts.through_store(closed, Placement(0, 2), ["here", ""], "one", timeout=0.1)


def test_where_there_is_no_way(launcher, monkeypatch):
    launcher()
    assert hosts.gather(Placement(0, 2), ["here", ""], "one") is None
    launcher(OMPI_COMM_WORLD_RANK="0")
    monkeypatch.setattr(hosts.importlib.util, "find_spec", lambda name: None)
    assert hosts.gather(Placement(0, 2), ["here", ""], "one") is None
