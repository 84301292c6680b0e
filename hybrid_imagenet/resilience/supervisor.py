"""Runs the launcher of a job to its end.

Usage: `python -m hybrid_imagenet.resilience.supervisor -- LAUNCHER...`

The launcher (mpirun or horovodrun) starts ranks on several hosts. Whatever happens to them, this
process returns the exit code that the ranks gave:

- The launcher may wait forever for a host that is lost. But a rank that ends the job reports its
  exit code (`exit_code`), and if the launcher is still running some seconds later, it is killed
  together with everything that it has started on this host.
- A request to stop (`stop_signals`) becomes SIGUSR1 to the launcher, which passes it on to the
  ranks; they save and end. The third Ctrl-C or SIGTERM ends everything at once.
- The reader of this process's output may end, as in `| tee log` after Ctrl-C. The launcher never
  notices, because it writes to pipes that this process always reads.
- ssh and Open MPI's daemons send keep-alive messages to other hosts, so that a lost host is noticed
  even if no rank can report it.
- If a rank of a user's program ends long before the others, it is reported once, because with
  TensorFlow's engine the others may wait for it forever. The job continues, since rank 0 may just
  as well be saving results.
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

from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_NUMERICS,
    EXIT_OK,
    EXIT_PREEMPTED,
    EXIT_STALLED,
    EXIT_USAGE,
    printable,
)
from hybrid_imagenet.resilience import exit_code, lossy_stream, processes
from hybrid_imagenet.resilience.exit_code import RankExit
from hybrid_imagenet.resilience.job_result import JobResult, print_raw, ranks_and_hosts
from hybrid_imagenet.resilience.launcher_output import TAG, LauncherOutput, OutputTags
from hybrid_imagenet.resilience.startup_tracker import StartupTracker
from hybrid_imagenet.resilience.stop_signals import REQUESTS

_CHECK_SECONDS = 0.05
# How long the launcher may run after a rank has ended the job.
_LAUNCHER_GRACE_SECONDS = 12.0
_TERMINATE_TO_KILL_SECONDS = 4.0
# How long ranks may run after their launcher has ended, to notice it and to save.
_ORPHAN_GRACE_SECONDS = 10.0
# How long to wait until killed processes have disappeared.
_KILL_WAIT_SECONDS = 3.0
# How long to wait for the rest of the launcher's output.
_READ_WAIT_SECONDS = 2.0
# How often a request to stop is repeated. mpirun loses requests that come before it has started its
# ranks.
_REPEAT_REQUEST_SECONDS = 2.0
# Ignore rank exits older than this: the job kept running after them, so they are not why it
# stopped.
_MAX_RANK_EXIT_AGE_SECONDS = 60.0
# How long ranks may run after another one's program has ended, before that rank is reported.
_EARLY_RANK_PATIENCE_SECONDS = 30.0
# The first rank must start within twice --stall_timeout, but has at least this long.
_MIN_START_SECONDS = 60.0
_DEFAULT_STALL_TIMEOUT = 300.0
# How often ssh and Open MPI's daemons send a keep-alive message to a silent host.
_KEEPALIVE_INTERVAL_SECONDS = 5
# A connection survives --stall_timeout by this long, so that the watchdog can decide first.
_KEEPALIVE_GRACE_SECONDS = 10
# How long ssh waits for a host that accepts a connection but does not answer.
_CONNECT_SECONDS = 60
# From Linux's prctl.h.
_PR_SET_CHILD_SUBREAPER = 36


class Supervisor:
    """Runs a launcher once, ends it if it does not end itself, and leaves no process behind.

    Attributes:
      has_failed: Whether the program itself has ended a rank, by an exception or `sys.exit`, and
        not the loss of another rank; known after `run`.
      run_directory: The directory in which the training program records its run, or "".
      has_saved: Whether a script has saved a checkpoint.
      can_continue: Whether a script has a checkpoint, from which the same command continues.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        stall_timeout: float = _DEFAULT_STALL_TIMEOUT,
        ssh_port: int | None = None,
        accept_new_host_keys: bool = False,
        is_script: bool = False,
        rank_hosts: Sequence[str] = (),
        ranks_report_start: bool = False,
        is_local: bool = False,
    ):
        """Stores the launcher's command and what is known about its ranks.

        Args:
          command: The launcher and its arguments.
          stall_timeout: --stall_timeout of the program, in seconds.
          ssh_port: Port of sshd on the hosts, for mpirun; None means ssh's configuration.
          accept_new_host_keys: Let ssh trust hosts that it does not know yet; it still rejects a
            key that has changed.
          is_script: Whether the ranks run a script of the user, which need not save when it is
            asked to stop.
          rank_hosts: The host of each rank, if it is known.
          ranks_report_start: Whether the ranks report when they have started.
          is_local: Whether all ranks run on this host, so that no connection to a host can be lost.
        """
        self.has_failed = False
        self.run_directory = ""
        self.has_saved = False
        self.can_continue = False
        self._command = list(command)
        self._is_script = is_script
        self._rank_hosts = list(rank_hosts)
        self._ranks_report_start = ranks_report_start
        self._is_local = is_local
        self._start_limit = max(_MIN_START_SECONDS, 2 * stall_timeout)
        self._daemon_variables = daemon_variables(stall_timeout)
        self._ssh_options = ssh_options(stall_timeout)
        if ssh_port:
            self._ssh_options += ["-p", str(ssh_port)]
        if accept_new_host_keys:
            self._ssh_options += ["-o", "StrictHostKeyChecking=accept-new"]
        # Lines that begin with this word are for the supervisor. It is random, so that no rank
        # prints it by chance.
        self._job_word = secrets.token_hex(16)
        self._output = LauncherOutput()
        self._startup = StartupTracker(rank_hosts)
        # Ends of ranks that may end the job, with the time at which they were reported.
        self._rank_exits: list[tuple[float, RankExit]] = []
        # Failures of the program on some ranks, in the order in which they were reported.
        self._failures: list[job_lines.RankFailure] = []
        # Ranks whose programs have ended without an error, with the time.
        self._ended_programs: dict[int, tuple[float, job_lines.ProgramEnd]] = {}
        self._has_named_early_ranks = False
        self._began = time.monotonic()
        self._began_since_1970 = time.time()
        # When the ranks were last asked to stop; 0 before the first request.
        self._last_request = 0.0
        # When the launcher was killed or asked to end at once; 0 before.
        self._ended_launcher_at = 0.0
        self._launcher: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Runs the launcher and returns the exit code of the job."""
        adopt_orphans()
        action = "end" if self._is_script else "save and end"
        REQUESTS.begin(self._request_stop, self._end_at_once, f"the ranks are asked to {action}")
        try:
            code = self._run_launcher()
        except FileNotFoundError:
            print(
                f"error: {self._command[0]} was not found. Run launch/setup.sh first.",
                file=sys.stderr,
            )
            return EXIT_USAGE
        else:
            return self._result(code)
        finally:
            REQUESTS.end()

    def _run_launcher(self) -> int:
        """Runs the launcher and returns its exit code."""
        self._launcher = launcher = subprocess.Popen(
            self._command,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # The terminal sends Ctrl-C to this process only.
            start_new_session=True,
        )
        guard = ParentDeathGuard(launcher.pid)
        # A request that came before the launcher was started has not reached it.
        if REQUESTS.stop:
            self._request_stop()
        readers = [
            _start_reader(_copy_output, launcher.stdout),
            _start_reader(self._read_errors, launcher.stderr),
        ]
        while (code := launcher.poll()) is None:
            self._check_job()
            time.sleep(_CHECK_SECONDS)
        # From here on no signal may be sent to the launcher: its process number may soon belong to
        # another process.
        self._launcher = None
        guard.release()
        self._end_remaining_processes()
        # A reader ends when no process has the pipe open any more.
        for reader in readers:
            reader.join(_READ_WAIT_SECONDS)
        return code

    def _environment(self) -> dict[str, str]:
        env = {
            **self._daemon_variables,
            **os.environ,
            exit_code.JOB_VARIABLE: self._job_word,
            **_terminal_variables(),
        }
        ssh = shutil.which("ssh")
        # Without ssh, Open MPI looks for another way, or starts ranks on this host only.
        if ssh is not None:
            env.setdefault("OMPI_MCA_plm_rsh_agent", " ".join([ssh, *self._ssh_options]))
        return env

    def ask_to_stop(self, reason: str) -> None:
        """Has the ranks save and end, as a signal does.

        Any thread may call this.

        Args:
          reason: A line for the user.
        """
        self._request_stop()
        print(reason, file=sys.stderr, flush=True)

    def _request_stop(self) -> None:
        launcher = self._launcher
        self._last_request = time.monotonic()
        if launcher is not None:
            with contextlib.suppress(OSError):
                os.kill(_launcher_in_shell(launcher.pid), signal.SIGUSR1)

    def _end_at_once(self, number: int) -> None:
        launcher = self._launcher
        if launcher is not None and not self._ended_launcher_at:
            self._ended_launcher_at = time.monotonic()
            with contextlib.suppress(OSError):
                os.killpg(launcher.pid, signal.SIGTERM)

    def _read_errors(self, pipe: IO[bytes]) -> None:
        """Passes on standard error, without greetings and without lines for this process."""
        for line in _lines(pipe):
            line_for_user = self._record_job_line(line)
            if line_for_user:
                print_raw(self._output.filter(line_for_user))
            if self._output.mpi_errors.are_fatal and not self._rank_exits:
                # mpirun may wait forever for the other ranks. No rank has trained, so none has
                # saved.
                self._rank_exits.append((time.monotonic(), RankExit(EXIT_USAGE, saved=False)))
        print_raw(self._output.flush())

    def _record_job_line(self, line: bytes) -> bytes:
        """Records a line addressed to the supervisor; returns the text for the user.

        Ranks write such lines with the job's word first. Their launcher puts a tag before it, or
        another rank's unfinished line comes before it.
        """
        before, word, message = line.partition(self._job_word.encode())
        now = time.monotonic()
        rank_exit = exit_code.parse_exit(message)
        if rank_exit is not None:
            self._rank_exits.append((now, rank_exit))
        ended_program = job_lines.parse_program_end(message)
        if ended_program is not None:
            self._ended_programs.setdefault(ended_program.rank, (now, ended_program))
        if not word:
            return line
        hung_rank = self._startup.report_hung_rank(message)
        if hung_rank is not None:
            return hung_rank.encode()
        is_job_line = (
            rank_exit is not None
            or ended_program is not None
            or self._record_failure(message)
            or self._record_saved_run(message)
            or self._startup.record(message, now)
        )
        if not is_job_line:
            return line
        return b"" if TAG.fullmatch(before) else before + b"\n"

    def _record_failure(self, message: bytes) -> bool:
        """Stores the failure that a rank reports; returns False for any other line."""
        failure = job_lines.parse_failure(message)
        if failure is None:
            return False
        self._failures.append(failure)
        return True

    def _record_saved_run(self, message: bytes) -> bool:
        """Stores from where training can continue; returns False for any other line."""
        saved_run = job_lines.parse_saved_run(message)
        if saved_run is None:
            return False
        if saved_run.kind == "run":
            self.run_directory = saved_run.directory
        else:
            self.can_continue = True
            self.has_saved = self.has_saved or saved_run.kind == "saved"
        return True

    def _check_job(self) -> None:
        """Repeats requests, reports late ranks, and ends a launcher that does not end itself."""
        now = time.monotonic()
        if (
            self._last_request
            and not self._rank_exits
            and now - self._last_request > _REPEAT_REQUEST_SECONDS
        ):
            self._request_stop()
        late_ranks = self._startup.report_late_ranks(now)
        if late_ranks:
            print_raw(late_ranks.encode())
        self._name_early_ranks(now)
        self._check_start(now)
        self._end_launcher_after_job(now)

    def _name_early_ranks(self, now: float) -> None:
        """Prints one line if some ranks are still running long after others have ended."""
        early_ranks = self._early_ranks()
        if self._has_named_early_ranks or not early_ranks:
            return
        latest_end = max(ended for ended, _ in self._ended_programs.values())
        if now - latest_end < _EARLY_RANK_PATIENCE_SECONDS:
            return
        self._has_named_early_ranks = True
        size = early_ranks[0].size
        line = (
            f"warning: {ranks_and_hosts(early_ranks)} ended without an error"
            f" {_EARLY_RANK_PATIENCE_SECONDS:g} s ago (still running: {size - len(early_ranks)} of"
            f" {size} ranks). If the rest waits for it, press Ctrl-C, and end each loop after a"
            " number of steps that all ranks share.\n"
        )
        print_raw(line.encode())

    def _early_ranks(self) -> list[job_lines.ProgramEnd]:
        """Returns the ranks whose programs have ended, or [] if all have."""
        ranks = [rank for _, rank in sorted(self._ended_programs.values())]
        if not ranks or len(ranks) >= ranks[0].size:
            return []
        return ranks

    def _no_rank_started(self) -> bool:
        """Returns whether the ranks report when they have started, and none has."""
        return self._ranks_report_start and not self._startup.any_rank_started

    def _check_start(self, now: float) -> None:
        """Ends the job if no rank starts in time."""
        elapsed = now - self._began
        if not self._no_rank_started() or self._rank_exits or elapsed <= self._start_limit:
            return
        # A dictionary keeps the order of the hosts and removes duplicates.
        hosts = dict.fromkeys(self._rank_hosts)
        host_list = ",".join(f"{host}:{self._rank_hosts.count(host)}" for host in hosts)
        line = (
            f"error: No rank has started after {elapsed:.0f} s, because a host or file system does"
            f" not answer. Run hybrid-imagenet doctor -H {host_list}\n"
        )
        print_raw(line.encode())
        self._rank_exits.append((now, RankExit(EXIT_STALLED, saved=True)))

    def _end_launcher_after_job(self, now: float) -> None:
        """Kills the launcher some time after a rank has ended the job, or after a third signal."""
        failures = (reported for reported, rank_exit in self._rank_exits if rank_exit.code)
        first_failure = next(failures, None)
        if self._ended_launcher_at:
            if now - self._ended_launcher_at > _TERMINATE_TO_KILL_SECONDS:
                processes.kill(_remaining_processes())
        elif first_failure is not None and now - first_failure > _LAUNCHER_GRACE_SECONDS:
            self._ended_launcher_at = now
            # SIGKILL at once, because mpirun would answer SIGTERM by a message and wait on.
            processes.kill(_remaining_processes())

    def _end_remaining_processes(self) -> None:
        """Ends all processes of the job on this host.

        Ranks that have lost their launcher have time to save, unless the job was ended by force.
        """
        grace = 0.0 if self._ended_launcher_at else _ORPHAN_GRACE_SECONDS
        deadline = time.monotonic() + grace
        while (remaining := _remaining_processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        processes.kill(remaining)
        if remaining:
            deadline = time.monotonic() + _KILL_WAIT_SECONDS
            while _remaining_processes() and time.monotonic() < deadline:
                time.sleep(0.05)
        processes.remove_shared_memory(self._began_since_1970)

    def _result(self, launcher_code: int) -> int:
        """Returns the exit code of the job; prints the cause if no rank has printed one."""
        now = time.monotonic()
        result = JobResult(
            launcher=self._command[0],
            launcher_code=launcher_code,
            output=self._output,
            rank_exits=[
                rank_exit
                for reported, rank_exit in self._rank_exits
                if now - reported < _MAX_RANK_EXIT_AGE_SECONDS
            ],
            failures=self._failures,
            requests=REQUESTS,
            rank_hosts=self._rank_hosts,
            early_ranks=self._early_ranks(),
            was_killed=bool(self._ended_launcher_at),
            is_script=self._is_script,
            all_ranks_are_local=self._is_local,
            no_rank_started=self._no_rank_started(),
        )
        code = result.exit_code()
        # A module of the user that fails before `hi.init()`, as at an import, reports nothing.
        failed_at_import = self._output.ranks_exited and not self._output.lost_rank_line
        self.has_failed = any(failure.code == code for failure in self._failures) or (
            failed_at_import and code == EXIT_FAILURE
        )
        return code


class ParentDeathGuard:
    """Ends the launcher with a single SIGTERM if this process is killed.

    A second SIGTERM makes mpirun end at once, without its ranks. So the kernel's own signal
    (PR_SET_PDEATHSIG) cannot be used: it is sent once for each thread of this process that becomes
    the launcher's parent while the others end.
    """

    def __init__(self, process: int):
        """Starts a shell that waits for a line from this process.

        If its input ends without a line, this process has died.
        """
        self._shell = subprocess.Popen(
            ["sh", "-c", f"read line || kill -TERM {process}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C on the terminal must not end it.
            start_new_session=True,
        )

    def release(self) -> None:
        """Ends the shell; call it when the launcher has ended.

        Its process number may soon belong to another process.
        """
        self._shell.communicate(b"\n")


def ssh_options(stall_timeout: float) -> list[str]:
    """Returns options of ssh that make it notice a lost host."""
    settings = (
        f"ConnectTimeout={_CONNECT_SECONDS}",
        f"ServerAliveInterval={_KEEPALIVE_INTERVAL_SECONDS}",
        f"ServerAliveCountMax={_max_unanswered_keepalives(stall_timeout)}",
    )
    options = []
    for setting in settings:
        options += ["-o", setting]
    return options


def daemon_variables(stall_timeout: float) -> dict[str, str]:
    """Returns variables that make Open MPI's daemon notice that its host is cut off.

    The daemon then ends its ranks.
    """
    prefix = "OMPI_MCA_oob_tcp_keepalive"
    return {
        f"{prefix}_time": str(_KEEPALIVE_INTERVAL_SECONDS),
        f"{prefix}_intvl": str(_KEEPALIVE_INTERVAL_SECONDS),
        f"{prefix}_probes": str(_max_unanswered_keepalives(stall_timeout)),
    }


def _max_unanswered_keepalives(stall_timeout: float) -> int:
    """Returns how many unanswered messages end a connection.

    By then the watchdog has decided, or a short outage of the network is over.
    """
    return math.ceil((stall_timeout + _KEEPALIVE_GRACE_SECONDS) / _KEEPALIVE_INTERVAL_SECONDS)


def stall_timeout_of(words: Sequence[str]) -> float:
    """Returns --stall_timeout in the words of a command, in seconds.

    Returns its default if the flag is missing, not valid, or 0 (never).
    """
    values = re.findall(r"(?<!\S)--?stall[_-]timeout[= ]([0-9.]+)(?!\S)", " ".join(words))
    if not values:
        return _DEFAULT_STALL_TIMEOUT
    try:
        return float(values[-1]) or _DEFAULT_STALL_TIMEOUT
    except ValueError:
        return _DEFAULT_STALL_TIMEOUT


def adopt_orphans() -> None:
    """Makes this process the parent of all descendants whose own parent ends.

    Otherwise they could not be found any more.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def print_next_command(supervisor: Supervisor, code: int, script_command: str = "") -> None:
    """Prints the command that continues after a job, if there is one.

    Nothing is printed for exit codes whose messages say what to change first, and if rank 0 of the
    training program has printed the command.

    Args:
      supervisor: Supervisor of the job, which has ended.
      code: Exit code of the job.
      script_command: Command that has started a script of the user.
    """
    if code in (EXIT_OK, EXIT_USAGE, EXIT_NUMERICS):
        return
    command = ""
    if supervisor.run_directory:
        if code not in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
            command = shlex.join(["hybrid-imagenet", "resume", supervisor.run_directory])
    elif supervisor.can_continue:
        command = script_command
    if command:
        print(f"next: {printable(command)}", file=sys.stderr, flush=True)


def succeeds(command: str) -> bool:
    """Runs a command and returns whether it ends with code 0."""
    try:
        return subprocess.run(shlex.split(command), check=False).returncode == 0
    except (OSError, ValueError):
        return False


def _start_reader(read: Callable[[IO[bytes]], None], pipe: IO[bytes] | None) -> threading.Thread:
    thread = threading.Thread(target=read, args=(pipe,), daemon=True)
    thread.start()
    return thread


def _copy_output(pipe: IO[bytes]) -> None:
    """Passes on standard output without the tags of rank 0.

    The pipe must always be read, because Open MPI ends the job at the tenth line that is not read.
    """
    tags = OutputTags()
    while text := os.read(pipe.fileno(), 1 << 16):
        sys.stdout.buffer.write(tags.remove(text))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(tags.flush())
    sys.stdout.buffer.flush()


def _lines(pipe: IO[bytes]) -> Iterator[bytes]:
    """Yields lines as they come, and each state of a progress bar, which ends with a return."""
    rest = b""
    while text := os.read(pipe.fileno(), 1 << 16):
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", rest + text)
        yield from lines
    yield rest


def _remaining_processes() -> list[int]:
    """Returns the processes that this one has started or adopted and that are still running.

    Two kinds are left out because they may stay: shared connections of ssh, and processes of this
    process's session, which a shell has started, as in `> >(tee log)`.
    """
    session = os.getsid(0)
    return [
        process
        for process in processes.descendants(os.getpid())
        if not processes.command_line(process)[0].startswith("ssh: ")
        and processes.session(process) != session
    ]


def _launcher_in_shell(process: int) -> int:
    """Returns the launcher that a shell waits for, as that of horovodrun; else the process."""
    if processes.command_line(process)[1:2] != ["-c"]:
        return process
    return next(iter(processes.children(process)), process)


def _terminal_variables() -> dict[str, str]:
    """Returns variables that describe this process's standard output to the ranks.

    The ranks cannot see it: they write to a pipe or to a pseudo-terminal of Open MPI.
    """
    try:
        device = os.ttyname(sys.stdout.fileno())
    except OSError:
        # A file, a pipe, or a terminal outside this container.
        return {"HYBRID_IMAGENET_TERMINAL": "0"}
    # The rank that draws asks the terminal for its size, which may change, and uses this one only
    # where it cannot.
    size = shutil.get_terminal_size()
    return {
        "HYBRID_IMAGENET_TERMINAL": f"{socket.gethostname()}:{device}",
        "LINES": str(size.lines),
        "COLUMNS": str(size.columns),
    }


def main(arguments: Sequence[str]) -> int:
    """Runs the launcher in the arguments after `--` and returns the exit code of the job."""
    separator = list(arguments[:1])
    command = list(arguments[1:])
    if separator != ["--"] or not command:
        print(
            "error: usage: python -m hybrid_imagenet.resilience.supervisor -- LAUNCHER...",
            file=sys.stderr,
        )
        return EXIT_USAGE
    supervisor = Supervisor(command, stall_timeout=stall_timeout_of(command))
    code = supervisor.run()
    print_next_command(supervisor, code)
    return code


if __name__ == "__main__":
    lossy_stream.install(ignore_write_errors=True)
    REQUESTS.install()
    exit_status = main(sys.argv[1:])
    REQUESTS.ignore()
    sys.exit(exit_status)
