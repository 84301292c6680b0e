"""Runs a launcher of ranks to its end
(`python -m hybrid_imagenet.resilience.supervisor -- LAUNCHER...`).

The launcher (mpirun or horovodrun) starts ranks on several hosts. Whatever becomes of them, this
process returns with the exit code that the ranks gave:

- The launcher may wait for ever for a host that is lost. A rank that ends the job says so
  (`exit_code`); when the launcher is still there some seconds later it is killed, with everything
  that it has started here.
- A request to stop (`stop_signals`) becomes SIGUSR1 to the launcher, which hands it on to the
  ranks; they save and leave. The third Ctrl-C or SIGTERM ends everything at once.
- Its own output may lose its reader, as in `| tee log` after Ctrl-C; the launcher writes to pipes
  that are always read.
- ssh to other hosts asks for signs of life, so that a lost host is noticed where no rank can tell.
- A rank of a user's program that ends before the others is named when these still run some time
  later, because with TensorFlow's engine they may wait forever. The job goes on, since rank 0 may
  just as well be saving results.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from hybrid_imagenet.comm import job_lines
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_NUMERICS,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
    printable,
)
from hybrid_imagenet.resilience import arrivals, exit_code, lasting_output, processes
from hybrid_imagenet.resilience.launcher_output import TAG, LauncherOutput
from hybrid_imagenet.resilience.stop_signals import REQUESTS, UNSAVED

_GRACE = 12.0  # seconds for a launcher to end after a rank has ended the job
_KILL_AFTER = 4.0  # seconds from SIGTERM to SIGKILL
_ORPHAN_GRACE = 10.0  # seconds in which ranks notice that their launcher is gone, save and leave
_KILLED_WITHIN = 3.0  # seconds until a killed process has gone
_ASK_EVERY = 2.0  # seconds between requests to ranks that do not answer
_RECENT = 60.0  # ends of ranks that were longer ago did not end the job: the others continued
_LEFT_PATIENCE = 30.0  # seconds that ranks may run on after another one has ended
# A line names at most as many ranks that have ended.
_MAX_NAMED_RANKS = 3
_ALIVE_EVERY = 5  # seconds between ssh's questions to a host that says nothing
_CONNECTS_WITHIN = (
    60  # seconds until ssh gives a host up that accepts a connection and says nothing
)
_START_LEAST = 60.0  # seconds until the first rank has started, or twice --stall_timeout
_CODE_SSH = 255  # mpirun's and ssh's when the connection to a host is lost
_DEFAULT_STALL = 300.0  # of --stall_timeout
_BY_SIGNAL = {-signal.SIGUSR1, -signal.SIGTERM, 128 + signal.SIGUSR1, 128 + signal.SIGTERM}


def _questions(stall_timeout: float) -> int:
    """How many unanswered questions end a connection: after the watchdog has judged, or a short
    outage is over.
    """
    return math.ceil((stall_timeout + 10) / _ALIVE_EVERY)


def ssh_options(stall_timeout: float) -> list[str]:
    """Returns ssh's options, by which it notices a lost host."""
    options = (
        f"ConnectTimeout={_CONNECTS_WITHIN}",
        f"ServerAliveInterval={_ALIVE_EVERY}",
        f"ServerAliveCountMax={_questions(stall_timeout)}",
    )
    return [word for option in options for word in ("-o", option)]


def daemon_options(stall_timeout: float) -> dict[str, str]:
    """Returns Open MPI's variables by which its daemon on a lost host notices that it is lost, and
    ends its ranks.
    """
    values = {"time": _ALIVE_EVERY, "intvl": _ALIVE_EVERY, "probes": _questions(stall_timeout)}
    return {f"OMPI_MCA_oob_tcp_keepalive_{name}": str(value) for name, value in values.items()}


def stall_timeout(words: Sequence[str]) -> float:
    """Returns `--stall_timeout` among the words of a command; its default if it is not there, or 0
    (never).
    """
    given = re.findall(r"(?<!\S)--?stall[_-]timeout[= ]([0-9.]+)(?!\S)", " ".join(words))
    try:
        return float(given[-1]) or _DEFAULT_STALL
    except (IndexError, ValueError):
        return _DEFAULT_STALL


class Supervisor:
    """Runs a launcher once, ends it if it stays, and leaves no process behind."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        stall: float = _DEFAULT_STALL,
        ssh_port: int | None = None,
        accept_new_host_keys: bool = False,
        saves: bool = True,
        places: Sequence[str] = (),
        is_local: bool = False,
    ):
        """Takes the launcher's words.

        Args:
          command: the launcher and its arguments.
          stall: --stall_timeout of the program.
          ssh_port: port of sshd on the hosts, for mpirun; None leaves it to ssh's configuration.
          accept_new_host_keys: let ssh trust hosts that it does not know yet; a key that has
          changed is refused.
          saves: the ranks save when they are asked to stop; a program of the user's own does not.
          places: the host of each rank, where these say when they have started.
          is_local: all ranks run on this host, so no connection to a host can be lost.
        """
        self._saves = saves
        self._is_local = is_local
        self._command = list(command)
        self._daemons = daemon_options(stall)
        self._ssh = [*ssh_options(stall), *(["-p", str(ssh_port)] if ssh_port else [])]
        if accept_new_host_keys:
            self._ssh += ["-o", "StrictHostKeyChecking=accept-new"]
        self._word = secrets.token_hex(16)
        self._ends: list[tuple[float, exit_code.End]] = []
        # Ranks whose programs have ended, with the time.
        self._left_ranks: dict[int, tuple[float, job_lines.Left]] = {}
        self._left_named = False
        self._output = LauncherOutput()
        self._places, self._arrivals = list(places), arrivals.Arrivals(places)
        self._began, self._started = time.monotonic(), time.time()
        self._start_limit = max(_START_LEAST, 2 * stall)
        self._asked = 0.0  # when the ranks were last asked to stop; 0 before
        self._forced = 0.0  # when the launcher was told to end because ranks have
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the launcher; returns the exit code."""
        adopt_orphans()
        what = "save and end" if self._saves else "end"
        REQUESTS.begin(self._ask_to_stop, self._force, f"the ranks are asked to {what}")
        try:
            self._child = child = subprocess.Popen(
                self._command,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C is for us
            )
            leash = _Leash(child.pid)
            if REQUESTS.stop:  # before the launcher had started
                self._ask_to_stop()
            readers = [
                _reading(_copy_output, child.stdout),
                _reading(self._read_errors, child.stderr),
            ]
            while (code := child.poll()) is None:
                self._push()
                time.sleep(0.05)
            self._child = None  # its number may soon be another process's
            leash.release()
            self._clear_up()
            for reader in readers:
                reader.join(2)  # it ends when no process holds the pipe any more
            return self._result(code)
        except FileNotFoundError:
            print(
                f"error: {self._command[0]}: no such program: run launch/setup.sh first",
                file=sys.stderr,
            )
            return EXIT_USAGE
        finally:
            REQUESTS.end()

    def _environment(self) -> dict[str, str]:
        env = self._daemons | os.environ | {exit_code.JOB_VARIABLE: self._word} | _terminal()
        ssh = shutil.which("ssh")
        if (
            ssh is not None
        ):  # without it Open MPI finds its own way, or starts ranks on this host only
            env.setdefault("OMPI_MCA_plm_rsh_agent", " ".join([ssh, *self._ssh]))
        return env

    def ask_to_stop(self, why: str) -> None:
        """Has the ranks save and leave, as a signal does; may be called from any thread."""
        self._ask_to_stop()
        print(why, file=sys.stderr, flush=True)

    def _ask_to_stop(self) -> None:
        child, self._asked = self._child, time.monotonic()
        if child is not None:
            with contextlib.suppress(OSError):
                os.kill(_behind_shell(child.pid), signal.SIGUSR1)

    def _read_errors(self, pipe: IO[bytes]) -> None:
        """Passes standard error on, without greetings and lines meant for this process."""
        for line in _lines(pipe):
            before, word, told = line.partition(self._word.encode())
            now, end = time.monotonic(), exit_code.find(told)
            if end is not None:
                self._ends.append((now, end))
            left = job_lines.find_left(told)
            if left is not None:
                self._left_ranks.setdefault(left.rank, (now, left))
            if word and (end is not None or left is not None or self._arrivals.heard(told, now)):
                line = b"" if TAG.fullmatch(before) else before + b"\n"
            if line:
                _print(self._output.passed_on(line))
            if self._output.mpi.are_fatal and not self._ends:
                # mpirun may wait forever for the other ranks. Not saved, as no rank has trained.
                self._ends.append((now, exit_code.End(EXIT_USAGE, False)))
        _print(self._output.rest())

    def _push(self) -> None:
        """Ends a launcher that does not end with its job."""
        now = time.monotonic()
        if self._asked and not self._ends and now - self._asked > _ASK_EVERY:
            self._ask_to_stop()  # mpirun loses a request that comes before it has started its ranks
        if late := self._arrivals.late(now):
            _print(late.encode())
        self._name_left_ranks(now)
        if (
            self._places
            and not self._arrivals.any
            and not self._ends
            and now - self._began > self._start_limit
        ):
            hosts = ",".join(
                f"{host}:{self._places.count(host)}" for host in dict.fromkeys(self._places)
            )
            _print(
                f"error: no rank has started after {now - self._began:.0f} s: a host or file system"
                f" does not answer: run hybrid-imagenet doctor -H {hosts}\n".encode()
            )
            self._ends.append((now, exit_code.End(EXIT_STALLED, True)))
        began = next((at for at, end in self._ends if end.code), None)
        if not self._forced and began is not None and now - began > _GRACE:
            self._forced = now
            processes.kill(_left())  # asked to end, mpirun would continue to wait, and say so
        elif self._forced and now - self._forced > _KILL_AFTER:
            processes.kill(_left())

    def _name_left_ranks(self, now: float) -> None:
        """Prints one line if some ranks still run long after others have ended."""
        left = self._early_leavers()
        if (
            self._left_named
            or not left
            or now - max(at for at, _ in self._left_ranks.values()) < _LEFT_PATIENCE
        ):
            return
        self._left_named = True
        size = left[0].size
        _print(
            f"warning: {_named(left)} ended without an error {_LEFT_PATIENCE:g} s ago (still"
            f" running: {size - len(left)} of {size} ranks). If the rest waits for it, press"
            " Ctrl-C, and end each loop by a number that all ranks share\n".encode()
        )

    def _early_leavers(self) -> list[job_lines.Left]:
        """Returns the ranks whose programs have ended, unless all have."""
        left = [each for _, each in sorted(self._left_ranks.values())]
        return left if left and len(left) < left[0].size else []

    def _force(self, number: int) -> None:
        child = self._child
        if child is not None and not self._forced:
            self._forced = time.monotonic()
            with contextlib.suppress(OSError):
                os.killpg(child.pid, signal.SIGTERM)

    def _clear_up(self) -> None:
        """Leaves nothing of the job on this host: ranks that lost their launcher save and leave, or
        are killed.
        """
        until = time.monotonic() + (0 if self._forced else _ORPHAN_GRACE)
        while (left := _left()) and time.monotonic() < until:
            time.sleep(0.1)
        processes.kill(left)
        until = time.monotonic() + _KILLED_WITHIN
        while left and _left() and time.monotonic() < until:
            time.sleep(0.05)
        processes.remove_shared_memory(self._started)

    def _result(self, code: int) -> int:
        """Returns the exit code of the job from `code`, the launcher's; prints the cause if no rank
        has printed one.
        """
        output, now = self._output, time.monotonic()
        by_ssh = code == _CODE_SSH and not output.ended  # else it is a rank's own
        ends = [end for at, end in self._ends if now - at < _RECENT]
        told = [
            end.code for end in ends if end.saved
        ]  # of others the launcher has ended some, and not said why
        if REQUESTS.forced and not {EXIT_OK, EXIT_PREEMPTED} & {code, *told}:
            return 128 + REQUESTS.forced
        if REQUESTS.stop and not all(end.saved for end in ends):
            return self._unsaved()
        if output.mpi.are_fatal and not (output.explained or told):
            print(output.mpi.summary(), file=sys.stderr)
            return EXIT_USAGE
        if not output.explained:
            _print(output.mpi.text())
        # What the request itself has ended is not named.
        asked = (
            REQUESTS.stop
            and output.killed
            and not _BY_SIGNAL.isdisjoint({code, 128 + output.killed.signal})
        )
        if output.killed and not (
            output.explained or asked or self._forced or EXIT_PREEMPTED in told
        ):
            print(output.killed, file=sys.stderr)
            return 128 + output.killed.signal
        if not output.explained:
            self._tell_what_was_lost(code)
        if (code == EXIT_PREEMPTED or code in _BY_SIGNAL) and ends and not told:
            return self._unsaved()
        announced = _announced(code, told)
        if announced == EXIT_PREEMPTED and output.lost_host and not REQUESTS.stop:
            # Nobody asked for a stop. With Horovod the ranks that lost the launcher's daemon can
            # still save, with TensorFlow's engine they cannot, but a lost host has one exit code.
            return EXIT_STALLED
        if announced is not None:
            return announced
        if REQUESTS.stop and (
            code in _BY_SIGNAL or (code == EXIT_FAILURE and not told)
        ):  # mpirun got the signal too
            return self._unsaved()
        if not told and (why := output.why_not_started(by_ssh=by_ssh)):
            print(why, file=sys.stderr)
            return EXIT_USAGE
        if by_ssh and not (told or output.lost_host) and self._nothing_connected():
            if not output.explained:
                print(
                    f"error: {self._command[0]} ended with exit code {code} before any rank had"
                    " started. Check it with hybrid-imagenet doctor.",
                    file=sys.stderr,
                )
            return EXIT_FAILURE
        if (by_ssh or output.lost_host) and not told:
            if not output.lost_host:
                print(
                    "error: the connection to a host is lost; start again with --resume",
                    file=sys.stderr,
                )
            return EXIT_STALLED
        if code < 0 and not REQUESTS.stop:
            name = signal.Signals(-code).name
            print(
                f"error: the launcher of the ranks was ended by {name}; start again with --resume",
                file=sys.stderr,
            )
        return code if code >= 0 else 128 - code

    def _nothing_connected(self) -> bool:
        """Returns whether no host can be lost: all ranks run here, or none of those that announce
        it has started.
        """
        return self._is_local or bool(self._places and not self._arrivals.any)

    def _tell_what_was_lost(self, code: int) -> None:
        """Says that a host is lost, or what a rank has said that lost another one."""
        lost = printable(self._output.lost_host)
        if not (lost and code and not REQUESTS.stop):
            _print(self._output.lost_rank)
            if self._output.lost_rank and (left := self._early_leavers()):
                print(
                    f"error: {_named(left)} ended before the others, without an error: end each"
                    " loop by a number that all ranks share",
                    file=sys.stderr,
                )
        elif self._places and not self._arrivals.any:
            print(
                f"error: host {lost} cannot be reached: check its name, the port and sshd there",
                file=sys.stderr,
            )
        else:
            print(
                f"error: the connection to host {lost} is lost; start again with --resume",
                file=sys.stderr,
            )

    def _unsaved(self) -> int:
        """Says that a request has come before the first save; returns its code."""
        print(
            UNSAVED if self._saves else "stopped: what the program saved before is kept",
            file=sys.stderr,
        )
        return REQUESTS.unsaved_code()


def _named(ranks: Sequence[job_lines.Left]) -> str:
    """Returns "rank 1 on HOST", or the first of several ranks and how many there are."""
    shown = [f"{each.rank} on {printable(each.host)}" for each in ranks[:_MAX_NAMED_RANKS]]
    more = len(ranks) - len(shown)
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}{f' and {more} more' if more else ''}"


def _announced(code: int, told: Sequence[int]) -> int | None:
    """Returns the exit code of the ranks: the launcher's, or the most telling one that a rank
    announced, or None.
    """
    if code in (EXIT_OK, EXIT_USAGE, EXIT_NUMERICS, EXIT_STALLED, EXIT_PREEMPTED):
        return code
    for telling in ((EXIT_USAGE, EXIT_NUMERICS, EXIT_STALLED), (EXIT_PREEMPTED,)):
        if found := [each for each in told if each in telling]:
            return found[0]
    return None


def _reading(work: Callable[[IO[bytes]], None], pipe: IO[bytes] | None) -> threading.Thread:
    thread = threading.Thread(target=work, args=(pipe,), daemon=True)
    thread.start()
    return thread


def _copy_output(pipe: IO[bytes]) -> None:
    """Passes standard output on. Open MPI would end the job at the tenth line that nobody reads."""
    while text := os.read(pipe.fileno(), 1 << 16):
        sys.stdout.buffer.write(text)
        sys.stdout.buffer.flush()


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yields lines, and what a progress bar writes over, as it comes."""
    left = b""
    while text := os.read(pipe.fileno(), 1 << 16):
        *lines, left = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", left + text)
        yield from lines
    yield left


def _print(line: bytes) -> None:
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()


class _Leash:
    """Ends the launcher if this process is killed, with a single SIGTERM.

    A second one makes mpirun leave at once, without its ranks. So the kernel's own signal
    (PR_SET_PDEATHSIG) does not serve: it is sent once for each thread of this process that inherits
    the launcher while the others end.
    """

    def __init__(self, process: int):
        """Starts a shell that waits for a line; the end of its input without one is this process's
        death.
        """
        self._shell = subprocess.Popen(
            ["sh", "-c", f"read line || kill -TERM {process}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # a Ctrl-C on the terminal is not for it
        )

    def release(self) -> None:
        """Lets go of a launcher that has ended: its number may soon be another process's."""
        self._shell.communicate(b"\n")


def _left() -> list[int]:
    """Returns processes that this one started or took over and that still run.

    ssh's shared connections may stay, and what a shell has started beside this process, as in
    `> >(tee log)`.
    """
    own = processes.descendants(os.getpid())
    return [
        p
        for p in own
        if not processes.words(p)[0].startswith("ssh: ") and processes.session(p) != os.getsid(0)
    ]


def _behind_shell(process: int) -> int:
    """Returns the launcher itself where a shell waits for it, as horovodrun becomes one; else the
    process.
    """
    if processes.words(process)[1:2] != ["-c"]:
        return process
    return next(iter(processes.children(process)), process)


def _terminal() -> dict[str, str]:
    """Tells ranks, which write into a pipe or Open MPI's pseudo-terminal in any case, what our own
    output is.
    """
    try:
        device = os.ttyname(sys.stdout.fileno())
    except OSError:  # a file or pipe, or a terminal of outside this container
        return {"HYBRID_IMAGENET_TERMINAL": "0"}
    size = shutil.get_terminal_size()
    # The rank that draws asks the terminal itself for its size where it can, which may change; else
    # it has this one.
    name = f"{socket.gethostname()}:{device}"
    return {
        "HYBRID_IMAGENET_TERMINAL": name,
        "LINES": str(size.lines),
        "COLUMNS": str(size.columns),
    }


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parent ends, so that they can be
    found.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def succeeds(command: str) -> bool:
    """Returns whether a command ends with code 0."""
    try:
        return subprocess.run(shlex.split(command), check=False).returncode == 0
    except (OSError, ValueError):
        return False


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher in the arguments after `--`."""
    command = list(arguments)[1:]
    if list(arguments)[:1] != ["--"] or not command:
        print(
            "error: usage: python -m hybrid_imagenet.resilience.supervisor -- LAUNCHER...",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return Supervisor(command, stall=stall_timeout(command)).run()


if __name__ == "__main__":
    lasting_output.install(lossy=True)
    REQUESTS.install()
    exit_status = main(sys.argv[1:])
    REQUESTS.ignore()
    sys.exit(exit_status)
