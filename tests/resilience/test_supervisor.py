"""Tests the exit code and the output of a supervised launcher. Shell scripts replace mpirun."""

import mmap
import os
import signal
import socket
import subprocess
import time

import pytest

from hybrid_imagenet.comm import lost_rank
from hybrid_imagenet.resilience import exit_code, supervisor
from hybrid_imagenet.resilience.launcher_output import LauncherOutput, OutputTags
from hybrid_imagenet.resilience.processes import remove_shared_memory
from tests.support import processes


def start(script, *words, orphans=0.5):
    return processes.python(
        "-m", "tests.resilience.hasty_supervisor", script, orphans, *words, start_new_session=True
    )


def finish(process, seconds=30):
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err, time.monotonic() - began


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 137", 137),
        ("kill -KILL $$", 137),
        # mpirun returns another code than the rank.
        ("echo $WORD ends 3 >&2; exit 1", 3),
        # The first rank was asked to stop because of the second.
        ("echo $WORD ends 75 >&2; echo $WORD ends 4 >&2; exit 1", 4),
        ("echo $WORD ends 1 >&2; echo $WORD ends 75 >&2; exit 1", 75),
        # A scheduler has sent the signal to the ranks themselves.
        ("echo $WORD ends 75 unsaved >&2; exit 75", 75),
        # mpirun has ended this rank, because another one has failed.
        ("echo $WORD ends 75 unsaved >&2; exit 1", 1),
        # mpirun has ended this rank, because a connection is lost.
        ("echo $WORD ends 75 unsaved >&2; exit 255", 4),
        # ssh and mpirun return 255 when a connection is lost.
        ("exit 255", 4),
    ],
)
def test_supervisor_returns_the_exit_code_of_the_ranks(script, code):
    assert finish(start(script))[0] == code


@pytest.mark.parametrize(
    ("script", "lines"),
    [
        (
            "exit 255",
            [
                "error: sh ended with exit code 255 before any rank had started. Check it with"
                " hybrid-imagenet doctor."
            ],
        ),
        ("echo 'error: rank 0: no data' >&2; exit 255", ["error: rank 0: no data"]),
    ],
)
def test_supervisor_of_local_ranks_does_not_report_code_255_as_a_lost_host(script, lines):
    code, _, errors, _ = finish(start(script, "local"))
    assert code == 1
    assert errors.splitlines() == lines


MPI_INIT = """\
[vm:07315] PMIX ERROR: OUT-OF-RESOURCE in file /openmpi-4.1.8/opal/mca/pmix/x/dstore_base.c at line 661
[vm:07323] OPAL ERROR: Error in file /openmpi-4.1.8/opal/mca/pmix/pmix3x/pmix3x_client.c at line 111
[vm:07265] [[28831,0],0] ORTE_ERROR_LOG: Data unpack would read past end of buffer in file /x/show_help.c at line 501
*** An error occurred in MPI_Init_thread
*** on a NULL communicator
*** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,
***    and potentially your MPI job)
[1,0]<stderr>:[vm:07323] Local abort before MPI_INIT completed completed successfully, but am not able to aggregate
"""  # noqa: E501
NO_NETWORK = f"""\
[vm:06788] opal_ifinit: unable to find network interfaces.
[vm:06788] oob_tcp: problems getting address for index 0 (kernel index -1)
{"-" * 74}
No network interfaces were found for out-of-band communications. We require
at least one available network for out-of-band messaging.
{"-" * 74}
"""


@pytest.mark.parametrize(
    ("printed", "end", "reason"),
    [
        (MPI_INIT, "exit 1", "OUT-OF-RESOURCE"),
        # mpirun waits for the other rank.
        (MPI_INIT, "sleep 300", "OUT-OF-RESOURCE"),
        (NO_NETWORK, "exit 1", "No network interfaces were found for out-of-band communications"),
    ],
)
def test_supervisor_prints_one_line_if_open_mpi_cannot_start(printed, end, reason, tmp_path):
    (tmp_path / "printed").write_text(printed)
    code, _, errors, _ = finish(start(f"cat {tmp_path}/printed >&2; {end}"))
    assert code == 2
    assert errors.startswith(f"error: Open MPI could not start the ranks ({reason}")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("exit 0", 0, []),
        (
            "echo broken >&2; exit 3",
            3,
            ["broken", "error: sh ended with exit code 3, and no rank has printed why."],
        ),
    ],
    ids=["good", "fails"],
)
def test_supervisor_prints_errors_of_open_mpi_that_were_not_fatal(end, code, last, tmp_path):
    complaint = MPI_INIT.splitlines()[2]
    (tmp_path / "printed").write_text(f"{complaint}\n")
    exit_code_of_job, _, errors, _ = finish(start(f"cat {tmp_path}/printed >&2; {end}"))
    assert exit_code_of_job == code
    assert sorted(errors.splitlines()) == sorted([complaint, *last])


UNKNOWN_HOST = (
    "error: ssh cannot resolve the host name nowhere. Check -H, and that `ssh nowhere true` works."
)
NO_LOGIN = (
    "error: ssh cannot log in without a password. Check the hosts with hybrid-imagenet doctor -H"
    " HOST,..."
)


@pytest.mark.parametrize(
    ("printed", "end", "is_printed", "expected"),
    [
        (
            "ssh: Could not resolve hostname nowhere: Name or service not known",
            255,
            False,
            UNKNOWN_HOST,
        ),
        ("Host key verification failed.", 255, True, NO_LOGIN),
        ("me@far: Permission denied (publickey,password).", 255, True, NO_LOGIN),
        (
            "bash: line 1: /opt/clone/.venv/bin/orted: No such file or directory",
            127,
            True,
            "Run launch/setup.sh there.",
        ),
    ],
)
def test_supervisor_does_not_report_a_host_without_login_or_program_as_lost(
    printed, end, is_printed, expected
):
    code, _, err, _ = finish(start(f"echo '{printed}' >&2; exit {end}"))
    assert code == 2
    *before, last = err.splitlines()
    assert before == ([printed] if is_printed else [])
    assert last.endswith(expected)


EXITED = """{rule}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[31357,1],3]
  Exit code:    255
{rule}
"""
LEFT = """{rule}
mpirun has exited due to process rank 3 with PID 0 on
node far exiting improperly. There are three reasons this could occur:
{rule}
"""


@pytest.mark.parametrize(
    ("report", "code", "expected"),
    [
        (EXITED, 255, "error: rank 3 ended with exit code 255 and without a message"),
        (LEFT, 1, "error: rank 3 ended before the others, without a message"),
    ],
    ids=["code", "os._exit(0)"],
)
def test_supervisor_names_a_rank_that_ended_without_a_message(report, code, expected, tmp_path):
    (tmp_path / "printed").write_text(report.format(rule=RULE))
    result, _, errors, _ = finish(start(f"cat {tmp_path}/printed >&2; exit {code}"))
    assert result == code
    (line,) = errors.splitlines()
    assert line.startswith(expected)


def test_supervisor_does_not_name_a_rank_that_has_printed_its_traceback(tmp_path):
    trace = "Traceback (most recent call last):\nValueError: 1\n"
    (tmp_path / "printed").write_text(trace + EXITED.format(rule=RULE))
    assert finish(start(f"cat {tmp_path}/printed >&2; exit 255"))[:3] == (255, "", trace)


def test_supervisor_prints_a_progress_bar_while_it_moves():
    process = start("for i in 1 2 3 4 5; do printf '\\r%s0 %%' $i >&2; sleep 0.3; done")
    output = ""
    while "10 %" not in output:
        output += process.stderr.read(1)
    assert process.poll() is None
    assert finish(process)[0] == 0


def test_remaining_processes_are_only_those_in_another_session(tmp_path):
    same_session = subprocess.Popen(["sleep", "100"])
    other_session = subprocess.Popen(["sleep", "100"], start_new_session=True)
    try:
        assert other_session.pid in supervisor._remaining_processes()
        assert same_session.pid not in supervisor._remaining_processes()
    finally:
        same_session.kill()
        other_session.kill()


@pytest.mark.parametrize(
    "printed",
    [
        (
            f"{'-' * 74}\nORTE has lost communication with a remote daemon.\n\n  HNP daemon   :"
            " [[3,0],0] on node near\n  Remote daemon: [[31450,0],2] on node far\n\nIt is usually"
            f" due to a failure.\n{'-' * 74}\n"
        ),
        "Timeout, server far not responding.\n",
        "Connection to far closed by remote host.\n",
        "ssh: connect to host far port 22: No route to host\n",
    ],
)
def test_supervisor_names_a_lost_host_even_if_ranks_had_nothing_to_save(printed, tmp_path):
    (tmp_path / "printed").write_text(printed)
    # mpirun returns 205 when it has lost its daemon, and ssh returns 255.
    launcher_code = 205 if "ORTE" in printed else 255
    code, _, err, _ = finish(
        start(f"echo $WORD ends 75 unsaved >&2; cat {tmp_path}/printed >&2; exit {launcher_code}")
    )
    assert code == 4
    assert err.splitlines()[-1] == "error: the connection to host far is lost"
    assert "ORTE" not in err


@pytest.mark.parametrize(
    "end", ["exit 75", "echo $WORD ends 75 >&2; exit 205", "echo $WORD ends 4 >&2; exit 205"]
)
def test_supervisor_returns_4_for_a_lost_host_whether_or_not_ranks_could_save(end):
    process = start(
        f"echo 'Connection to far closed by remote host.' >&2; echo $WORD ends 75 >&2; {end}"
    )
    code, _, err, _ = finish(process)
    assert code == 4
    assert err.splitlines()[-1] == "error: the connection to host far is lost"


def test_supervisor_of_a_job_asked_to_stop_returns_75_even_after_a_lost_host(tmp_path):
    loses_host = (
        'echo "Connection to far closed by remote host." >&2; echo $WORD ends 75 >&2; exit 205'
    )
    process = start_ready(f"trap '{loses_host}' USR1", tmp_path)
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 75


RULE = "-" * 74
REPORT = f"""{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun noticed that process rank 3 with PID 0 on node far exited on signal 9 (Killed).
{RULE}
"""
KILLED = (
    "error: rank 3 on far was killed by signal 9 (SIGKILL). The kernel does this when memory runs"
    " out: check dmesg"
)
NO_GPU_MEMORY = (
    "F0000 00:00:1 cuda_driver.cc:312] failed to create stream: CUDA_ERROR_OUT_OF_MEMORY: out of"
    " memory"
)
LOSS = f"{lost_rank.LOST_RANK_PREFIX} (Connection closed by peer)"


@pytest.mark.parametrize(
    ("printed", "ends", "code", "beginnings"),
    [
        (REPORT, [], 137, [KILLED]),
        # The other ranks have lost the connection to it.
        (f"{LOSS}\n{LOSS}\n{REPORT}", [4, 4], 137, [KILLED]),
        # mpirun has ended the others before the first step.
        (REPORT, ["75 unsaved"] * 2, 137, [KILLED]),
        (
            f"process rank 3 on node far exited on signal 11\n{LOSS}\n",
            [4],
            139,
            ["error: rank 3 on far was killed by signal 11 (SIGSEGV)."],
        ),
        (
            "process rank 3 on node far exited on signal 35\n",
            [4],
            163,
            ["error: rank 3 on far was killed by signal 35."],
        ),
        (
            f"{NO_GPU_MEMORY}\nprocess rank 3 on node far exited on signal 6\n",
            [],
            134,
            [
                NO_GPU_MEMORY,
                (
                    "error: rank 3 on far was killed by signal 6 (SIGABRT) because its GPU ran out"
                    " of memory"
                ),
            ],
        ),
        (f"{LOSS}\n[1,2]<stderr>:{LOSS}\n", [4, 4], 4, [LOSS]),
        (
            f"error: rank 3 on far hung for 20 s\n{REPORT}",
            [4, 4],
            4,
            ["error: rank 3 on far hung for 20 s"],
        ),
        (
            REPORT.replace(
                "noticed that process rank 3",
                "detected that one or more processes exited with non-zero status, thus causing",
            ),
            [3],
            3,
            [],
        ),
        (f"{RULE}\nmy own table\n{RULE}\n", [3], 3, [RULE, "my own table", RULE]),
    ],
)
def test_supervisor_names_a_killed_rank_and_prints_its_loss_at_most_once(
    printed, ends, code, beginnings, tmp_path
):
    (tmp_path / "printed").write_text(printed)
    words = "".join(f"echo $WORD ends {end} >&2; " for end in ends)
    job_code, _, err, _ = finish(start(f"cat {tmp_path}/printed >&2; {words} exit 137"))
    assert job_code == code
    lines = err.splitlines()
    assert len(lines) == len(beginnings)
    for line, beginning in zip(lines, beginnings, strict=True):
        assert line.startswith(beginning)


def test_supervisor_prints_one_line_if_all_ranks_load_too_slowly(tmp_path):
    stages = [f"at {rank} of 3 on far {rank}\tloading TensorFlow\tframe" for rank in range(3)]
    hangs = [f"hung 120 60\tloading TensorFlow\terror: rank {rank} hung" for rank in range(3)]
    (tmp_path / "printed").write_text("".join(f"WORD {line}\n" for line in [*stages, *hangs]))
    printing = f'sed "s/WORD/$WORD/" {tmp_path}/printed >&2'
    code, _, errors, _ = finish(start(f"{printing}; echo $WORD ends 4 >&2; exit 4"))
    assert code == 4
    assert errors.startswith("error: all 3 ranks are still loading TensorFlow after 120 s, ")
    assert errors.count("\n") == 1


def test_supervisor_removes_the_tags_of_rank_0_and_keeps_those_of_other_ranks():
    script = (
        "echo '[1,0]<stdout>:step 1[1,0]<stdout>:'; echo '[1,1]<stdout>:from rank 1';"
        "echo '[1,0]<stderr>:warning' >&2; echo '[1,10]<stderr>:from rank 10' >&2; printf '[1,0'"
    )
    _, out, errors, _ = finish(start(script))
    assert out == "step 1\n[1,1]<stdout>:from rank 1\n[1,0"
    assert errors == "warning\n[1,10]<stderr>:from rank 10\n"


def test_output_tags_removes_a_tag_wherever_the_output_is_split():
    text = b"a\n[1,0]<stdout>:b [1, 2] [1,1]<stdout>:c"
    for position in range(len(text)):
        tags = OutputTags()
        pieces = [tags.remove(text[:position]), tags.remove(text[position:]), tags.flush()]
        assert b"".join(pieces) == b"a\nb [1, 2] [1,1]<stdout>:c"


LIBRARIES = """\
[vm:20108] Read -1, expected 35724, errno = 3
[lab1:18] [[31425,0],0] ORTE_ERROR_LOG: Out of resource in file /x/orte/util/show_help.c at line 507
[2026-11-23 03:08:31.694658: E /x/horovod/common/operations.cc:712] [1]: Horovod background loop uncaught exception: [/x
E0000 00:00:1795403255.688099   19609 base_collective_executor.cc:252] BaseCollectiveExecutor::StartAbort UN
E0000 00:00:1795403255.688611   19507 ring_alg.cc:291] Aborting RingReduce with UNAVAILABLE: Collective ops
[warn] Epoll MOD(1) on fd 20 failed.  Old events were 6; read change was 0 (none); write change was 2 (del): Bad file descriptor
[1,0]<stderr>:/job:worker/replica:0/task:2
[1,0]<stderr>:Additional GRPC error information from remote target /job:worker/replica:0/task:2 while calling
"""  # noqa: E501


def test_supervisor_drops_messages_of_libraries_about_a_lost_rank(tmp_path):
    lines = LIBRARIES.splitlines()
    program_lines = [f"rank 1 says: {line[:20]}" for line in lines]
    (tmp_path / "printed").write_text("\n".join([*lines, *program_lines, ""]))
    _, _, err, _ = finish(start(f"cat {tmp_path}/printed >&2; exit 1"))
    *kept, last = err.splitlines()
    assert kept == [line.replace("[1,0]<stderr>:", "") for line in program_lines]
    assert last.startswith("error: sh ended with exit code 1")


def test_supervisor_kills_a_launcher_that_hangs_after_a_rank_has_ended_the_job(tmp_path):
    script = (
        f"setsid sleep 301 & echo $! >{tmp_path}/pid; trap '' TERM USR1; "
        "echo 'error: rank 1 hung' >&2; echo [1,0]'<stderr>:'$WORD ends 4 >&2; sleep 300"
    )
    code, _, err, seconds = finish(start(script))
    assert code == 4
    assert err == "error: rank 1 hung\n"
    assert seconds < 15
    assert not processes.alive(int((tmp_path / "pid").read_text()))


def test_supervisor_gives_ranks_limited_time_to_save_after_their_launcher_has_died(tmp_path):
    saves = (
        f"(trap '' TERM; sleep 1; touch {tmp_path}/saved) & setsid sleep 302 & echo $!"
        f" >{tmp_path}/pid; kill -KILL $$"
    )
    code, _, err, _ = finish(start(saves, orphans=3))
    assert (code, err.count("was killed by SIGKILL\n")) == (137, 1)
    assert (tmp_path / "saved").exists()
    assert not processes.alive(int((tmp_path / "pid").read_text()))


def start_ready(script, folder):
    """Returns a supervised launcher that waits for signals.

    It is not `sh -c`, because the supervisor would send requests to the child of such a shell.
    """
    (folder / "script").write_text(f"{script}\necho ready\nwhile :; do sleep 0.1; done\n")
    process = start(f"export WORD; exec sh {folder}/script")
    assert process.stdout.readline() == "ready\n"
    return process


UNSAVED = "trap 'echo $WORD ends 75 unsaved >&2; echo $WORD ends 4 >&2; exit 75' USR1"


@pytest.mark.parametrize(
    "script", ["true", UNSAVED], ids=["no rank hears it", "ranks have nothing to save"]
)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_supervisor_after_a_signal_before_the_first_save_returns_the_code_of_a_stop(
    script, number, code, tmp_path
):
    process = start_ready(script, tmp_path)
    process.send_signal(number)
    job_code, _, err, _ = finish(process)
    assert job_code == code
    assert err.count("nothing new to save") == 1


def test_supervisor_names_a_rank_that_was_killed_before_a_request(tmp_path):
    # This happens if the user presses Ctrl-C after memory has run out, but before the launcher
    # reports it.
    (tmp_path / "printed").write_text(REPORT)
    process = start_ready(f"trap 'cat {tmp_path}/printed >&2; exit 137' USR1", tmp_path)
    process.send_signal(signal.SIGTERM)
    code, _, err, _ = finish(process)
    assert code == 137
    assert err.splitlines()[-1].startswith(KILLED)


def test_supervisor_repeats_a_request_that_the_launcher_has_lost(tmp_path):
    process = start_ready("trap 'test $heard && exit 75; heard=1' USR1", tmp_path)
    process.send_signal(signal.SIGTERM)
    code, _, err, _ = finish(process)
    assert code == 75
    assert err.count("\n") == 1


def test_supervisor_after_a_third_signal_ends_the_job_at_once(tmp_path):
    process = start_ready("trap '' USR1 TERM", tmp_path)
    for _ in range(3):
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    code, _, err, _ = finish(process)
    assert code == 143
    assert ["SIGTERM: " in line for line in err.splitlines()] == [True] * 3


def test_supervisor_without_a_reader_and_after_two_hangups_lets_the_job_save(tmp_path):
    # This happens after Ctrl-C with `| tee log`, or when ssh ends. The job prints more than a pipe
    # can hold.
    saves = (
        f"yes line | head -n 50000; yes error | head -n 50000 >&2; touch {tmp_path}/saved; exit 75"
    )
    process = start_ready(f"trap '{saves}' USR1", tmp_path)
    process.stdout.close()
    process.stderr.close()
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)
    assert process.wait(30) == 75
    assert (tmp_path / "saved").exists()


def test_launcher_whose_supervisor_is_killed_gets_one_signal(tmp_path):
    # After two signals mpirun would end at once, without its ranks.
    script = (
        f"trap 'echo signal >>{tmp_path}/$$' TERM; sleep 3 & sleep 1; echo $$; wait; wait; wait"
    )
    # There are six jobs, because two signals may arrive as one.
    jobs = [start(script) for _ in range(6)]
    launchers = [int(process.stdout.readline()) for process in jobs]
    for process in jobs:
        os.kill(process.pid, signal.SIGKILL)
        finish(process)
    assert processes.gone_within(launchers, 20)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["signal\n"] * 6


@pytest.mark.parametrize(
    ("line", "is_kept"),
    [
        (
            (
                b"[1,0]<stderr>:WARNING: All log messages before absl::InitializeLog() is called"
                b" are written to STDERR\n"
            ),
            False,
        ),
        (
            (
                b"[1,0]<stderr>:I0000 00:00:1795883687.922083   23123 port.cc:153] oneDNN custom"
                b" operations are on.\n"
            ),
            False,
        ),
        (
            (
                b"I0000 00:00:1795710763.345429   15667 grpc_server_lib.cc:466] Started server with"
                b" target: grpc://h:1\n"
            ),
            False,
        ),
        (
            (
                b"I0000 00:00:1795710801.437513    2081 device_compiler.h:196] Compiled cluster"
                b" using XLA!\n"
            ),
            False,
        ),
        (b"E0000 00:00:1795710801.437513    2081 executor.cc:19] Out of memory\n", True),
        (b"W0000 00:00:1795710801.437513    2081 executor.cc:19] Slow\n", True),
    ],
)
def test_launcher_output_drops_information_logged_by_tensorflow(line, is_kept):
    assert LauncherOutput().filter(line) == (line if is_kept else b"")


LEFT = "$WORD left 1 of 2 on far"


def test_supervisor_names_a_rank_that_ended_while_others_continue():
    code, _, err, _ = finish(start(f"echo {LEFT} >&2; sleep 2; echo $WORD left 0 of 2 on near >&2"))
    assert code == 0
    assert err.splitlines() == [
        "warning: rank 1 on far ended without an error 0.5 s ago (still running: 1 of 2 ranks). If"
        " the rest waits for it, press Ctrl-C, and end each loop after a number of steps that all"
        " ranks share."
    ]


def test_supervisor_names_no_rank_when_all_have_ended():
    code, _, err, _ = finish(start(f"echo {LEFT} >&2; echo $WORD left 0 of 2 on near >&2; sleep 2"))
    assert (code, err) == (0, "")


def test_supervisor_names_the_rank_that_ended_before_another_one_lost_it():
    code, _, err, _ = finish(start(f"echo '{LOSS}' >&2; echo {LEFT} >&2; exit 1"))
    assert code == 1
    assert err.splitlines() == [
        LOSS,
        (
            "error: rank 1 on far ended before the others, without an error. End each loop after a"
            " number of steps that all ranks share."
        ),
    ]


@pytest.mark.parametrize(
    ("line", "ranks_exited", "has_failed"),
    [
        # A rank reports an exception, and another one loses it.
        (f"$WORD failed 1 on far 1 error\tfailed: ValueError: x\n{LOSS}", True, True),
        (LOSS, True, False),
        # It ended before it could report anything, as at an import.
        ("ModuleNotFoundError: No module named 'x'", True, True),
        # The launcher has ended without its ranks.
        ("", False, False),
    ],
)
def test_supervisor_tells_an_exception_of_a_rank_from_the_loss_of_another(
    line, ranks_exited, has_failed
):
    job = supervisor.Supervisor(["mpirun"], is_script=True)
    for each_line in line.replace("$WORD", job._job_word).encode().splitlines(keepends=True):
        job._output.filter(job._record_job_line(each_line))
    job._output.ranks_exited = ranks_exited
    assert job._result(1) == 1
    assert job.has_failed == has_failed


RESUME = "next: hybrid-imagenet resume 'runs/my run'\n"
START_AGAIN = "next: hybrid-imagenet run mine.py\n"


@pytest.mark.parametrize(
    ("lines", "code", "expected"),
    [
        # The training program saves checkpoints, too.
        (["run\truns/my run", "saved\t"], 1, RESUME),
        (["run\truns/my run"], 137, RESUME),
        # Rank 0 of the program has printed it.
        (["run\truns/my run", "saved\t"], 75, ""),
        (["saved\t"], 1, START_AGAIN),
        (["restored\t"], 4, START_AGAIN),
        (["saved\t"], 75, START_AGAIN),
        ([], 1, ""),
        # The messages say what to change first.
        (["saved\t"], 2, ""),
        (["saved\t"], 3, ""),
        (["saved\t"], 0, ""),
    ],
)
def test_print_next_command_prints_the_command_that_continues(lines, code, expected, capfd):
    job = supervisor.Supervisor(["mpirun"])
    for line in lines:
        assert job._record_job_line(f"{job._job_word} {line}\n".encode()) == b""
    supervisor.print_next_command(job, code, "hybrid-imagenet run mine.py")
    assert capfd.readouterr().err == expected


def test_supervisor_without_its_launcher_prints_one_line():
    code, _, err, _ = finish(
        processes.python("-m", "hybrid_imagenet.resilience.supervisor", "--", "no-such-mpirun")
    )
    assert code == 2
    assert err == "error: no-such-mpirun was not found. Run launch/setup.sh first.\n"


def test_ssh_options_keep_a_connection_longer_than_the_stall_timeout():
    for stall in (20, 300):
        connects, interval, count = (
            int(word.partition("=")[2]) for word in supervisor.ssh_options(stall)[1::2]
        )
        # The connection lasts at most one interval longer than necessary.
        assert stall + 10 <= interval * count < stall + 20
        assert connects == 60
        assert list(supervisor.daemon_variables(stall).values()) == ["5", "5", str(count)]
    assert supervisor.stall_timeout_of(["x", "--stall_timeout=20", "--stall_timeout=45"]) == 45
    assert supervisor.stall_timeout_of(["--stall-timeout", "20"]) == 20
    assert (
        supervisor.stall_timeout_of(["--stall_timeout=0"])
        == supervisor.stall_timeout_of(["--stall_timeout=.5.5"])
        == 300
    )


def test_notify_exit_prints_the_code_only_on_a_supervised_rank(capfd):
    word = "0123456789abcdef" * 2
    exit_code.notify_exit(4, {})
    exit_code.notify_exit(4, {exit_code.JOB_VARIABLE: "x; y"})
    assert capfd.readouterr().err == ""
    exit_code.notify_exit(4, {exit_code.JOB_VARIABLE: word})
    exit_code.notify_exit(75, {exit_code.JOB_VARIABLE: word}, saved=False)
    ends = [
        exit_code.parse_exit(line.removeprefix(word).encode())
        for line in capfd.readouterr().err.splitlines()
    ]
    assert ends == [(4, True), (75, False)]
    assert exit_code.parse_exit(b" ends 7x5") is exit_code.parse_exit(b"x ends 4") is None


def test_remove_shared_memory_removes_only_unmapped_files_of_the_job(tmp_path):
    names = {
        name: tmp_path / f"vader_segment.{socket.gethostname()}.{os.getuid()}.{name}"
        for name in "abcd"
    }
    now = time.time()
    for path, age in zip(names.values(), (20, 20, 99, 0), strict=True):
        path.write_bytes(bytes(mmap.PAGESIZE))
        os.utime(path, (now - age, now - age))
    other = tmp_path / "vader_segment.other.0.a"
    other.touch()
    os.utime(other, (now - 20, now - 20))
    with names["b"].open("r+b") as file, mmap.mmap(file.fileno(), 0):
        remove_shared_memory(now - 60, tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([names["b"], names["c"], names["d"], other])
