"""Reads files at a URL by way of copies in a local directory, and waits for a server that does not answer."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import io
import itertools
import json
import logging
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeVar

from hybrid_imagenet.data.directories import SUBDIRECTORIES, Directory
from hybrid_imagenet.errors import StorageError, UserError, without_secrets

T = TypeVar("T")
_log = logging.getLogger(__name__)
_BLOCK = 8 << 20  # bytes of one request: what is lost when a connection breaks
_FOOTER = 64 << 10  # bytes of one request where little is read
_FETCHING = 4  # files that a rank copies ahead at the same time
_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)  # seconds before the next try; the last one from then on
_TOUCHED = 30.0  # seconds after which the use of a copy is noted again
_SIZES_HOLD = 60.0  # seconds for which sizes that another rank has asked for are taken


class RemoteDirectory(Directory):
    """Files at a URL, copied whole to a local directory when they are first needed, once for all ranks of a machine.

    A request that fails is made again for `timeout` seconds, where it had stopped. A copy has its name only when it is
    complete. When the file system of the copies is full to nine tenths, those that were not used for the longest time
    make room. A file whose size has changed at the URL since it was copied is copied again at the next start.

    Args:
      url: of the directory.
      copies: local directory.
      timeout: seconds for which a request that fails is made again.

    Raises:
      UserError: without fsspec, or what it needs for this kind of URL; for a directory that cannot be written.
    """

    remote = True

    def __init__(self, url: str, copies: Path, timeout: float) -> None:
        """Opens no connection yet."""
        super().__init__(url)
        if "?" in url or "#" in url:
            raise UserError(f"--data_dir={url}: give the URL of a directory, without a query")
        self._files, root = _file_system(url)
        self._root = root.rstrip("/")
        self._timeout = timeout
        self._copies = copies / f"files-{hashlib.sha256(self._root.encode()).hexdigest()[:16]}"
        try:
            self._copies.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--data_cache_dir={copies}: cannot be written ({error.strerror or error})") from None
        self._sizes: dict[str, int] = {}
        self._used: dict[str, float] = {}
        self._ahead: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked: Sequence[str] = ()
        self._threads: list[threading.Thread] = []
        self._failing_since: float | None = None
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """See `Directory`; for HTTP these are the links on the directory's page."""
        found: list[str] = []
        for place in ("", *SUBDIRECTORIES):
            if place and not any(name.rstrip("/") == place for name in found):
                continue
            url = f"{self._root}/{place}".rstrip("/") + "/"
            try:
                listed = self._persistently(functools.partial(self._files.ls, url, detail=False), self.location)
            except FileNotFoundError:
                raise UserError(f"--data_dir={self.location}: no such directory, or no access to it") from None
            names = [entry.rstrip("/").rpartition("/")[2] + "/" * entry.endswith("/") for entry in listed]
            found += [f"{place}/{name}" if place else name for name in names]
        return sorted({name for name in found if not name.endswith("/")})

    def small(self, name: str) -> bytes | None:
        """See `Directory`."""
        try:
            content: bytes = self._persistently(lambda: self._files.cat_file(self._at(name)), self.where(name))
        except FileNotFoundError:
            return None
        return content

    def path(self, name: str) -> Path:
        """See `Directory`."""
        copy = self._copies / name
        while not self._is_there(name, copy):
            self._fetch(name, copy, wait=True)
        now = time.monotonic()
        if now - self._used.get(name, 0.0) > _TOUCHED:
            self._used[name] = now
            with contextlib.suppress(OSError):
                os.utime(copy)
        return copy

    def read(self, name: str, offset: int, length: int) -> bytes:
        """See `Directory`."""
        while True:
            path = self.path(name)
            try:
                with path.open("rb", buffering=0) as file:
                    # Not kept open: the space of a copy that made room is free only when nobody holds it.
                    return os.pread(file.fileno(), length, offset)
            except FileNotFoundError:
                pass  # another rank has removed the copy to make room since we looked: it is copied again

    def opened(self, name: str) -> BinaryIO:
        """See `Directory`."""
        return io.BufferedReader(_Parts(functools.partial(self._block, name), self._size(name)), _FOOTER)

    def index_path(self, name: str) -> Path | None:
        """See `Directory`."""
        return self._copies / f"{name}.{self._size(name)}.index.npz"

    def prefetch(self, names: Sequence[str]) -> None:
        """See `Directory`."""
        if names == self._asked:
            return
        with self._lock:
            self._asked = names
            for name in names:
                if not (self._copies / name).exists():
                    self._ahead.put(name)
            while len(self._threads) < _FETCHING:
                # Daemons: a copy that is under way must not hold up the end of the program.
                self._threads.append(threading.Thread(target=self._fetch_ahead, name="storage", daemon=True))
                self._threads[-1].start()

    def look_up(self, names: Sequence[str]) -> None:
        """See `Directory`."""
        outside = next((name for name in names if ".." in PurePosixPath(name).parts or name.startswith("/")), None)
        if outside is not None:
            raise UserError(f"{self.where(outside)}: lies outside of the directory; correct its name in the list")
        # The first rank of a machine asks, the others of this start find the answer.
        with _shared(self._copies / ".sizes.json") as file:
            known = _recent_sizes(file) if file else {}
            missing = [name for name in names if name not in known]
            if missing:
                places = [self._at(name) for name in missing]
                answers = self._persistently(lambda: self._files.sizes(places), self.location)
                for name, size in zip(missing, answers, strict=True):
                    if size is None:
                        raise UserError(f"{self.where(name)}: the server does not tell its size")
                    known[name] = int(size)
                if file:
                    _write_sizes(file, known)
        self._sizes |= {name: known[name] for name in names}

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _size(self, name: str) -> int:
        if name not in self._sizes:
            self.look_up([name])
        return self._sizes[name]

    def _is_there(self, name: str, copy: Path) -> bool:
        try:
            return copy.stat().st_size == self._size(name)
        except FileNotFoundError:
            return False

    def _fetch_ahead(self) -> None:
        while True:
            name = self._ahead.get()
            if name in self._asked:  # else the order has passed it
                with contextlib.suppress(OSError, UserError):  # whoever reads the file tells what is wrong
                    self._fetch(name, self._copies / name, wait=False)

    def _fetch(self, name: str, copy: Path, *, wait: bool) -> None:
        """Copies a file unless another thread or rank does; with `wait` returns when that one is done."""
        size = self._size(name)
        part = copy.with_name(f".{copy.name}.part")
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            with part.open("ab") as file:
                if not _locked(file.fileno(), wait):
                    return
                if not _same_file(file.fileno(), part):
                    return  # who held the lock before has given it its name, or removed it
                if self._is_there(name, copy):
                    part.unlink()
                    return
                self._make_room(size)
                file.truncate(0)  # of an earlier run: the file may have changed since
                while file.tell() < size:
                    file.write(self._block(name, file.tell(), min(file.tell() + _BLOCK, size)))
                file.flush()
                part.replace(copy)
        except OSError as error:
            if isinstance(error, FileNotFoundError) and error.filename is None:
                raise  # not at the URL
            raise UserError(f"{copy}: cannot be written ({error.strerror or error})") from None

    def _block(self, name: str, start: int, end: int) -> bytes:
        """Returns the bytes [start, end) of a file; all from `start` if the server sends the whole file regardless."""
        started = time.perf_counter()

        def block() -> bytes:
            content: bytes = self._files.cat_file(self._at(name), start=start, end=end)
            if len(content) == self._size(name):
                return content[start:]
            if len(content) != end - start:
                raise OSError(f"{len(content)} of {end - start} bytes came")
            return content

        content = self._persistently(block, self.where(name))
        self.io.add(len(content), 1, time.perf_counter() - started)
        return content

    def _persistently(self, request: Callable[[], T], where: str) -> T:
        """Makes a request until it succeeds, cannot succeed, or the timeout has passed since a first failure."""
        begun = time.monotonic()
        for tries in itertools.count():
            try:
                result = request()
            except Exception as error:
                if _permanent(error):
                    # That of several files which is missing, where the error tells.
                    raise FileNotFoundError(str(error) if isinstance(error, FileNotFoundError) else where) from None
                self._wait(where, error, begun, _PAUSES[min(tries, len(_PAUSES) - 1)])
            else:
                self._failing_since = None
                return result
        raise AssertionError

    def _wait(self, where: str, error: Exception, begun: float, pause: float) -> None:
        """Waits before the next try; raises StorageError when there is to be none."""
        now = time.monotonic()
        reason = " ".join(str(error.__cause__ or error).split())[:200] or type(error).__name__
        since = self._failing_since
        if since is None:
            since = self._failing_since = now
            _log.warning(without_secrets(f"{where}: {reason}; trying again for {self._timeout:g} seconds"))
        # What another thread has waited for in vain counts: the next one in its place must not wait as long again.
        left = self._timeout - (now - min(begun, since))
        if left <= 0:
            raise StorageError(
                f"{where}: has failed for --storage_timeout={self._timeout:g} seconds ({reason}); start again with "
                "--resume when it answers"
            )
        time.sleep(min(pause, left))

    def _make_room(self, size: int) -> None:
        """Removes the copies that were not used for the longest time until a file fits."""
        for copy in self._oldest_first():
            usage = shutil.disk_usage(self._copies)
            if usage.free - size > usage.total // 10:
                return
            with contextlib.suppress(OSError):
                copy.unlink()

    def _oldest_first(self) -> list[Path]:
        used = []
        for path in self._copies.rglob("*"):
            with contextlib.suppress(OSError):
                if path.is_file() and not path.name.startswith(".") and path.suffix != ".npz":
                    used.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(used)]


class _Parts(io.RawIOBase):
    """A file of known size whose parts are asked for one by one."""

    def __init__(self, block: Callable[[int, int], bytes], size: int) -> None:
        self._block, self._size, self._position = block, size, 0

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        count = max(0, end - self._position)
        buffer[:count] = self._block(self._position, end)[:count] if count else b""
        self._position += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec
    except ImportError:
        raise UserError(f"--data_dir={url}: needs fsspec (pip install 'fsspec[http]')") from None
    options: dict[str, Any] = {}
    try:
        if url.startswith(("http://", "https://")):
            import aiohttp

            # Below --storage_timeout, so that a connection over a cut network ends and is made again.
            limits = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=20)
            options = {"client_kwargs": {"timeout": limits, "trust_env": True}}
        return fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        raise UserError(f"--data_dir={url}: {error}") from None
    except ValueError as error:
        raise UserError(f"--data_dir={url}: is not a URL that can be read ({error})") from None


def _permanent(error: Exception) -> bool:
    """Returns whether a request cannot succeed: there is no such file, or it is not for us."""
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if isinstance(status, int) and status:
        return 400 <= status < 500 and status not in (408, 429)
    return isinstance(cause, (FileNotFoundError, PermissionError))


@contextlib.contextmanager
def _shared(path: Path) -> Iterator[BinaryIO | None]:
    """Opens a file that one rank of a machine has at a time; None where it cannot be written: each rank asks itself."""
    try:
        file = path.open("ab+")
    except OSError:
        yield None
        return
    with file:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        yield file


def _recent_sizes(file: BinaryIO) -> dict[str, int]:
    """Returns the bytes of each file by name, as another rank has written them just now; else nothing."""
    if time.time() - os.fstat(file.fileno()).st_mtime > _SIZES_HOLD:
        return {}
    file.seek(0)
    try:
        found = json.loads(file.read())
        return {str(name): int(size) for name, size in found.items()}
    except (ValueError, AttributeError, TypeError):  # empty, or cut by a full disk
        return {}


def _write_sizes(file: BinaryIO, sizes: Mapping[str, int]) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next rank asks itself
        file.truncate(0)
        os.write(file.fileno(), json.dumps(sizes).encode())


def _locked(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
