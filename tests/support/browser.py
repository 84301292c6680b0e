"""Opens pages in headless Chromium through the DevTools protocol, on a pipe."""

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_SECONDS = 60


def program():
    """Returns the path of Chromium, or None."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


needs_chromium = pytest.mark.skipif(
    program() is None, reason="needs Chromium (Debian: apt-get install chromium)"
)


class Browser:
    """A browser with one page.

    Attributes:
      problems: What the pages have logged as a warning or an error since they were opened.
    """

    def __init__(self, command_fd, answer_fd):
        self._command_fd = command_fd
        self._answer_fd = answer_fd
        self._unread = b""
        self._number = 0
        self._session = None
        self._loaded = False
        self.problems = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method, **parameters):
        """Sends a command of the protocol and returns its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._command_fd, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]

    def _read(self):
        """Returns the next message of the browser, and takes note of events."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._unread:
            seconds = deadline - time.monotonic()
            ready, _, _ = select.select([self._answer_fd], [], [], max(0, seconds))
            assert ready, f"Chromium has not answered for {ANSWER_SECONDS} s."
            received = os.read(self._answer_fd, 1 << 20)
            assert received, "Chromium has exited."
            self._unread += received
        first, _, self._unread = self._unread.partition(b"\0")
        message = json.loads(first)
        self._note_event(message.get("method"), message.get("params", {}))
        return message

    def _note_event(self, method, parameters):
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Log.entryAdded" and parameters["entry"]["level"] != "verbose":
            self.problems.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.problems.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Network.loadingFailed":
            self.problems.append(parameters["errorText"])

    def open(self, address, *, width=1280, scheme="light"):
        """Opens a page in a window of some width, with the light or the dark color scheme."""
        self.problems.clear()
        self._loaded = False
        self.resize(width)
        self.emulate(media="", scheme=scheme)
        self.send("Page.navigate", url=address)
        while not self._loaded:
            self._read()

    def resize(self, width):
        """Sets the width of the window."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )

    def emulate(self, *, media, scheme):
        """Sets the kind of medium ("" or "print") and the color scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.send("Emulation.setEmulatedMedia", media=media, features=features)

    def evaluate(self, expression):
        """Returns the value of an expression in JavaScript."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression):
        """Returns the value of an expression as soon as it is true, or else its last value."""
        deadline = time.monotonic() + ANSWER_SECONDS
        while not (value := self.evaluate(expression)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return value

    def click(self, selector):
        """Clicks an element where it is visible, as a user does."""
        x, y = self._center(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.send(
                "Input.dispatchMouseEvent",
                type=kind,
                x=x,
                y=y,
                button="left",
                clickCount=1,
            )

    def move(self, selector):
        """Moves the pointer to the middle of an element."""
        x, y = self._center(selector)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _center(self, selector):
        """Scrolls to an element; returns the position of its middle in the window."""
        return self.evaluate(
            f"(() => {{ const element = document.querySelector({json.dumps(selector)});"
            " element.scrollIntoView({block: 'center'});"
            " const box = element.getBoundingClientRect();"
            " return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )

    def pdf(self):
        """Returns the page as it is printed."""
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])


@contextlib.contextmanager
def browser(directory):
    """Starts Chromium and yields a `Browser`.

    Args:
      directory: Empty directory for the user data of the browser.
    """
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # Chromium reads commands from descriptor 3 and writes answers to descriptor 4.
    redirections = f'exec "$@" 3<&{command_read} 4>&{answer_write}'
    process = subprocess.Popen(
        ["bash", "-c", redirections, "bash", program(), *FLAGS, f"--user-data-dir={directory}"],
        pass_fds=(command_read, answer_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_read)
    os.close(answer_write)
    try:
        opened = Browser(command_write, answer_read)
        yield opened
        opened._session = None
        opened.send("Browser.close")
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        os.close(command_write)
        os.close(answer_read)
