"""Serves a report on the loopback while its runs continue: the page of the file, rebuilt when they grow."""

from __future__ import annotations

import hashlib
import http.server
import pathlib
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import state

ADDRESS = "127.0.0.1"
_FILES = ("config.json", "metrics.jsonl", "summary.json")
_NAMES = (ADDRESS, "localhost")  # what a request may call this server; a page elsewhere could give it another name
_PATIENCE = 30.0  # seconds for a request


class Live:
    """The page of a report, kept until a file of its runs changes.

    Attributes:
      paths: the directories of the runs.
    """

    def __init__(self, paths: Sequence[str], build: Callable[[], str]):
        self.paths = [pathlib.Path(path) for path in paths]
        self._build = build
        self._lock = threading.Lock()
        self._seen: object = None
        self._page = b""
        self._tag = ""

    def page(self) -> tuple[bytes, str]:
        """The page and a tag that changes with it.

        Raises:
          UserError: if a run cannot be read.
        """
        with self._lock:
            seen = [
                (state.lock_holder(path), *(_stamp(path / name) for name in _FILES))  # a killed run frees its lock
                for path in self.paths
            ]
            if seen != self._seen:
                self._page = self._build().encode()
                self._tag = f'"{hashlib.sha256(self._page).hexdigest()[:32]}"'
                self._seen = seen
            return self._page, self._tag


def _stamp(path: pathlib.Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def server(live: Live, port: int) -> http.server.ThreadingHTTPServer:
    """A server of the page at `/`, and of nothing else, on the loopback alone.

    Args:
      live: the page.
      port: 0 takes any that is free.

    Raises:
      UserError: if the port cannot be had.
    """

    class Handler(_Handler):
        shown = live

    try:
        found = http.server.ThreadingHTTPServer((ADDRESS, port), Handler)
    except OSError as error:
        raise UserError(f"--port={port}: {error.strerror or error}; give another, or 0 for any that is free") from None
    found.daemon_threads = True
    return found


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers requests for the page; no part of a request is ever used as a path."""

    shown: Live
    server_version, sys_version = "hybrid-imagenet", ""
    timeout = _PATIENCE

    def do_GET(self) -> None:
        """Sends the page, or that it has not changed."""
        if self.headers.get("Host", "").rpartition(":")[0] not in _NAMES:
            return self._send(HTTPStatus.FORBIDDEN, b"ask for 127.0.0.1 or localhost\n")
        if self.path.partition("?")[0] != "/":
            return self._send(HTTPStatus.NOT_FOUND, b"there is nothing but /\n")
        try:
            page, tag = self.shown.page()
        except UserError as error:
            return self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n".encode(errors="replace"))
        if self.headers.get("If-None-Match") == tag:
            return self._send(HTTPStatus.NOT_MODIFIED, b"", tag)
        return self._send(HTTPStatus.OK, page, tag, "text/html")

    def do_HEAD(self) -> None:
        """Sends what GET would, without the page."""
        self.do_GET()

    def _send(self, status: HTTPStatus, body: bytes, tag: str = "", kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("X-Report", "live")  # the page's script asks again only where it finds this
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""
