"""Replaces files atomically, locks directories, and reads files that may be damaged.

Every package may import this module.
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
"""Size of the largest list or description that is read.

It is enough for a line of 256 bytes for each of a million classes.
"""
# The description of a run has a few kilobytes. A larger file is another one, and reading it could
# fill the memory.
MAX_JSON_BYTES = 16 << 20
# Values of a run are nested at most four levels deep. Functions that walk through deeper values
# could overflow the stack.
MAX_JSON_DEPTH = 16
# The marks of UTF-32 come first, because the one for little-endian begins with the mark of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
# By the first bytes of a file: the name of the format, and the command that decompresses it.
_COMPRESSIONS = {
    b"\x1f\x8b": ("GZIP", "gzip -dc"),
    b"BZh": ("BZIP2", "bzip2 -dc"),
    b"\xfd7zXZ\0": ("XZ", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("Zstandard", "zstd -dc"),
}
# The cache has this many lock files. Two cache files may share one, and then wait for each other.
_NUM_CACHE_LOCKS = 64
# flock() fails with these on a file system without locks: some Lustre, FUSE and NFS mounts.
_LOCKS_NOT_SUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK}
# A process that probes a lock holds it for well under a millisecond, so this outlasts any number of
# probes.
_MAX_PROBE_SECONDS = 5.0
_MAX_RETRY_SECONDS = 0.002
_MAX_HOLDER_BYTES = 300
# Not the global generator, because the user's program may have seeded it.
_random = random.Random()


def expand_home(path: str | os.PathLike[str]) -> Path:
    """Replaces a leading `~` by the home directory; shells do not replace it after `=`."""
    # pathlib raises RuntimeError if there is no such user.
    return Path(os.path.expanduser(path))  # noqa: PTH111


def shipped_directory(name: str) -> Path:
    """Returns a directory of files that come with the program.

    It is next to the package in a checkout, and in the package where pip has installed it (see
    setup.py).

    Args:
      name: `flags` (flag files of training) or `examples` (programs that use the library).
    """
    package = Path(__file__).parent
    installed = package / name
    return installed if installed.is_dir() else package.parent / name


def is_url(location: str) -> bool:
    """Returns whether a location is a URL, such as https://host/path, not a path of this host."""
    return "://" in location


def output_path(flag: str, path: str | os.PathLike[str]) -> Path:
    """Returns where a command writes, with the home directory instead of `~`.

    Args:
      flag: The flag that names the path, for the message.
      path: The value of the flag.

    Raises:
      UserError: If it is a URL.
    """
    if is_url(str(path)):
        raise UserError(
            f"{flag}={path} is a URL, but a local path is needed. For a bucket, pass the path where"
            " it is mounted."
        )
    return expand_home(path)


@contextlib.contextmanager
def atomic_replace(target: Path) -> Iterator[Path]:
    """Yields a temporary path next to `target`; at the end, that file replaces `target`.

    `target` has either all of the new content or the previous one, even after a power cut: the
    content is on the disk before the file is renamed, and the new name is on the disk when this
    returns. Several processes may write one target at the same time; the last one wins. After an
    error the temporary file is removed.

    Raises:
      OSError: If the disk is full or not writable.
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
    """Waits until the content of a file, or the names in a directory, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocksNotSupportedError(OSError):
    """The file system has no locks."""


def lock(directory: Path, flags: int = os.O_CREAT) -> IO[bytes]:
    """Locks a directory by its file `lock`; the lock lasts until the returned file is closed.

    Processes that only probe the lock (`lock_holder`) do not count as holders. On a file system
    without locks, a warning is printed. Then only a process on this host keeps others out, if it
    wrote its process number into `lock` and still has the file open.

    Args:
      directory: Must exist.
      flags: Added to the flags of `os.open`; by default the file is created if it is missing.

    Returns:
      The open lock file.

    Raises:
      BlockingIOError: If another process holds the lock.
      OSError: If the file cannot be opened.
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
            " nothing keeps a process on another host from writing there at the same time. Use"
            " each directory for one run only.",
            file=sys.stderr,
            flush=True,
        )
    except BaseException:
        file.close()
        raise
    return file


def open_lock(directory: Path, flags: int = 0) -> IO[bytes]:
    """Opens the file `lock` of a directory for writing, without locking it.

    Args:
      directory: Must exist.
      flags: Added to the flags of `os.open`.

    Raises:
      OSError: If the file cannot be opened.
    """
    # Do not wait for the reader of a FIFO, and do not write to the target of a symbolic link.
    safe = os.O_NONBLOCK | os.O_NOFOLLOW
    descriptor = os.open(directory / "lock", os.O_RDWR | safe | flags, 0o666)
    return os.fdopen(descriptor, "rb+", buffering=0)


def _lock_exclusively(descriptor: int) -> None:
    """Acquires the lock, after waiting for processes that only probe it.

    Raises:
      BlockingIOError: If another process holds the lock.
    """
    deadline = time.monotonic() + _MAX_PROBE_SECONDS
    while True:
        try:
            flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            # This attempt to share the lock succeeds if other processes only probe it. It raises if
            # one holds the lock, because waiting for a holder would be useless.
            flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # Release the shared lock, so that two processes that want to hold the lock do not block
            # each other.
            flock(descriptor, fcntl.LOCK_UN)
            if time.monotonic() > deadline:
                raise
        time.sleep(_random.uniform(0, _MAX_RETRY_SECONDS))


def flock(descriptor: int, operation: int) -> None:
    """Applies `fcntl.flock` to an open file.

    Raises:
      BlockingIOError: If another process holds the lock and `operation` does not wait.
      LocksNotSupportedError: If the file system has no locks.
      OSError: For other failures.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno in _LOCKS_NOT_SUPPORTED:
            raise LocksNotSupportedError(error.errno, error.strerror) from None
        raise


def lock_holder_line() -> bytes:
    """Returns the line that this process writes into a lock file: `HOST PROCESS`."""
    return f"{socket.gethostname()} {os.getpid()}\n".encode()


def _claim_without_locks(file: IO[bytes], directory: Path) -> None:
    """Writes this process's number into a lock file.

    Raises:
      BlockingIOError: If another living process wrote its number.
    """
    if _living_holder(directory, file.read(_MAX_HOLDER_BYTES)) is not None:
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
    file.seek(0)
    file.truncate()
    file.write(lock_holder_line())


def _living_holder(directory: Path, content: bytes) -> str | None:
    """Returns the holder in a lock file if it is another process that has the file open.

    Only processes of this host can be found; for others the result is None.
    """
    holder = content.decode(errors="replace").strip()
    host, _, process = holder.partition(" ")
    if host != socket.gethostname() or process == str(os.getpid()):
        return None
    if not process_has_open(process, directory / "lock"):
        return None
    return holder


def lock_holder(directory: Path) -> str | None:
    """Returns which process holds a directory's lock.

    The probe shares the lock for a moment, so probes do not disturb each other, and `lock` waits
    until they are over.

    Returns:
      `HOST PROCESS`, "" if the holder did not write that, or None if the lock is free.
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
    """Returns whether a process of this host has a file open.

    Args:
      process: Its number in decimal; for anything else the result is False.
      path: The file.

    Returns:
      Also False if this process may not see the files of the other one.
    """
    if not process.isdecimal():
        return False
    with contextlib.suppress(OSError):
        for descriptor in Path("/proc", process, "fd").iterdir():
            with contextlib.suppress(OSError):
                if descriptor.samefile(path):
                    return True
    return False


def cache_root() -> Path:
    """Returns the directory for generated data and indices.

    It is $XDG_CACHE_HOME/hybrid_imagenet, by default ~/.cache/hybrid_imagenet.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "hybrid_imagenet"


def cached_index_path(*kind: str | int, files: Sequence[Path]) -> Path:
    """Returns where the index of some files is stored in the cache.

    Args:
      kind: Name and version of the index.
      files: The indexed files. If one of them changes, the path changes too.
    """
    key = hashlib.sha256(repr([*kind, *map(_fingerprint, files)]).encode()).hexdigest()[:24]
    return cache_root() / "index" / f"{key}.npz"


def _fingerprint(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    # Use ctime, because copies may keep the modification time of another file.
    return str(path.resolve()), status.st_size, status.st_ctime_ns


@contextlib.contextmanager
def cache_lock(path: Path) -> Iterator[None]:
    """Makes other processes of this user wait that want to create the same cache file.

    Processes do not wait for each other if the cache cannot be locked.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder = cache_root() / "index"
            folder.mkdir(parents=True, exist_ok=True)
            name = f"{zlib.crc32(bytes(path)) % _NUM_CACHE_LOCKS}.lock"
            file = stack.enter_context((folder / name).open("ab"))
            flock(file.fileno(), fcntl.LOCK_EX)
        yield


def read_or_none(read: Callable[[], T]) -> T | None:
    """Returns the result of `read`, or None if it fails because a file is missing or damaged.

    Use it for files that can be created again, such as an index. zipfile, json and NumPy raise
    almost anything if a file is damaged: EOFError, BadZipFile, struct.error, zlib.error,
    NotImplementedError, MemoryError and more.
    """
    try:
        return read()
    except Exception:
        return None


def open_regular(path: str | os.PathLike[str], buffering: int = -1) -> BinaryIO:
    """Opens a file of a user for reading.

    Raises:
      OSError: If it cannot be opened, or is a pipe, a device or a socket. These may never end, and
        cannot be read at an offset.
    """
    # Without O_NONBLOCK, opening a pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
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
      path: The file; a symbolic link is followed.
      limit: Size in bytes above which the file is rejected; None for no limit.

    Raises:
      OSError: See `open_regular`; also if the file has more than `limit` bytes.
    """
    with open_regular(path, buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if limit is not None and size > limit:
            raise OSError(
                errno.EFBIG, f"has {size:,} bytes, and at most {limit:,} are read", os.fspath(path)
            )
        return file.read()


def read_run_file(path: Path, max_bytes: int | None = None) -> bytes:
    """Reads a file of a run directory, as `read_regular`.

    Args:
      path: The file.
      max_bytes: Size above which the file is rejected; None for no limit.

    Raises:
      OSError: If the file cannot be opened or read.
      UserError: With the remedy, if it is not a regular file, or larger than `max_bytes`.
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


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file that cannot be created again.

    Raises:
      UserError: If the file cannot be read, is damaged, or is not such a file.
    """
    try:
        content = json.loads(read_run_file(path, MAX_JSON_BYTES).decode("utf-8"))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read: {error.strerror}. Check the path and its permissions."
        ) from None
    except (ValueError, RecursionError):
        raise UserError(
            f"{path} is empty, truncated or not JSON. Restore it from a copy."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object. Restore it from a copy.")
    if _is_deeper(content, MAX_JSON_DEPTH):
        raise UserError(f"{path} has values that are nested too deeply. Restore it from a copy.")
    return content


def _is_deeper(value: Any, levels: int) -> bool:
    """Returns whether a JSON value has more than `levels` levels of lists and objects."""
    if not isinstance(value, dict | list):
        return False
    items = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)


def detect_compression(head: bytes) -> tuple[str, str] | None:
    """Recognizes the compression of a file by its first bytes.

    Call it only for files that turned out to be invalid: zlib is recognized by two bytes, and other
    files may begin with these too.

    Returns:
      The format, and the command that decompresses stdin to stdout; None if it is unknown.
    """
    # RFC 1950, section 2.2.
    is_zlib = len(head) >= 2 and head[0] == 0x78 and int.from_bytes(head[:2], "big") % 31 == 0
    if is_zlib:
        program = (
            "import sys, zlib; sys.stdout.buffer.write(zlib.decompress(sys.stdin.buffer.read()))"
        )
        return "ZLIB", f"python3 -c '{program}'"
    for magic, compression in _COMPRESSIONS.items():
        if head.startswith(magic):
            return compression
    return None


def decode_text(content: bytes) -> str:
    """Decodes the text in a file that a user wrote: UTF-8, or as its byte-order mark says.

    Editors on Windows and PowerShell's `>` write UTF-16 or UTF-8 with such a mark.

    Raises:
      ValueError: With the reason and the remedy, if it is not text in one of these encodings.
    """
    encoding = "utf-8"
    for mark, name in _BYTE_ORDER_MARKS:
        if content.startswith(mark):
            encoding = name
            break
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        name = encoding.upper().replace("-SIG", "")
        raise ValueError(
            f"is not text in {name} (offset {error.start}: {error.reason}); save it as UTF-8"
        ) from None
    if "\0" in text:
        raise ValueError(
            "is not text, because it contains zero bytes, as a binary file or UTF-16 without a"
            " byte-order mark does; save it as UTF-8"
        )
    return text
