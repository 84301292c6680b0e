"""Files are written whole or not at all; what can be made again is, whatever its damage."""

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


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    target, order = tmp_path / "config.json", []
    target.write_text("old")
    sync, replace = os.fsync, pathlib.Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: order.append("sync") or sync(descriptor))
    monkeypatch.setattr(
        pathlib.Path, "replace", lambda *paths: order.append("replace") or replace(*paths)
    )
    with files.atomic_replace(target) as temporary:
        temporary.write_text("new")
        assert target.read_text() == "old"
    assert order == ["sync", "replace", "sync"]  # the last one of the directory
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    assert target.read_text() == "new"


def test_an_error_leaves_what_was_there(tmp_path):
    target = tmp_path / "config.json"
    target.write_text("old")
    with pytest.raises(OSError, match="full"), files.atomic_replace(target) as temporary:
        temporary.write_text("ne")
        raise OSError("full")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_several_may_write_one_file_at_once(tmp_path):
    target, together = tmp_path / "index", threading.Barrier(4)

    def write(number):
        with files.atomic_replace(target) as temporary:
            temporary.write_text(str(number) * 1000)
            together.wait()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert target.read_text() in {str(number) * 1000 for number in range(4)}
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100000])
def test_a_file_that_cannot_be_made_again_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"config.json: .*restore it"):
        files.read_json(path)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_decoded_text_with_a_byte_order_mark_has_the_encoding_of_the_mark(encoding):
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
            "is not text, because it holds zero bytes.*; save it as UTF-8",
        ),
        (codecs.BOM_UTF16_LE + b"c", r"is not text in UTF-16 \(offset 2: truncated data\)"),
    ],
)
def test_decoded_text_of_other_bytes_raises_an_error_with_the_remedy(content, reason):
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
    """Takes the shared lock of a look and gives it back after a while, on a thread."""
    (directory / "lock").touch()
    look = (directory / "lock").open("rb")
    fcntl.flock(look, fcntl.LOCK_SH)
    timer = threading.Timer(seconds, look.close)
    timer.start()
    return timer


def test_lock_while_a_look_holds_it_waits_until_the_look_is_over(tmp_path):
    look = hold_shared(tmp_path, 0.1)
    files.lock(tmp_path).close()
    look.join()


def test_lock_that_is_only_looked_at_for_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOOKS_PASS_SECONDS", 0.05)
    look = hold_shared(tmp_path, 1.0)
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path)
    look.cancel()


def test_lock_of_an_owner_is_refused_without_a_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LOOKS_PASS_SECONDS", 1000.0)
    with files.lock(tmp_path), pytest.raises(BlockingIOError):
        files.lock(tmp_path)


LOOKS = """
import pathlib, sys
from hybrid_imagenet import files
directory = pathlib.Path(sys.argv[1])
files.lock(directory).close()
print("looks", flush=True)
while not (directory / "over").exists():
    for _ in range(100):
        files.lock_holder(directory)
"""


def test_lock_under_a_tight_loop_of_looks_is_always_taken(tmp_path):
    process = python("-c", LOOKS, tmp_path)
    try:
        assert process.stdout.readline() == "looks\n"
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
    """Lets flock fail as on a file system that has no locks."""

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)


@pytest.mark.parametrize("number", LOCKS_NOT_SUPPORTED)
def test_lock_without_file_system_locks_warns_and_is_taken(tmp_path, monkeypatch, capfd, number):
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
held = files.lock(pathlib.Path(sys.argv[1]))
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
    with files.cache_lock(tmp_path):  # an index that cannot be locked is made all the same
        pass
