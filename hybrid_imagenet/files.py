"""Writes files whole or not at all, reads what can be made again, and locks directories. Open to
every package.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import secrets
import socket
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar

from hybrid_imagenet.errors import UserError

T = TypeVar("T")
MAX_TEXT_BYTES = 256 << 20
"""Bytes of the largest list or description that is read: a line of 256 bytes for each of a million
classes.
"""
# Those of UTF-32 come first: the one for little-endian begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
# By the first bytes: the name, and the command that decompresses.
_COMPRESSIONS = {
    b"\x1f\x8b": ("GZIP", "gzip -dc"),
    b"BZh": ("BZIP2", "bzip2 -dc"),
    b"\xfd7zXZ\0": ("XZ", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstd -dc"),
}
_LOCKS = 64  # files may share one, and then wait for each other
# The description of a run is some kilobytes long. A larger file is another one, whose reading could
# fill the memory.
MAX_JSON_BYTES = 16 << 20
# Values of a run are nested four levels deep at most. Functions that walk through deeper ones could
# overflow the stack.
MAX_JSON_DEPTH = 16
# What flock() fails with on a file system that has no locks: some Lustre, FUSE and NFS mounts.
_LOCKS_NOT_SUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
# A process that looks at a lock holds it for well under a millisecond, so this outlasts any number
# of looks.
_LOOKS_PASS_SECONDS = 5.0
_RETRY_SECONDS = 0.002
_MAX_HOLDER_BYTES = 300
_random = random.Random()  # not the global generator, which the user's program may have seeded


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Returns a path with the home directory in place of a leading `~`, which shells leave behind
    `=`.
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 - pathlib raises RuntimeError for a user that is not there


def is_url(location: str) -> bool:
    """Returns whether a location is a URL, such as https://host/path, not a path of this host."""
    return "://" in location


def output_path(flag: str, path: str | os.PathLike[str]) -> Path:
    """Returns where a command writes, as its flag tells, with the home directory in place of `~`.

    Raises:
      UserError: for a URL.
    """
    if is_url(str(path)):
        raise UserError(f"{flag}={path}: give a local path; for a bucket, one where it is mounted")
    return expand_home(path)


@contextlib.contextmanager
def atomic_replace(target: Path) -> Iterator[Path]:
    """Yields a path beside `target`; what is written there takes the place of `target` at the end.

    `target` holds either all of the new content or what it held before, also after a power cut: the
    bytes are on the disk before the file gets its name, and the name is when this returns. Several
    processes may write one target at the same time; the last one stays. After an error the new file
    is removed.

    Raises:
      OSError: if the disk is full or not writable.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Returns when the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocksNotSupportedError(OSError):
    """The file system has no locks."""


def flock(descriptor: int, operation: int) -> None:
    """Applies `fcntl.flock` to an open file.

    Raises:
      BlockingIOError: if another process holds the lock and `operation` says not to wait.
      LocksNotSupportedError: if the file system has no locks.
      OSError: for other failures.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _LOCKS_NOT_SUPPORTED:
            raise LocksNotSupportedError(error.errno, error.strerror) from None
        raise


def open_lock(directory: Path, flags: int = 0) -> IO[bytes]:
    """Opens the file `lock` of a directory for writing, without locking it; `flags` are added to
    those of `os.open`.

    Raises:
      OSError: if the file cannot be opened.
    """
    # Do not wait for the reader of a FIFO, and do not write to the target of a symbolic link.
    safe = os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(directory / "lock", os.O_RDWR | safe | flags, 0o666)
    return os.fdopen(descriptor, "rb+", buffering=0)


def lock(directory: Path, flags: int = os.O_CREAT) -> IO[bytes]:
    """Locks a directory by its file `lock`, which it returns; the lock lasts until that file is
    closed.

    A look at the lock (`lock_holder`) does not count as a holder. On a file system without locks, a
    warning is printed, and only a process on this host that has written its number into `lock` and
    still has it open keeps others out.

    Args:
      directory: must exist.
      flags: added to those of `os.open`; by default the file is created if it is missing.

    Raises:
      BlockingIOError: if another process holds the lock.
      OSError: if the file cannot be opened.
    """
    file = open_lock(directory, flags)
    try:
        _lock_exclusively(file.fileno())
    except LocksNotSupportedError as error:
        try:
            _claim_without_locks(file, directory)
        except BaseException:
            file.close()
            raise
        print(
            f"warning: the file system of {directory} has no file locks ({error.strerror}), so"
            " nothing keeps a process on another host from writing there at the same time: use"
            " each directory for one run only",
            file=sys.stderr,
            flush=True,
        )
    except BaseException:
        file.close()
        raise
    return file


def _lock_exclusively(descriptor: int) -> None:
    """Takes the lock, after waiting for processes that only look at it; raises BlockingIOError if
    one owns it.
    """
    until = time.monotonic() + _LOOKS_PASS_SECONDS
    while True:
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # Only looks let this attempt share the lock. An owner does not, and waiting for it
            # would be useless.
            flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Two processes that both want to own it must not hold it off each other.
            flock(descriptor, fcntl.LOCK_UN)
            if time.monotonic() > until:
                raise
        time.sleep(_random.uniform(0, _RETRY_SECONDS))


def lock_holder_line() -> bytes:
    """Returns the line by which the holder of a lock is known: `HOST PROCESS`."""
    return f"{socket.gethostname()} {os.getpid()}\n".encode()


def _claim_without_locks(file: IO[bytes], directory: Path) -> None:
    """Writes this process's number into a lock file; raises BlockingIOError if a living process has
    written its own.
    """
    if _living_holder(directory, file.read(_MAX_HOLDER_BYTES)) is not None:
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
    file.seek(0)
    file.truncate()
    file.write(lock_holder_line())


def _living_holder(directory: Path, written: bytes) -> str | None:
    """Returns what a lock file says, if it names another process of this host that has it open;
    else None.
    """
    holder = written.decode(errors="replace").strip()
    host, _, process = holder.partition(" ")
    if (
        host != socket.gethostname()
        or process == str(os.getpid())
        or not process_has_open(process, directory / "lock")
    ):
        return None
    return holder


def lock_holder(directory: Path) -> str | None:
    """Returns who holds a directory's lock: `HOST PROCESS`, "" if it did not write that, or None if
    the lock is free.

    The look shares the lock for a moment, so looks do not disturb each other, and `lock` waits
    until they are over.
    """
    try:
        # As in `open_lock`: neither a FIFO nor the target of a link is a lock.
        descriptor = os.open(directory / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        try:
            flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read(_MAX_HOLDER_BYTES).decode(errors="replace").strip()
        except LocksNotSupportedError:
            return _living_holder(directory, file.read(_MAX_HOLDER_BYTES))
        except OSError:
            return None
    return None


def process_has_open(process: str, path: Path) -> bool:
    """Returns whether a process of this host, by its number, has a file open; False if this may not
    be seen.
    """
    if not process.isdecimal():
        return False
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc", process, "fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.samefile(path):
                    return True
    return False


@contextlib.contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Holds up other processes of this user that want to make the same cache file, until the block
    is done.

    Where the cache cannot be locked nobody waits.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            folder = cache_root() / "index"
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(
                (folder / f"{zlib.crc32(bytes(path)) % _LOCKS}.lock").open("ab")
            )
            flock(file.fileno(), fcntl.LOCK_EX)
        yield


def read_or_none(read: Callable[[], T]) -> T | None:
    """Returns what `read` returns, or None where it fails: the file is absent, cut or of another
    form.

    For files that can be made again, such as an index. zipfile, json and NumPy raise nearly
    anything when a file is damaged: EOFError, BadZipFile, struct.error, zlib.error,
    NotImplementedError, MemoryError and more.
    """
    try:
        return read()
    except Exception:
        return None


def cache_root() -> Path:
    """Returns where generated data and indices are kept: $XDG_CACHE_HOME/hybrid_imagenet, by
    default under ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hybrid_imagenet"


def cached_index_path(*kind: str | int, of: Sequence[Path]) -> Path:
    """Returns where an index of a kind (its name and version) of some files is kept until one of
    them changes.
    """
    key = hashlib.sha256(repr([*kind, *map(_fingerprint, of)]).encode()).hexdigest()[:24]
    return cache_root() / "index" / f"{key}.npz"


def _fingerprint(path: Path) -> tuple[str, int, int]:
    status = path.stat()  # its ctime, since copies may keep the modification time of another file
    return str(path.resolve()), status.st_size, status.st_ctime_ns


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Opens a file of a user for reading.

    Raises:
      OSError: if it cannot be opened, or is a pipe, a device or a socket: these may never end, and
        reading at an offset fails.
    """
    descriptor = os.open(
        path, os.O_RDONLY | os.O_NONBLOCK
    )  # without the flag, opening a pipe waits for a writer
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
        return os.fdopen(descriptor, "rb", buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], limit: int | None = None) -> bytes:
    """Returns the content of a file of a user.

    Args:
      path: the file; a symbolic link is followed.
      limit: size in bytes above which the file is rejected; None for no limit.

    Raises:
      OSError: as `open_regular`, or if it has more than `limit` bytes.
    """
    with open_regular(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise OSError(
                errno.EFBIG, f"has {size:,} bytes, and at most {limit:,} are read", os.fspath(path)
            )
        return file.read()


def read_run_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Reads a whole file of a run directory, as `read_regular`.

    Raises:
      OSError: if the file cannot be opened or read.
      UserError: with the remedy, if it is not a regular file, or larger than `max_bytes`.
    """
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise UserError(f"{path} is not a regular file. Move it away.") from None
        if error.errno == errno.EFBIG:
            raise UserError(
                f"{path} {error.strerror}. It is probably another file: move it away, or restore it"
                " from a copy."
            ) from None
        raise


def detect_compression(head: bytes) -> tuple[str, str] | None:
    """Returns how a file is compressed, by its first bytes, and the command that decompresses stdin
    to stdout.

    None for other files. Call it for files that turned out not to be what they should be: two bytes
    are enough for zlib, and other files may begin with them.
    """
    is_zlib = (
        len(head) >= 2 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0
    )  # RFC 1950, section 2.2
    if is_zlib:
        program = (
            "import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))"
        )
        return "ZLIB", f"python3 -c '{program}'"
    return next((known for magic, known in _COMPRESSIONS.items() if head.startswith(magic)), None)


def decode_text(content: bytes) -> str:
    """Returns the text in a file that a user wrote: UTF-8, or what its byte-order mark says.

    Editors on Windows and PowerShell's `>` write UTF-16 or UTF-8 with such a mark.

    Raises:
      ValueError: with the reason and the remedy, for what is not text in one of these encodings.
    """
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS if content.startswith(mark)), "utf-8")
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().replace("-SIG", "")
        raise ValueError(
            f"is not text in {name} (offset {error.start}: {error.reason}); save it as UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(
            "is not text, because it holds zero bytes, as a binary file or UTF-16 without a"
            " byte-order mark does; save it as UTF-8"
        )
    return text


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file that cannot be made again.

    Raises:
      UserError: if it cannot be read, is empty, cut or something else.
    """
    try:
        content = json.loads(read_run_file(path, MAX_JSON_BYTES).decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is empty, cut or not JSON; restore it from a copy") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; restore it from a copy")
    if _is_deeper(content, MAX_JSON_DEPTH):
        raise UserError(
            f"{path}: its values are nested too deep for this file; restore it from a copy"
        )
    return content


def _is_deeper(value: Any, levels: int) -> bool:
    """Returns whether a JSON value has more levels of lists and objects than allowed."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in inner)
