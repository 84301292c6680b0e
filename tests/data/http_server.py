"""Serves a directory over HTTP, answers range requests, and logs all requests.

The server can be killed, or kill itself after some answers.
"""

import http.server
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.ranks import ROOT, environment


class Handler(http.server.SimpleHTTPRequestHandler):
    """Answers requests for files and ranges of files."""

    ranges = True
    # The number of ranges after which the server kills itself.
    dies_after = None
    protocol_version = "HTTP/1.1"
    sent = itertools.count(1)

    def do_GET(self):
        if self.path.startswith("/api/"):
            self._answer_as_hub(self.path.partition("?")[0])
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if not (self.ranges and match and Path(path).is_file()):
            super().do_GET()
            return
        if self.dies_after is not None and next(self.sent) > self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        start, last = map(int, match.groups())
        content = Path(path).read_bytes()
        part = content[start : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{start + len(part) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)

    def _answer_as_hub(self, path):
        """Answers as the Hugging Face hub does about the repository me/tiny and its files."""
        folder = Path(path.partition("/tree/main")[2].lstrip("/"))
        about = {"id": "me/tiny", "sha": "a" * 40, "private": False, "siblings": []}
        entries = [
            {
                "type": "directory" if entry.is_dir() else "file",
                "path": str(entry),
                "size": entry.stat().st_size,
                "oid": "0" * 40,
            }
            for entry in (sorted(folder.iterdir()) if "/tree/main" in path else ())
        ]
        content = json.dumps(entries if "/tree/main" in path else about).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def translate_path(self, path):
        return super().translate_path(path.removeprefix("/datasets/me/tiny/resolve/main"))

    def log_request(self, code="-", size="-"):
        # This is one system call. Lines that threads print at the same time would be mixed, and
        # requests() would miss them.
        os.write(
            sys.stdout.fileno(),
            f"{self.command} {self.path} {self.headers.get('Range', '')}\n".encode(),
        )

    def log_error(self, form, *arguments):
        """Prints nothing."""


class Server:
    """Starts and kills a process that serves a directory on a port.

    The port stays the same when the server starts again.
    """

    def __init__(self, directory, log, *, ranges=True, dies_after=None):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._log = log
        self._ranges = str(int(ranges))
        self._process = None
        self.start(dies_after)

    def start(self, dies_after=None):
        """Starts the server and waits until it answers.

        With `dies_after`, the server kills itself after that many ranges of files.
        """
        command = [
            sys.executable,
            "-m",
            "tests.data.http_server",
            str(self.port),
            str(self._directory),
        ]
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [*command, self._ranges, str(dies_after or "")],
                cwd=ROOT,
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        for _ in range(600):
            with socket.socket() as attempt:
                if attempt.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(self._log.read_text())

    def kill(self):
        """Kills the server, as a power failure would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def requests(self):
        """Returns the requests so far: method, path and range of each."""
        lines = [line.split(" ") for line in self._log.read_text().splitlines()]
        return [tuple(line) for line in lines if len(line) == 3 and line[0] in ("GET", "HEAD")]


if __name__ == "__main__":
    port, directory, ranges, dies_after = sys.argv[1:]
    Handler.ranges = bool(int(ranges))
    Handler.dies_after = int(dies_after) if dies_after else None
    os.chdir(directory)
    http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
