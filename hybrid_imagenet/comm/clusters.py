"""Reads a rank's place and the ranks' addresses where no mpirun has started them: from TF_CONFIG, or from Slurm's srun.

TensorFlow's engine (--engine=tensorflow) needs nothing else to connect the ranks; Horovod needs MPI.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

from hybrid_imagenet.errors import UserError

# Under srun a job's ports begin at a number made of the job's: 312 times 64, for up to 64 ranks on a host.
_FIRST_PORT, _JOBS, _PORTS_OF_JOB = 20000, 312, 64
_NODES = re.compile(r"([^,\[]+)(?:\[([\d,-]+)\])?(?:,|$)")
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
    """Returns the cluster that TF_CONFIG or srun describes; None without either, or for a single process.

    Raises:
      UserError: for a TF_CONFIG or Slurm variables that cannot be read.
    """
    cluster = _from_tf_config(environ["TF_CONFIG"]) if environ.get("TF_CONFIG") else _from_srun(environ)
    return cluster if cluster is not None and len(cluster.servers) > 1 else None


def _from_tf_config(text: str) -> Cluster:
    """Reads TensorFlow's own form: {"cluster": {"worker": ["host:port", ...]}, "task": {"type": ..., "index": ...}}."""
    try:
        config = json.loads(text)
        chief, workers = (config["cluster"].get(kind, []) for kind in ("chief", "worker"))
        kind, index = config["task"]["type"], int(config["task"]["index"])
        servers = tuple(map(str, [*chief, *workers]))
        rank = {"chief": 0, "worker": len(chief)}[kind] + index
        if not 0 <= rank < len(servers) or not all(re.fullmatch(r".+:\d+", server) for server in servers):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            'TF_CONFIG cannot be read: give {"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", '
            '"index": 0}}, or unset it'
        ) from None
    return Cluster(rank, servers)


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
        raise UserError(f"Slurm's variables cannot be read ({given}): start with hybrid-imagenet run") from None
    local = cluster.local()[0]
    if environ.get("SLURM_LOCALID", f"{local}") != f"{local}":
        raise UserError("srun has not numbered the ranks host by host: add --distribution=block")
    return cluster


def nodes_of(text: str) -> list[str]:
    """Returns the names in Slurm's list of nodes, as in `n[1-3,7],m2`.

    Raises:
      ValueError: for another form, as of names with two brackets.
    """
    found: list[str] = []
    end = 0
    for match in _NODES.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        for part in (match[2] or "").split(","):
            first, _, last = part.partition("-")
            numbers = range(int(first), int(last or first) + 1) if first else ()
            found += [f"{match[1]}{number:0{len(first)}d}" for number in numbers] or [match[1]]
    if end != len(text) or not found:
        raise ValueError(text)
    return found


def counts_of(text: str) -> Sequence[int]:
    """Returns the numbers in Slurm's short form, as in `8(x3),4`."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
