"""A cluster of launch/lab.sh, seen from outside: its hosts' processes can be found and killed, its links cut."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import time
from collections.abc import Sequence

from tests.ranks import ROOT
from tests.support import processes


class Host:
    """One host of a lab.

    Attributes:
      name: lab1, lab2, ...
      init: its first process, in our numbers: sshd.
    """

    def __init__(self, name: str, init: int):
        self.name, self.init = name, init
        self._space, self._own = _space(init), frozenset[int]()
        self._own = frozenset(self.processes())

    def start(self, command: Sequence[str], **options) -> subprocess.Popen:
        """Starts a command there, in the root of the checkout, with `options` of subprocess.Popen."""
        inside = ["nsenter", "--all", f"--target={self.init}", f"--wd={ROOT}", "--"]
        return subprocess.Popen([*inside, *command], start_new_session=True, **options)

    def link(self, state: str) -> None:
        """Sets its network `up` or `down`, at the host's own end."""
        subprocess.run(["nsenter", f"--net=/proc/{self.init}/ns/net", "ip", "link", "set", "eth0", state], check=True)

    def processes(self) -> list[int]:
        """All processes on it but those of the lab, in our numbers."""
        numbers = [int(entry.name) for entry in pathlib.Path("/proc").iterdir() if entry.name.isdigit()]
        return [n for n in numbers if n not in self._own and _space(n) == self._space and processes.alive(n)]

    def ranks(self, module: str) -> dict[int, int]:
        """Process number by rank of the processes that run a module as ranks."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(OSError, StopIteration):
                if pathlib.Path(f"/proc/{process}/cmdline").read_text().split("\0")[1:3] == ["-m", module]:
                    found[_rank(process)] = process
        return found


class Lab:
    """Starts the hosts, for a with statement."""

    def __init__(self, hosts: int, folder: pathlib.Path):
        self._process = subprocess.Popen(
            [ROOT / "launch" / "lab.sh", f"--hosts={hosts}", "--", "sh", "-c", "echo ready; exec sleep infinity"],
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout.readline() == "ready\n"
        self.hosts: list[Host] = []
        for number in range(1, hosts + 1):
            self.hosts.append(Host(f"lab{number}", self._init(f"lab{number}")))

    def _init(self, name: str) -> int:
        for process in processes.descendants(self._process.pid):
            try:
                status = pathlib.Path(f"/proc/{process}/status").read_text()
            except OSError:  # it has ended: what the lab starts its hosts with
                continue
            if status.partition("NSpid:")[2].split("\n")[0].split()[1:] == ["1"]:
                show = ["nsenter", "--uts", f"--target={process}", "hostname"]
                if subprocess.run(show, capture_output=True, text=True).stdout.strip() == name:
                    return process
        raise AssertionError(f"no {name}")

    def __enter__(self) -> Lab:
        """Returns itself."""
        return self

    def __exit__(self, *error) -> None:
        """Removes the hosts with all that runs on them."""
        self._process.terminate()
        self._process.communicate()

    def quiet_within(self, seconds: float, hosts: Sequence[Host] = ()) -> list[str]:
        """Waits until no process of a job is left on the hosts (all if none are named); what is left after all."""
        deadline = time.monotonic() + seconds
        while left := [_line(host, process) for host in hosts or self.hosts for process in host.processes()]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.2)
        return []


def _line(host: Host, process: int) -> str:
    with contextlib.suppress(OSError):
        words = pathlib.Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
        return f"{host.name}: {process} {words[:160]}"
    return f"{host.name}: {process}"


def _space(process: int) -> str:
    try:
        return str(pathlib.Path(f"/proc/{process}/ns/pid").readlink())
    except OSError:
        return ""


def _rank(process: int) -> int:
    """The rank that mpirun or Horovod's launcher gave a process; StopIteration if none did."""
    variables = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    names = (b"OMPI_COMM_WORLD_RANK", b"HOROVOD_RANK")
    return int(next(v.partition(b"=")[2] for v in variables if v.partition(b"=")[0] in names))
