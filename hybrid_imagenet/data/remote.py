"""Copies files from a URL to a local directory, and repeats failed requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple, TypeVar

from hybrid_imagenet import files
from hybrid_imagenet.data.directories import SUBDIRECTORIES, Directory
from hybrid_imagenet.data.sources.source import ReadCounter, read_at
from hybrid_imagenet.errors import StorageError, UserError, import_optional, without_secrets

T = TypeVar("T")
_log = logging.getLogger(__name__)
# Delays before the second, third, ... try of a request. The last one is used from then on.
_RETRY_DELAYS_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0)
# A request may always take this long, even if --storage_timeout is shorter.
_MIN_REQUEST_SECONDS = 10.0
# Bytes of one request. They are lost if the connection breaks.
_BLOCK_BYTES = 8 << 20
# Bytes of a request after others have failed.
_MIN_BLOCK_BYTES = 64 << 10
# Files that a rank copies ahead at the same time.
_NUM_COPY_THREADS = 4
# Files whose sizes a rank asks for at the same time.
_NUM_LOOKUP_THREADS = 16
_MAX_REASON_CHARACTERS = 200
# What file systems report about a file that changes with its content, the most reliable first.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "Digest",
    "xet_hash",
    "blob_id",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "mtime",
)


class _RemoteFileInfo(NamedTuple):
    """Size and version of a file on the server.

    Attributes:
      size: Size in bytes.
      version: Value that changes with the content; "" if the server reports none.
    """

    size: int
    version: str


class RemoteDirectory(Directory):
    """Gives access to files at a URL through local copies.

    A whole file is copied when it is first needed, once for all ranks of a host. If a request
    fails, it is repeated for `timeout` seconds, and the copy continues where it stopped. Copies
    stay until the user removes them.

    A copy gets its final name when it is complete. The name depends on the file's size and version
    (ETag, checksum or date) on the server. So a file that has changed at the URL is copied again at
    the next start, and a file that changes during a copy is an error.
    """

    remote = True

    def __init__(self, url: str, cache_dir: Path, timeout: float) -> None:
        """Prepares the directory of copies; the server is not asked.

        Args:
          url: URL of the directory.
          cache_dir: Local directory for the copies.
          timeout: Seconds for which a failed request is repeated.

        Raises:
          UserError: If fsspec or a package that it needs for this URL is missing, or if the local
            directory cannot be written.
        """
        super().__init__(url)
        if "?" in url or "#" in url:
            raise UserError(
                f"--data_dir={url} has a query or a fragment. Set it to the URL of a directory."
            )
        self._file_system, root = _open_file_system(url)
        self._root = root.rstrip("/")
        self._request = Retries(timeout)
        url_digest = hashlib.sha256(self._root.encode()).hexdigest()[:16]
        self._copies_dir = cache_dir / f"files-{url_digest}"
        try:
            self._copies_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--data_cache_dir={cache_dir}: cannot be written ({error.strerror or error})"
            ) from None
        self._info_by_name: dict[str, _RemoteFileInfo] = {}
        # Whether the server is known to send parts of files.
        self._sends_ranges = False
        # `reads` counts requests to the server, so reads of local copies are counted separately.
        self._copy_reads = ReadCounter()
        self._copy_queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._names_to_prefetch: Sequence[str] = ()
        self._copy_threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def list_files(self) -> list[str]:
        """Returns the names of all files, sorted.

        Over HTTP these are the links on the page of the directory.

        Raises:
          UserError: If the directory does not exist or may not be read.
        """
        names = self._list_directory("")
        for subdirectory in SUBDIRECTORIES:
            if any(name.rstrip("/") == subdirectory for name in names):
                names += self._list_directory(subdirectory)
        return sorted({name for name in names if not name.endswith("/")})

    def _list_directory(self, subdirectory: str) -> list[str]:
        """Lists the root or a subdirectory; over HTTP, directories end with "/"."""
        url = f"{self._root}/{subdirectory}".rstrip("/") + "/"
        try:
            paths = self._request(
                functools.partial(self._file_system.ls, url, detail=False), self.location
            )
        except FileNotFoundError:
            raise UserError(
                f"--data_dir={self.location} does not exist, or cannot be read. Check the path and"
                " your access to it."
            ) from None
        prefix = f"{subdirectory}/" if subdirectory else ""
        names = []
        for path in paths:
            name = path.rstrip("/").rpartition("/")[2]
            suffix = "/" if path.endswith("/") else ""
            names.append(prefix + name + suffix)
        return names

    def read_small_file(self, name: str) -> bytes | None:
        """Returns the content of a small file without a copy, or None if it is missing."""
        try:
            content: bytes = self._request(
                lambda: self._file_system.cat_file(self._url_of(name)), self.display_name(name)
            )
        except FileNotFoundError:
            return None
        return content

    def local_path(self, name: str) -> Path:
        """Returns the path of a file's copy, which is made if it does not exist.

        Raises:
          UserError: If the file changes at the URL, or the copy cannot be written.
          FileNotFoundError: If there is no such file.
          StorageError: If the URL does not answer.
        """
        copy = self._copy_path(name)
        while not self._is_copied(name, copy):
            self._copy_file(name, copy, wait=True)
        return copy

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Returns `length` bytes of a file's copy, or fewer at the end of the file.

        Raises:
          UserError, FileNotFoundError, StorageError: See `local_path`.
        """
        return read_at(str(self.local_path(name)), offset, length, self._copy_reads)

    def read_tail(self, name: str, length: int) -> bytes:
        """Returns the last `length` bytes of a file without a copy.

        Raises:
          FileNotFoundError: If there is no such file.
          StorageError: If the URL does not answer.
        """
        size = self._info(name).size
        start = max(0, size - length)
        content = b""
        while start + len(content) < size:
            content += self._read_block(name, start + len(content), size)
        return content

    def index_path(self, name: str) -> Path | None:
        """Returns the path for the index of a file, next to its copy."""
        return _index_path_of(self._copy_path(name))

    def prefetch(self, names: Sequence[str]) -> None:
        """Starts to copy the files that will be read next, in this order."""
        if names == self._names_to_prefetch:
            return
        with self._lock:
            self._names_to_prefetch = names
            for name in names:
                if not self._copy_path(name).exists():
                    self._copy_queue.put(name)
            while len(self._copy_threads) < _NUM_COPY_THREADS:
                # They are daemons, because an unfinished copy must not delay the program's end.
                thread = threading.Thread(target=self._copy_from_queue, name="storage", daemon=True)
                self._copy_threads.append(thread)
                thread.start()

    def look_up_sizes(self, names: Sequence[str]) -> None:
        """Asks the server for the sizes of many files at once.

        Raises:
          UserError: For a name outside the directory, or if the server does not report sizes.
          FileNotFoundError: If there is no such file.
          StorageError: If the URL does not answer.
        """
        for name in names:
            if ".." in PurePosixPath(name).parts or name.startswith("/"):
                raise UserError(
                    f"{self.display_name(name)} is outside of the directory. Correct its name in"
                    " the list."
                )
        first, *others = names
        # The hub's file system lists the directory for the first file, and uses the list for the
        # others. So the first request goes alone.
        self._info_by_name[first] = self._request_info(first)
        with concurrent.futures.ThreadPoolExecutor(_NUM_LOOKUP_THREADS) as pool:
            self._info_by_name |= zip(others, pool.map(self._request_info, others), strict=True)

    def _url_of(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _info(self, name: str) -> _RemoteFileInfo:
        """Returns size and version of a file at the first request of this process."""
        if name not in self._info_by_name:
            self.look_up_sizes([name])
        return self._info_by_name[name]

    def _request_info(self, name: str) -> _RemoteFileInfo:
        info = self._request(
            lambda: self._file_system.info(self._url_of(name)), self.display_name(name)
        )
        if info.get("size") is None:
            raise UserError(
                f"The server of {self.display_name(name)} does not report the file's size. Use a"
                " server that does."
            )
        for key in _VERSION_KEYS:
            if info.get(key):
                return _RemoteFileInfo(int(info["size"]), f"{key}={info[key]}")
        return _RemoteFileInfo(int(info["size"]), "")

    def _check_unchanged(self, name: str) -> None:
        """Raises UserError if a file has changed since this process first asked for it."""
        first = self._info(name)
        latest = self._request_info(name)
        if first != latest:
            raise UserError(
                f"{self.display_name(name)} has changed at the URL since this start, from"
                f" {first.size} bytes, {first.version}, to {latest.size} bytes, {latest.version}."
                " Start again when it no longer changes."
            )

    def _copy_path(self, name: str) -> Path:
        """Returns the path of a file's copy, which depends on the file's version."""
        version_digest = hashlib.sha256(repr(tuple(self._info(name))).encode()).hexdigest()[:12]
        path = self._copies_dir / name
        return path.with_name(f"{version_digest}-{path.name}")

    def _is_copied(self, name: str, copy: Path) -> bool:
        try:
            return copy.stat().st_size == self._info(name).size
        except FileNotFoundError:
            return False

    def _copy_from_queue(self) -> None:
        """Copies queued files forever, in a background thread."""
        while True:
            name = self._copy_queue.get()
            # A name that was queued by an earlier call of `prefetch` may no longer be needed.
            if name in self._names_to_prefetch:
                # The thread that reads the file will get the same error and report it.
                with contextlib.suppress(OSError, UserError):
                    self._copy_file(name, self._copy_path(name), wait=False)

    def _copy_file(self, name: str, copy: Path, *, wait: bool) -> None:
        """Copies a file, unless another thread or rank is copying it.

        If the file system of the copies has no locks, each rank makes its own copy, and the last
        one to finish replaces the others.

        Args:
          name: The file.
          copy: Path of its copy.
          wait: Whether to wait for the other thread or rank.

        Raises:
          UserError: If the file changes at the URL, or the copy cannot be written.
          FileNotFoundError: If there is no such file.
          StorageError: If the URL does not answer.
        """
        part = copy.with_name(f".{copy.name}.part")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            # The file is not truncated when it is opened, because another rank may be writing it.
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                try:
                    is_locked = _lock(file.fileno(), wait)
                except files.LocksNotSupportedError:
                    part.unlink(missing_ok=True)
                    self._copy_without_lock(name, copy)
                    return
                if not is_locked or not _is_same_file(file.fileno(), part):
                    # Another rank is copying it, or has renamed or removed the part meanwhile.
                    return
                if self._is_copied(name, copy):
                    part.unlink()
                    return
                self._download(name, file, part, copy)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename is None:
                # The file does not exist at the URL. Errors of local files have a file name.
                raise
            raise UserError(
                f"{copy} cannot be written ({error.strerror or error}). Free space, or set another"
                " --data_cache_dir."
            ) from None

    def _copy_without_lock(self, name: str, copy: Path) -> None:
        part = copy.with_name(f".{copy.name}.{secrets.token_hex(8)}.part")
        try:
            with part.open("xb") as file:
                self._download(name, file, part, copy)
        finally:
            # After an error, nothing would ever use this part, because its name is random.
            part.unlink(missing_ok=True)

    def _download(self, name: str, file: IO[bytes], part: Path, copy: Path) -> None:
        """Downloads a file and gives it the name of the copy.

        Args:
          name: The file at the URL.
          file: File to which it is written.
          part: Path of `file`.
          copy: Final path.
        """
        size = self._info(name).size
        # Bytes of an earlier run are not used, because they may never have reached the disk.
        file.truncate(0)
        while file.tell() < size:
            file.write(self._read_block(name, file.tell(), size))
        self._check_unchanged(name)
        file.flush()
        os.fsync(file.fileno())
        # The index of an earlier copy may differ from that of this one.
        _index_path_of(copy).unlink(missing_ok=True)
        part.replace(copy)

    def _read_block(self, name: str, start: int, end: int) -> bytes:
        """Returns the next bytes of a file, at least one and none beyond `end`.

        They are at most `_BLOCK_BYTES`, unless the server ignores ranges and sends the whole file:
        then they are all bytes from `start` on.
        """
        size = self._info(name).size
        length = _BLOCK_BYTES

        def request_block() -> bytes:
            nonlocal length
            stop = min(end, start + length)
            # If this try fails, the next one asks for less, because the server may be slow.
            length = min(length, max(_MIN_BLOCK_BYTES, length // 8))
            content: bytes = self._file_system.cat_file(self._url_of(name), start=start, end=stop)
            if len(content) == size:
                return content[start:]
            if len(content) != stop - start:
                raise OSError(f"{len(content)} of {stop - start} bytes came")
            self._sends_ranges = True
            return content

        # A server that may send the whole file gets time for all of it.
        patience = 1.0 if self._sends_ranges else max(1.0, size / _BLOCK_BYTES)
        content = self._request(request_block, self.display_name(name), patience)
        self.reads.add(len(content))
        return content


def _open_file_system(url: str) -> tuple[Any, str]:
    """Returns fsspec's file system for a URL, and the path in it."""
    fsspec = import_optional(
        "fsspec", f"--data_dir={url} needs fsspec. Run: pip install 'fsspec[http]'"
    )
    options: dict[str, Any] = {}
    try:
        if url.startswith(("http://", "https://")):
            import aiohttp

            # These are below the default of --storage_timeout, so that a connection over a broken
            # network ends and is made again.
            limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=20)
            options = {"client_kwargs": {"timeout": limits, "trust_env": True}}
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(f"--data_dir={url}: {error}") from None
    except ValueError as error:
        raise UserError(f"--data_dir={url}: is not a URL that can be read ({error})") from None


def _index_path_of(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}.index.npz")


def _lock(descriptor: int, wait: bool) -> bool:
    """Locks a file; without `wait` returns False if another process has locked it."""
    try:
        files.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


class Retries:
    """Calls functions that send requests, and repeats them if they fail.

    It is safe to use from several threads.
    """

    def __init__(self, timeout: float) -> None:
        """Sends nothing yet.

        Args:
          timeout: Seconds after the first failure of a request during which it is repeated.
        """
        self._timeout = timeout
        # Whether any request is failing. All threads share it, so that one outage is one warning.
        self._is_failing = False

    def __call__(self, request: Callable[[], T], name: str, patience: float = 1.0) -> T:
        """Returns the result of a request.

        Args:
          request: Function that is called once for each try, in a new thread. A try that takes
            longer than `timeout` has failed, and its result is ignored.
          name: What is requested, for messages.
          patience: Factor on the time that a try may take.

        Raises:
          FileNotFoundError: If there is no such file, or no access to it.
          StorageError: If the request has failed for `timeout` seconds and at least twice.
        """
        first_failure: float | None = None
        for num_failures in itertools.count():
            try:
                seconds = max(self._timeout, _MIN_REQUEST_SECONDS) * patience
                result = _call_with_timeout(seconds, request)
            except Exception as error:
                if _is_permanent(error):
                    raise FileNotFoundError(name) from None
                first_failure = first_failure or time.monotonic()
                self._wait(name, error, first_failure, num_failures)
            else:
                self._is_failing = False
                return result
        raise AssertionError

    def _wait(self, name: str, error: Exception, first_failure: float, num_failures: int) -> None:
        """Waits before the next try.

        Args:
          name: What is requested, for messages.
          error: The error of the latest try.
          first_failure: Time of the first failed try.
          num_failures: Number of failed tries before the latest.

        Raises:
          StorageError: If there should be no further try.
        """
        text = " ".join(str(error.__cause__ or error).split())
        reason = text[:_MAX_REASON_CHARACTERS] or type(error).__name__
        if not self._is_failing:
            self._is_failing = True
            _log.warning(
                without_secrets(f"{name}: {reason}; trying again for {self._timeout:g} seconds")
            )
        remaining = self._timeout - (time.monotonic() - first_failure)
        if remaining <= 0 and num_failures > 0:
            raise StorageError(
                f"{name} has failed for --storage_timeout={self._timeout:g} seconds ({reason})."
                " Start again with --resume when it answers."
            )
        delay = _RETRY_DELAYS_SECONDS[min(num_failures, len(_RETRY_DELAYS_SECONDS) - 1)]
        time.sleep(max(0.0, min(delay, remaining)))


def _call_with_timeout(seconds: float, request: Callable[[], T]) -> T:
    """Returns the result of a request, which is called in a new thread.

    Raises:
      TimeoutError: If it takes longer. The thread continues, and its result is ignored.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(request())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="request", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            # The request itself has raised it.
            raise
        raise TimeoutError(f"not done after {seconds:g} seconds") from None


def _is_permanent(error: Exception) -> bool:
    """Returns whether a repeated request would fail again: no such file, or no access."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if isinstance(status, int) and status:
        # 408 is a timeout of the server, and 429 means too many requests.
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(cause, (FileNotFoundError, PermissionError))
