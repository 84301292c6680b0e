"""Tests the checks whether this host has what Open MPI needs."""

import os
import resource
import types

import pytest

from hybrid_imagenet.cluster import hosts
from hybrid_imagenet.commands import host_limits, run
from hybrid_imagenet.errors import UserError


def test_check_passes_on_this_host():
    host_limits.check()
    host_limits.check("lo")
    host_limits.check("lo:1")


@pytest.mark.parametrize("limit", [0, 4 << 20])
def test_check_rejects_a_limit_of_file_sizes(limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match=f"limits files to {limit >> 10} KiB.*ulimit -f unlimited"):
        host_limits.check()


def test_check_rejects_a_host_without_a_network(monkeypatch):
    monkeypatch.setattr(hosts, "all_interfaces", dict)
    with pytest.raises(UserError, match=r"not even loopback.*ip link set lo up"):
        host_limits.check()


def test_check_rejects_an_interface_that_does_not_exist():
    with pytest.raises(
        UserError, match=r"--network_interfaces=eth99 does not exist.*Choose one of .*lo"
    ):
        host_limits.check("eth99")


def test_check_rejects_a_temporary_directory_that_cannot_be_written(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc/none")
    with pytest.raises(UserError, match=r"TMPDIR=/proc/none cannot be written \(.*Set TMPDIR"):
        host_limits.check()


@pytest.mark.parametrize(("ranks", "is_enough"), [(8, True), (9, False)])
def test_has_shared_memory_needs_8_mib_for_each_rank(ranks, is_enough, monkeypatch):
    # The default of Docker.
    status = types.SimpleNamespace(f_bavail=64 << 8, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: status)
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    assert host_limits.has_shared_memory(ranks) == is_enough


def test_has_shared_memory_without_dev_shm_is_false(monkeypatch):
    def statvfs(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "statvfs", statvfs)
    assert not host_limits.has_shared_memory(1)


def test_run_on_a_host_where_mpi_cannot_start_prints_one_line_and_starts_nothing(
    monkeypatch, capfd, tmp_path
):
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(run, "_run_job", lambda *_: pytest.fail("ranks were started"))
    assert run.main(["-np", "2", "--network_interfaces=eth99", str(tmp_path / "mine.py")]) == 2
    assert capfd.readouterr().err.count("\n") == 1
