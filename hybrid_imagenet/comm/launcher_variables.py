"""Reads a rank's place and the ranks' addresses where no mpirun has started them: from TF_CONFIG,
or from Slurm's srun.

TensorFlow's engine (--engine=tensorflow) needs nothing else to connect the ranks; Horovod needs
MPI.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence

from hybrid_imagenet.errors import UserError

# Under srun a job's ports begin at a number made of the job's: 312 times 64, for up to 64 ranks on
# a host.
_FIRST_PORT, _JOBS, _PORTS_OF_JOB = 20000, 312, 64
_NODE = re.compile(r"(?:[^][,]|\[[\d,-]+\])+")
_NODE_LIST = re.compile(rf"{_NODE.pattern}(?:,{_NODE.pattern})*")
_MAX_NODES = 1 << 16
_CHIEF = "chief"
_MASTER = "master"  # the chief's name in TensorFlow 1
_WORKER = "worker"
_ROLES = (_CHIEF, _WORKER)  # in the order of ranks
_UNSUPPORTED_JOBS = {
    "evaluator": "rank 0 and the workers evaluate between epochs",
    "ps": "gradients are summed among the workers, without parameter servers",
}
_TF_CONFIG_FORM = (
    'TF_CONFIG cannot be read: give {"cluster": {"worker": ["host:port", ...]}, "task": {"type":'
    ' "worker", "index": 0}}, or unset it'
)
_SRUN = ("SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_PROCID", "SLURM_JOB_ID")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks of a job.

    Attributes:
      rank: of this process.
      servers: the address of each rank, `host:port`.
    """

    rank: int
    servers: tuple[str, ...]

    def local(self) -> tuple[int, int]:
        """Returns this rank's number among those of its host, and how many these are."""
        hosts = [server.rpartition(":")[0] for server in self.servers]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        return here.index(self.rank), len(here)


def read(environ: Mapping[str, str]) -> Cluster | None:
    """Returns the cluster that TF_CONFIG or srun describes; None without either, or for a single
    process.

    Raises:
      UserError: for a TF_CONFIG or Slurm variables that cannot be read, or a role that is not
        supported.
    """
    cluster = _from_tf_config(environ["TF_CONFIG"]) if environ.get("TF_CONFIG") else None
    if cluster is None:
        cluster = _from_srun(environ)
    return cluster if cluster is not None and len(cluster.servers) > 1 else None


def _from_tf_config(text: str) -> Cluster | None:
    """Reads TensorFlow's own form: {"cluster": {"worker": ["host:port", ...]}, "task": {"type":
    ..., "index": ...}}.

    As in TensorFlow, the master is the chief under its old name, and a configuration without a
    cluster is a single process.
    """
    try:
        config = json.loads(text)
        jobs = {
            _CHIEF if job == _MASTER else job: list(servers)
            for job, servers in config.get("cluster", {}).items()
        }
        if not jobs:
            return None
        kind = str(config["task"]["type"])
        index = int(config["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(_TF_CONFIG_FORM) from None
    kind = _CHIEF if kind == _MASTER else kind
    unsupported = [job for job in (kind, *jobs) if job in _UNSUPPORTED_JOBS]
    if unsupported:
        raise UserError(
            f"TF_CONFIG names the role {unsupported[0]}, which is not supported:"
            f" {_UNSUPPORTED_JOBS[unsupported[0]]}. Leave it out of the cluster, and start this"
            " program in chief and worker tasks only."
        )
    if kind not in _ROLES:
        raise UserError(
            f"TF_CONFIG gives this task the role {kind}, which is not supported. Use chief or"
            " worker."
        )
    servers = [str(server) for role in _ROLES for server in jobs.get(role, [])]
    rank = index + (len(jobs.get(_CHIEF, [])) if kind == _WORKER else 0)
    if not 0 <= index < len(jobs.get(kind, [])) or not all(
        re.fullmatch(r".+:\d+", server) for server in servers
    ):
        raise UserError(_TF_CONFIG_FORM)
    return Cluster(rank, tuple(servers))


def _from_srun(environ: Mapping[str, str]) -> Cluster | None:
    if int(environ.get("SLURM_STEP_NUM_TASKS", "1") or 1) < 2 or "SLURM_PROCID" not in environ:
        return None
    try:
        nodes, tasks, rank, job = (environ[name] for name in _SRUN)
        port = _FIRST_PORT + _PORTS_OF_JOB * (int(job) % _JOBS)
        servers = [
            f"{node}:{port + number}"
            for node, count in zip(nodes_of(nodes), counts_of(tasks), strict=True)
            for number in range(count)
        ]
        cluster = Cluster(int(rank), tuple(servers))
    except (KeyError, ValueError):
        given = ", ".join(f"{name}={environ.get(name, '')}" for name in _SRUN)
        raise UserError(
            f"Slurm's variables cannot be read ({given}): start with hybrid-imagenet run"
        ) from None
    local = cluster.local()[0]
    if environ.get("SLURM_LOCALID", f"{local}") != f"{local}":
        raise UserError("srun has not numbered the ranks host by host: add --distribution=block")
    return cluster


def nodes_of(text: str) -> list[str]:
    """Returns the names in Slurm's list of nodes: `n[1-3,7],m2` is n1, n2, n3, n7 and m2.

    A name may have text after its brackets, and several brackets, of which the last one counts
    fastest, as in `scontrol show hostnames`: `c[1-2]-[3-4]-ib0` is c1-3-ib0, c1-4-ib0, c2-3-ib0 and
    c2-4-ib0.

    Raises:
      ValueError: for another form.
    """
    if not _NODE_LIST.fullmatch(text):
        raise ValueError(text)
    names: list[str] = []
    for pattern in _NODE.findall(text):
        # Text and the insides of brackets take turns.
        parts = re.split(r"[\[\]]", pattern)
        choices = [
            _numbers_of(part) if position % 2 else [part] for position, part in enumerate(parts)
        ]
        names += map("".join, itertools.product(*choices))
        if len(names) > _MAX_NODES:
            raise ValueError(text)
    return names


def _numbers_of(text: str) -> list[str]:
    """Returns the numbers in the brackets of a list of nodes, with leading zeros: `08-10,12` is 08,
    09, 10 and 12.
    """
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not 0 < len(span) <= _MAX_NODES:
            raise ValueError(text)
        numbers += [f"{number:0{len(first)}d}" for number in span]
    return numbers


def counts_of(text: str) -> Sequence[int]:
    """Returns the numbers in Slurm's short form, as in `8(x3),4`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
