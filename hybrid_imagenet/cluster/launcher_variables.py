"""Reads ranks and their addresses from TF_CONFIG or Slurm's srun, without mpirun.

TensorFlow's engine (--engine=tensorflow) needs nothing else to connect the ranks. Horovod needs
MPI.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Mapping, Sequence

from hybrid_imagenet.errors import UserError

# Under srun the ports of a job follow from its number, so that jobs with successive numbers on the
# same nodes have different ports: job j uses the 64 ports from 20000 + 64 * (j mod 312).
_FIRST_PORT = 20000
_PORTS_PER_JOB = 64
_PORT_RANGES = 312
# A node in Slurm's list: text and ranges in brackets.
_NODE = re.compile(r"(?:[^][,]|\[[\d,-]+\])+")
_NODE_LIST = re.compile(rf"{_NODE.pattern}(?:,{_NODE.pattern})*")
# A longer list is taken for an error, before it fills the memory.
_MAX_NODES = 1 << 16
_CHIEF = "chief"
# Name of the chief in TensorFlow 1.
_MASTER = "master"
_WORKER = "worker"
# In the order of ranks: the chief is rank 0.
_ROLES = (_CHIEF, _WORKER)
_UNSUPPORTED_ROLES = {
    "evaluator": "rank 0 and the workers evaluate between epochs",
    "ps": "gradients are summed among the workers, without parameter servers",
}
_TF_CONFIG_MESSAGE = (
    'TF_CONFIG cannot be read. Set it to {"cluster": {"worker": ["host:port", ...]}, "task":'
    ' {"type": "worker", "index": 0}}, or unset it.'
)
_SRUN_SIZE_VARIABLE = "SLURM_STEP_NUM_TASKS"
_SRUN_VARIABLES = (
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_PROCID",
    "SLURM_JOB_ID",
)


@dataclasses.dataclass(frozen=True)
class LauncherPlacement:
    """The rank of this process and the addresses of all ranks, as a launcher gives them.

    Attributes:
      rank: Rank of this process.
      servers: Address of each rank as host:port.
    """

    rank: int
    servers: tuple[str, ...]

    def local_rank_and_size(self) -> tuple[int, int]:
        """Returns this rank's number among the ranks of its host, and how many they are."""
        hosts = [server.rpartition(":")[0] for server in self.servers]
        own_host = hosts[self.rank]
        local_ranks = [rank for rank, host in enumerate(hosts) if host == own_host]
        return local_ranks.index(self.rank), len(local_ranks)


def read_launcher_placement(environ: Mapping[str, str]) -> LauncherPlacement | None:
    """Returns the placement that TF_CONFIG or srun describes.

    Args:
      environ: Environment variables.

    Returns:
      The placement; None without either, or for a single process.

    Raises:
      UserError: If TF_CONFIG or Slurm's variables cannot be read, or a role is not supported.
    """
    placement = None
    tf_config = environ.get("TF_CONFIG")
    if tf_config:
        placement = _from_tf_config(tf_config)
    if placement is None:
        placement = _from_srun(environ)
    if placement is None or len(placement.servers) < 2:
        return None
    return placement


def _from_tf_config(text: str) -> LauncherPlacement | None:
    """Parses TF_CONFIG.

    Its form is {"cluster": {"worker": ["host:port", ...]}, "task": {"type": ..., "index": ...}}.
    As in TensorFlow, the master is the chief under its old name, and a configuration without a
    cluster stands for a single process.

    Returns:
      The placement; None for a single process.

    Raises:
      UserError: If the text has another form, or a role is not supported.
    """
    try:
        config = json.loads(text)
        servers_by_role = {}
        for role, servers in config.get("cluster", {}).items():
            servers_by_role[_CHIEF if role == _MASTER else role] = list(servers)
        if not servers_by_role:
            return None
        own_role = str(config["task"]["type"])
        index = int(config["task"]["index"])
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError(_TF_CONFIG_MESSAGE) from None
    if own_role == _MASTER:
        own_role = _CHIEF
    for role in (own_role, *servers_by_role):
        if role in _UNSUPPORTED_ROLES:
            raise UserError(
                f"TF_CONFIG names the role {role}, which is not supported:"
                f" {_UNSUPPORTED_ROLES[role]}. Leave it out of the cluster, and start this"
                " program in chief and worker tasks only."
            )
    if own_role not in _ROLES:
        raise UserError(
            f"TF_CONFIG gives this task the role {own_role}, which is not supported. Use chief or"
            " worker."
        )
    all_servers = [str(server) for role in _ROLES for server in servers_by_role.get(role, [])]
    is_valid_index = 0 <= index < len(servers_by_role.get(own_role, []))
    if not is_valid_index or not all(re.fullmatch(r".+:\d+", server) for server in all_servers):
        raise UserError(_TF_CONFIG_MESSAGE)
    rank = index
    if own_role == _WORKER:
        rank += len(servers_by_role.get(_CHIEF, []))
    return LauncherPlacement(rank, tuple(all_servers))


def _from_srun(environ: Mapping[str, str]) -> LauncherPlacement | None:
    """Reads the variables that srun sets.

    Returns:
      The placement; None without srun, or for a single process.

    Raises:
      UserError: If a variable is missing or cannot be read, or ranks are not numbered host by host.
    """
    try:
        num_ranks = int(environ.get(_SRUN_SIZE_VARIABLE) or 1)
        if num_ranks < 2 or "SLURM_PROCID" not in environ:
            return None
        nodes, tasks, rank, job = [environ[name] for name in _SRUN_VARIABLES]
        first_port = _FIRST_PORT + _PORTS_PER_JOB * (int(job) % _PORT_RANGES)
        servers = []
        for node, count in zip(expand_node_list(nodes), expand_task_counts(tasks), strict=True):
            servers += [f"{node}:{first_port + local_rank}" for local_rank in range(count)]
        if not 0 <= int(rank) < len(servers):
            raise ValueError(rank)
        placement = LauncherPlacement(int(rank), tuple(servers))
    except (KeyError, ValueError):
        names = (_SRUN_SIZE_VARIABLE, *_SRUN_VARIABLES)
        values = ", ".join(f"{name}={environ.get(name, '')}" for name in names)
        raise UserError(
            f"Slurm's variables cannot be read ({values}). Start with hybrid-imagenet run."
        ) from None
    local_rank, _ = placement.local_rank_and_size()
    if environ.get("SLURM_LOCALID", f"{local_rank}") != f"{local_rank}":
        raise UserError(
            "srun has not numbered the ranks host by host. Add --distribution=block to its options."
        )
    return placement


def expand_node_list(text: str) -> list[str]:
    """Returns the names in Slurm's list of nodes: `n[1-3,7],m2` is n1, n2, n3, n7 and m2.

    A name may have text after its brackets, and several brackets. As in `scontrol show hostnames`,
    the last bracket varies fastest: `c[1-2]-[3-4]-ib0` is c1-3-ib0, c1-4-ib0, c2-3-ib0 and
    c2-4-ib0.

    Raises:
      ValueError: If the list has another form, or more than 65,536 names.
    """
    if not _NODE_LIST.fullmatch(text):
        raise ValueError(text)
    names: list[str] = []
    for node in _NODE.findall(text):
        choices = []
        # Splitting at brackets gives text at even positions, and ranges at odd positions.
        for position, part in enumerate(re.split(r"[\[\]]", node)):
            choices.append([part] if position % 2 == 0 else _expand_ranges(part))
        names += ["".join(combination) for combination in itertools.product(*choices)]
        if len(names) > _MAX_NODES:
            raise ValueError(text)
    return names


def _expand_ranges(text: str) -> list[str]:
    """Returns the numbers in the brackets of a list of nodes, with leading zeros.

    `08-10,12` is 08, 09, 10 and 12.

    Raises:
      ValueError: If the text has another form, or a range has more than 65,536 numbers.
    """
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        span = range(int(first), int(last or first) + 1)
        if not 0 < len(span) <= _MAX_NODES:
            raise ValueError(text)
        numbers += [f"{number:0{len(first)}d}" for number in span]
    return numbers


def expand_task_counts(text: str) -> Sequence[int]:
    """Returns the numbers in Slurm's short form: `8(x3),4` is 8, 8, 8 and 4.

    Raises:
      ValueError: If the text has another form.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(text)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
