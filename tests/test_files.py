"""Tests of `hybrid_imagenet.files`."""

import codecs
import errno
import fcntl
import os
import pathlib
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hybrid_imagenet import files
from hybrid_imagenet.errors import UserError
from tests.support.processes import python
from tests.support.promptly import promptly


def test_atomic_replace_syncs_the_file_before_it_is_renamed(tmp_path, monkeypatch):
    target = tmp_path / "config.json"
    order = []
    target.write_text("old")
    sync = os.fsync
    replace = pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("sync") or sync(descriptor))
    monkeypatch.setattr(
        pathlib.Path, "replace", lambda *paths: order.append("replace") or replace(*paths)
    )
    with files.atomic_replace(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    # The second sync is for the directory.
    assert order == ["sync", "replace", "sync"]
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert target.read_text() == "new"


def test_atomic_replace_after_an_error_keeps_the_old_content(tmp_path):
    target = tmp_path / "config.json"
    target.write_text("old")
    with pytest.raises(OSError, match="full"), files.atomic_replace(target) as temporary:
        temporary.write_text("ne")
        raise OSError("full")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_atomic_replace_by_several_threads_leaves_one_complete_file(tmp_path):
    target = tmp_path / "index"
    barrier = threading.Barrier(4)

    def write(number):
        with files.atomic_replace(target) as temporary:
            temporary.write_text(str(number) * 1000)
            barrier.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert target.read_text() in {str(number) * 1000 for number in range(4)}
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100000])
def test_read_json_of_a_damaged_file_raises_an_error_with_the_remedy(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config.json .*Restore it"):
        files.read_json(path)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_decode_text_with_a_byte_order_mark_has_the_encoding_of_the_mark(encoding):
    marks = {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}
    content = marks.get(encoding, b"") + "cat\r\nM\u00f6we\r\n".encode(encoding)
    assert files.decode_text(content) == "cat\r\nM\u00f6we\r\n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (
            "cat\nM\u00f6we\n".encode("latin-1"),
            r"is not text in UTF-8 \(offset 5: .*\); save it as UTF-8",
        ),
        (
            "cat\ndog\n".encode("utf-16-le"),
            "is not text, because it contains zero bytes.*; save it as UTF-8",
        ),
        (codecs.BOM_UTF16_LE + b"c", r"is not text in UTF-16 \(offset 2: truncated data\)"),
    ],
)
def test_decode_text_of_other_bytes_raises_an_error_with_the_remedy(content, reason):
    with pytest.raises(ValueError, match=reason):
        files.decode_text(content)


def test_read_regular_rejects_pipes_devices_sockets_directories_and_large_files(tmp_path):
    (tmp_path / "file").write_bytes(b"abc")
    assert files.read_regular(tmp_path / "file", 3) == b"abc"
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
    (tmp_path / "directory").mkdir()
    (tmp_path / "link").symlink_to("pipe")
    os.truncate(tmp_path / "file", 5)
    reasons = {
        "/dev/zero": "is not a regular file",
        tmp_path / "pipe": "is not a regular file",
        tmp_path / "link": "is not a regular file",
        tmp_path / "socket": "No such device or address",
        tmp_path / "directory": "Is a directory",
        tmp_path / "file": "has 5 bytes, and at most 4 are read",
    }
    descriptors = len(list(pathlib.Path("/proc/self/fd").iterdir()))
    for path, reason in reasons.items():
        with pytest.raises(OSError, match=reason):
            files.read_regular(path, 4)
    assert len(list(pathlib.Path("/proc/self/fd").iterdir())) == descriptors


def hold_shared(directory, seconds):
    """Takes the shared lock as a probe does, and releases it later on a thread."""
    (directory / "lock").touch()
    probe = (directory / "lock").open("rb")
    fcntl.flock(probe, fcntl.LOCK_SH)
    timer = threading.Timer(seconds, probe.close)
    timer.start()
    return timer


def test_lock_during_a_probe_waits_until_the_probe_is_over(tmp_path):
    probe = hold_shared(tmp_path, 0.1)
    files.lock(tmp_path).close()
    probe.join()


def test_lock_during_a_probe_that_takes_too_long_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_PROBE_SECONDS", 0.05)
    probe = hold_shared(tmp_path, 1.0)
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path)
    probe.cancel()


def test_lock_that_is_held_raises_without_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_MAX_PROBE_SECONDS", 1000.0)
    with files.lock(tmp_path), pytest.raises(BlockingIOError):
        files.lock(tmp_path)


PROBES = """
import pathlib, sys
from hybrid_imagenet import files
directory = pathlib.Path(sys.argv[1])
files.lock(directory).close()
print("probing", flush=True)
while not (directory / "over").exists():
    for _ in range(100):
        files.lock_holder(directory)
"""


def test_lock_during_a_tight_loop_of_probes_succeeds(tmp_path):
    process = python("-c", PROBES, tmp_path)
    try:
        assert process.stdout.readline() == "probing\n"
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            files.lock(tmp_path).close()
    finally:
        (tmp_path / "over").touch()
        assert process.wait(20) == 0


def test_lock_holder_of_a_fifo_returns_at_once(tmp_path):
    os.mkfifo(tmp_path / "lock")
    assert promptly(lambda: files.lock_holder(tmp_path)) is None


LOCKS_NOT_SUPPORTED = [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK]


def without_locks(monkeypatch, number=errno.ENOSYS):
    """Makes flock fail as on a file system that has no locks."""

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", LOCKS_NOT_SUPPORTED)
def test_lock_without_file_system_locks_warns_and_succeeds(tmp_path, monkeypatch, capfd, number):
    without_locks(monkeypatch, number)
    files.lock(tmp_path).close()
    assert files.lock_holder(tmp_path) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(
        f"warning: the file system of {tmp_path} has no file locks ({os.strerror(number)})"
    )


HOLDER = """
import errno, fcntl, os, pathlib, sys
def flock(descriptor, operation):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
fcntl.flock = flock
from hybrid_imagenet import files
lock = files.lock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_lock_without_file_system_locks_keeps_processes_of_one_host_apart(tmp_path, monkeypatch):
    without_locks(monkeypatch)
    process = python("-c", HOLDER, tmp_path, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "held\n"
    assert files.lock_holder(tmp_path) == f"{socket.gethostname()} {process.pid}"
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path)
    process.communicate("")
    assert files.lock_holder(tmp_path) is None
    files.lock(tmp_path).close()


def test_flock_that_fails_for_another_reason_raises(tmp_path, monkeypatch):
    without_locks(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        files.lock(tmp_path)
    # An index is created even if the cache cannot be locked.
    with files.cache_lock(tmp_path):
        pass
