"""Removes what Open MPI leaves on a host when it is killed together with its ranks.

That is 4 MiB of shared memory for each rank (`/dev/shm/vader_segment.*`) and about 8 MiB of files for each job in the
temporary directory (`ompi.HOST.UID/pid.*`). mpirun and its daemons remove them at the end of a job; after SIGKILL to
all of them nobody does.

Other programs use Open MPI too, so only what is provably ours and dead is removed. Before MPI starts, each rank writes
a note into /dev/shm that names what it will leave, and locks it; the kernel releases the lock when the process has
ended, in whatever container it ran. A note that can be locked is that of a dead rank.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NoReturn

SHARED = Path("/dev/shm")
_NOTE = "hybrid_imagenet_rank"
_SEGMENT = "vader_segment"  # of Open MPI 4, shared memory between the ranks of a host
_MAX_BYTES = 1 << 12  # of a note
_NOTE_NAME = re.compile(_NOTE + r"\.([A-Za-z0-9._-]+\.[0-9]+\.[0-9a-f]+\.[0-9]+)")

_held: dict[str, int] = {}  # file descriptor of this process's note, by the part of its name after the first dot


def hold(environ: Mapping[str, str] | None = None) -> None:
    """Writes and locks this rank's note; for a process of mpirun before it starts MPI. Repeated calls do nothing.

    Does nothing without mpirun, or where /dev/shm cannot be written: then there is nothing to be removed either.
    """
    env = os.environ if environ is None else environ
    key = _key(env)
    if key is None or _held:
        return
    parent = os.getppid()
    facts = {
        "session": env.get("OMPI_MCA_orte_jobfam_session_dir", ""),
        "daemon": [parent, _started(parent)],
        "above": _parent(parent),
        "namespace": _namespace(),
    }
    note = _locked(SHARED / f"{_NOTE}.{key}")
    if note is None:
        return
    _held[key] = note
    atexit.register(release)
    with contextlib.suppress(OSError):  # no room: the note tells nothing but its name
        os.ftruncate(note, 0)
        os.write(note, json.dumps(facts).encode())


def release() -> None:
    """Removes this rank's shared memory and note; if the daemon of the job is gone, also what the job has left.

    The note stays for the next sweep if who started the daemon is gone: then the daemon will not end in order either.
    For the end of a process. The other ranks are not disturbed: memory that is mapped stays until they end.
    """
    for key in list(_held):
        note = _held.pop(key, None)
        if note is None:  # another thread ends this process too
            continue
        facts = _facts(note)
        _remove(SHARED / f"{_SEGMENT}.{key}")
        if _daemon_is_gone(facts):
            os.close(note)
            sweep()
        else:
            if _parent(os.getppid()) == facts.get("above"):
                _remove(SHARED / f"{_NOTE}.{key}")
            os.close(note)


def end_process(code: int) -> NoReturn:
    """Ends this process at once, without what a normal exit does, but for its shared memory."""
    release()
    os._exit(code)


def sweep() -> list[Path]:
    """Removes what dead ranks of this user have left on this host; returns what was removed, without the notes."""
    dead: list[tuple[Path, int]] = []
    in_use: set[object] = set()
    removed: list[Path] = []
    try:
        for path in sorted(SHARED.glob(f"{_NOTE}.*")):
            note = _opened(path)
            if note is None:
                continue
            if _lock(note):
                dead.append((path, note))
            else:
                in_use.add(_facts(note).get("session"))
                os.close(note)
        for path, note in dead:
            facts = _facts(note)
            segment = SHARED / f"{_SEGMENT}.{path.name.partition('.')[2]}"
            if _remove(segment):
                removed.append(segment)
            session = facts.get("session")
            if isinstance(session, str) and _is_session(Path(session)):
                if session in in_use or not _daemon_is_gone(facts):
                    continue  # the note stays as long as there is something to be removed
                shutil.rmtree(session, ignore_errors=True)
                removed.append(Path(session))
            _remove(path)
    finally:
        for _, note in dead:
            os.close(note)
    return removed


def remove_sessions(daemons: Iterable[int]) -> None:
    """Removes the files of mpirun processes of this host that the caller has started and killed."""
    names = {name for node in [os.uname().nodename] for name in (node, node.partition(".")[0])}
    for daemon in daemons:
        for name in names:
            session = Path(tempfile.gettempdir(), f"ompi.{name}.{os.geteuid()}", f"pid.{daemon}")
            if not _started(daemon) and _is_session(session):
                shutil.rmtree(session, ignore_errors=True)


def _key(env: Mapping[str, str]) -> str | None:
    """Returns what the names of this rank's segment and note share; None for a process that mpirun did not start."""
    job, host = env.get("PMIX_NAMESPACE", ""), env.get("PMIX_HOSTNAME", "")
    local = env.get("OMPI_COMM_WORLD_LOCAL_RANK", "")
    if not (job.isdecimal() and local.isdecimal() and re.fullmatch(r"[A-Za-z0-9._-]+", host)):
        return None
    return f"{host}.{os.geteuid()}.{int(job):x}.{local}"


def _locked(path: Path) -> int | None:
    """Returns a descriptor of a note that is this process's; None if there cannot be one."""
    for _ in range(20):
        try:
            note = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        if _lock(note) and os.fstat(note).st_nlink:
            return note
        os.close(note)  # another process is just looking at it, or has removed it
        time.sleep(0.01)
    return None


def _lock(note: int) -> bool:
    try:
        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _opened(path: Path) -> int | None:
    """Returns a descriptor of a note of this user; None for anything else."""
    if not _NOTE_NAME.fullmatch(path.name):
        return None
    try:
        note = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(note)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return note
    os.close(note)
    return None


def _facts(note: int) -> Mapping[str, object]:
    """Returns what a note says; nothing if its rank was killed while it wrote it."""
    try:
        facts = json.loads(os.pread(note, _MAX_BYTES, 0))
    except (OSError, ValueError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _daemon_is_gone(facts: Mapping[str, object]) -> bool:
    """Returns whether mpirun, or its daemon on this host, has ended; False where that cannot be seen from here."""
    daemon = facts.get("daemon")
    if not isinstance(daemon, list) or len(daemon) != 2 or facts.get("namespace") != _namespace():
        return False
    return _started(daemon[0]) != daemon[1]


def _is_session(path: Path) -> bool:
    """Returns whether this is a directory that Open MPI made for one job of this user."""
    try:
        status = path.lstat()
    except OSError:
        return False
    named = re.fullmatch(rf"ompi\..+\.{os.geteuid()}/(pid|jf)\.[0-9]+", f"{path.parent.name}/{path.name}")
    return bool(named) and path.is_absolute() and stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _started(process: object) -> str:
    """Returns when a process began, in ticks since the start of the system; empty if there is none."""
    words = _status(process)
    return words[19] if words and words[0] not in "ZX" else ""


def _parent(process: int) -> str:
    """Returns the number of a process's parent; empty if there is no such process."""
    return (_status(process) or ["", ""])[1]


def _status(process: object) -> list[str]:
    try:
        # The second field, the command, is in parentheses and may hold spaces.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _namespace() -> str:
    """Returns the name of the space in which this process's numbers of processes hold."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True
