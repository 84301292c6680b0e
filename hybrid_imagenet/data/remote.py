"""Reads files at a URL by way of copies in a local directory, and waits for a server that does not
answer.
"""

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
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before the next try; the last one from then on
_SHORTEST = 10.0  # seconds that a request may always take
_BLOCK = 8 << 20  # bytes of one request: what is lost when a connection breaks
_SMALLEST = 64 << 10  # bytes of one request after others have failed
_FETCHING = 4  # files that a rank copies ahead at the same time
_LOOKUPS = 16  # files about which a rank asks at the same time
# What file systems tell of a file that differs when its content does, the most certain first.
_VERSIONS = (
    *("ETag", "etag", "md5Hash", "Content-MD5", "Digest", "xet_hash", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "mtime"),
)


class _Known(NamedTuple):
    """What a server tells of a file: bytes, and what differs when its content does ("" where it
    tells nothing).
    """

    size: int
    version: str


class RemoteDirectory(Directory):
    """Files at a URL, copied whole to a local directory when they are first needed, once for all
    ranks of a machine.

    A request that fails is made again for `timeout` seconds, where it had stopped. A copy has its
    name only when it is complete; the name tells the size and the version (ETag, checksum or date)
    that the server gave the file. So a file that has changed at the URL is copied again at the next
    start, and one that changes during a copy is refused. Copies stay until the user removes them.

    Args:
      copies: local directory.
      timeout: seconds for which a request that fails is made again.

    Raises:
      UserError: without fsspec, or what it needs for this kind of URL; for a directory that cannot
        be written.
    """

    remote = True

    def __init__(self, url: str, copies: Path, timeout: float) -> None:
        super().__init__(url)
        if "?" in url or "#" in url:
            raise UserError(f"--data_dir={url}: give the URL of a directory, without a query")
        self._files, root = _file_system(url)
        self._root = root.rstrip("/")
        self._ask = Retries(timeout)
        self._copies = copies / f"files-{hashlib.sha256(self._root.encode()).hexdigest()[:16]}"
        try:
            self._copies.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"--data_cache_dir={copies}: cannot be written ({error.strerror or error})"
            ) from None
        self._known: dict[str, _Known] = {}
        self._ranges = False  # whether the server is known to send parts of files
        self._copied = ReadCounter()  # reads of copies, which say nothing about the server
        self._ahead: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked: Sequence[str] = ()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def list_files(self) -> list[str]:
        found: list[str] = []  # for HTTP the links on the directory's page
        for place in ("", *SUBDIRECTORIES):
            if place and not any(name.rstrip("/") == place for name in found):
                continue
            url = f"{self._root}/{place}".rstrip("/") + "/"
            try:
                listed = self._ask(
                    functools.partial(self._files.ls, url, detail=False), self.location
                )
            except FileNotFoundError:
                raise UserError(
                    f"--data_dir={self.location}: no such directory, or no access to it"
                ) from None
            names = [
                entry.rstrip("/").rpartition("/")[2] + "/" * entry.endswith("/") for entry in listed
            ]
            found += [f"{place}/{name}" if place else name for name in names]
        return sorted({name for name in found if not name.endswith("/")})

    def read_small_file(self, name: str) -> bytes | None:
        try:
            content: bytes = self._ask(
                lambda: self._files.cat_file(self._at(name)), self.display_name(name)
            )
        except FileNotFoundError:
            return None
        return content

    def local_path(self, name: str) -> Path:
        copy = self._copy(name)
        while not self._is_there(name, copy):
            self._fetch(name, copy, wait=True)
        return copy

    def read(self, name: str, offset: int, length: int) -> bytes:
        return read_at(str(self.local_path(name)), offset, length, self._copied)

    def read_tail(self, name: str, length: int) -> bytes:
        size = self._about(name).size
        start, parts = max(0, size - length), b""
        while start + len(parts) < size:
            parts += self._block(name, start + len(parts), size)
        return parts

    def index_path(self, name: str) -> Path | None:
        return _index_of(self._copy(name))

    def prefetch(self, names: Sequence[str]) -> None:
        if names == self._asked:
            return
        with self._lock:
            self._asked = names
            for name in names:
                if not self._copy(name).exists():
                    self._ahead.put(name)
            while len(self._threads) < _FETCHING:
                # Daemons: a copy that is under way must not hold up the end of the program.
                self._threads.append(
                    threading.Thread(target=self._fetch_ahead, name="storage", daemon=True)
                )
                self._threads[-1].start()

    def look_up_sizes(self, names: Sequence[str]) -> None:
        outside = next(
            (name for name in names if ".." in PurePosixPath(name).parts or name.startswith("/")),
            None,
        )
        if outside is not None:
            raise UserError(
                f"{self.display_name(outside)} is outside of the directory. Correct its name in the"
                " list."
            )
        first, *others = names
        self._known[first] = self._answer(
            first
        )  # alone: the hub's file system lists the directory for it
        with concurrent.futures.ThreadPoolExecutor(_LOOKUPS) as pool:
            self._known |= zip(others, pool.map(self._answer, others), strict=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _about(self, name: str) -> _Known:
        if name not in self._known:
            self.look_up_sizes([name])
        return self._known[name]

    def _answer(self, name: str) -> _Known:
        info = self._ask(lambda: self._files.info(self._at(name)), self.display_name(name))
        if info.get("size") is None:
            raise UserError(
                f"{self.display_name(name)}: the server does not report its size; use one that does"
            )
        return _Known(
            int(info["size"]),
            next((f"{key}={info[key]}" for key in _VERSIONS if info.get(key)), ""),
        )

    def _check_unchanged(self, name: str) -> None:
        """Raises UserError if a file is no longer what it was at the start."""
        before, now = self._about(name), self._answer(name)
        if before != now:
            raise UserError(
                f"{self.display_name(name)} has changed at the URL since this start, from"
                f" {before.size} bytes, {before.version}, to {now.size} bytes, {now.version}."
                " Start again when it no longer changes."
            )

    def _copy(self, name: str) -> Path:
        """Returns where the copy of a file is or will be; another version of the file has another
        place.
        """
        path = self._copies / name
        return path.with_name(
            f"{hashlib.sha256(repr(tuple(self._about(name))).encode()).hexdigest()[:12]}-{path.name}"
        )

    def _is_there(self, name: str, copy: Path) -> bool:
        try:
            return copy.stat().st_size == self._about(name).size
        except FileNotFoundError:
            return False

    def _fetch_ahead(self) -> None:
        while True:
            name = self._ahead.get()
            if name in self._asked:  # else the order has passed it
                with contextlib.suppress(
                    OSError, UserError
                ):  # whoever reads the file tells what is wrong
                    self._fetch(name, self._copy(name), wait=False)

    def _fetch(self, name: str, copy: Path, *, wait: bool) -> None:
        """Copies a file unless another thread or rank does; with `wait` returns when that one is
        done.

        Where the directory of copies is on a file system without locks, each rank makes its own
        copy, and the last one to finish replaces the others.
        """
        part = copy.with_name(f".{copy.name}.part")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Not truncated when it is opened: another rank may be writing it.
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
                try:
                    locked = _locked(file.fileno(), wait)
                except files.LocksNotSupportedError:
                    part.unlink(missing_ok=True)
                    part = copy.with_name(f".{copy.name}.{secrets.token_hex(8)}.part")
                    try:
                        with part.open("xb") as own_file:
                            self._fill(name, own_file, part, copy)
                    finally:
                        part.unlink(
                            missing_ok=True
                        )  # after an error; nothing else would ever use it
                    return
                if not locked or not _same_file(file.fileno(), part):
                    return  # another one copies it, or has given it its name or removed it
                if self._is_there(name, copy):
                    part.unlink()
                    return
                self._fill(name, file, part, copy)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename is None:
                raise  # not at the URL
            raise UserError(
                f"{copy}: cannot be written ({error.strerror or error}); free space, or give"
                " another --data_cache_dir"
            ) from None

    def _fill(self, name: str, file: IO[bytes], part: Path, copy: Path) -> None:
        """Copies a file from the URL into `file`, which is open at `part`, and then renames `part`
        to `copy`.
        """
        size = self._about(name).size
        file.truncate(0)  # what an earlier run left may never have reached the disk
        while file.tell() < size:
            file.write(self._block(name, file.tell(), size))
        self._check_unchanged(name)
        file.flush()
        os.fsync(file.fileno())
        _index_of(copy).unlink(missing_ok=True)
        part.replace(copy)

    def _block(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes [start, end) of a file, or the first of them: `_BLOCK` or fewer, at
        least one.

        All from `start` on if the server sends the whole file regardless.
        """
        size, most = self._about(name).size, _BLOCK

        def block() -> bytes:
            nonlocal most
            stop = min(end, start + most)
            most = min(most, max(_SMALLEST, most // 8))  # a slow server gets less to send
            content: bytes = self._files.cat_file(self._at(name), start=start, end=stop)
            if len(content) == size:
                return content[start:]
            if len(content) != stop - start:
                raise OSError(f"{len(content)} of {stop - start} bytes came")
            self._ranges = True
            return content

        # A server that may send the whole file gets the time for it.
        content = self._ask(
            block,
            self.display_name(name),
            patience=1.0 if self._ranges else max(1.0, size / _BLOCK),
        )
        self.reads.add(len(content))
        return content


def _file_system(url: str) -> tuple[Any, str]:
    fsspec = import_optional(
        "fsspec", f"--data_dir={url}: needs fsspec (pip install 'fsspec[http]')"
    )
    options: dict[str, Any] = {}
    try:
        if url.startswith(("http://", "https://")):
            import aiohttp

            # Below --storage_timeout, so that a connection over a cut network ends and is made
            # again.
            limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=20)
            options = {"client_kwargs": {"timeout": limits, "trust_env": True}}
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(f"--data_dir={url}: {error}") from None
    except ValueError as error:
        raise UserError(f"--data_dir={url}: is not a URL that can be read ({error})") from None


def _index_of(copy: Path) -> Path:
    """Returns where the index of a copy is kept, as long as the copy is."""
    return copy.with_name(f"{copy.name}.index.npz")


def _locked(descriptor: int, wait: bool) -> bool:
    try:
        files.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


class Retries:
    """Makes requests again that fail; safe to use from several threads.

    Args:
      timeout: seconds after its first failure in which a request is made again.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._failing = False  # in any thread: one line tells of it

    def __call__(self, request: Callable[[], T], where: str, patience: float = 1.0) -> T:
        """Returns what a request returns.

        Args:
          request: is called in a thread of its own, once for each try. A try that takes longer than
            `timeout` has failed; what it does afterwards is ignored.
          where: what is asked for, for messages.
          patience: factor on the time that a try may take.

        Raises:
          FileNotFoundError: if there is no such file, or no access to it.
          StorageError: if it has failed for `timeout` seconds, and twice at least.
        """
        first: float | None = None
        for tries in itertools.count():
            try:
                result = _within(max(self._timeout, _SHORTEST) * patience, request)
            except Exception as error:
                if _permanent(error):
                    raise FileNotFoundError(where) from None
                first = first or time.monotonic()
                self._wait(where, error, first, tries)
            else:
                self._failing = False
                return result
        raise AssertionError

    def _wait(self, where: str, error: Exception, first: float, tries: int) -> None:
        """Waits before the next try; raises StorageError when there is to be none."""
        reason = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        if not self._failing:
            self._failing = True
            _log.warning(
                without_secrets(f"{where}: {reason}; trying again for {self._timeout:g} seconds")
            )
        left = self._timeout - (time.monotonic() - first)
        if left <= 0 and tries:
            raise StorageError(
                f"{where}: has failed for --storage_timeout={self._timeout:g} seconds ({reason});"
                " start again with --resume when it answers"
            )
        time.sleep(max(0.0, min(_PAUSES[min(tries, len(_PAUSES) - 1)], left)))


def _within(seconds: float, request: Callable[[], T]) -> T:
    """Returns what a request returns; raises TimeoutError when it takes longer, and leaves it to
    itself.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(request())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=work, name="request", daemon=True).start()
    try:
        return outcome.result(seconds)
    except TimeoutError:
        if outcome.done():
            raise  # the request's own
        raise TimeoutError(f"not done after {seconds:g} seconds") from None


def _permanent(error: Exception) -> bool:
    """Returns whether a request cannot succeed: there is no such file, or it is not for us."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if isinstance(status, int) and status:
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(cause, (FileNotFoundError, PermissionError))
