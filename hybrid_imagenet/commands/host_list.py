"""Reads the hosts of a job from `-H`, from a file, or from a scheduler's allocation."""

from __future__ import annotations

import dataclasses
import re
import socket
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from hybrid_imagenet.cluster import launcher_variables
from hybrid_imagenet.commands.doctor import host_facts
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.resilience.discovery import parse_host

UNKNOWN_SLOTS = 0
"""Slots of a host that is listed without them."""
# Files with the hosts of a job, one line for each slot: those of PBS and LSF.
_FILE_VARIABLES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
_SLURM_HOSTS = "SLURM_JOB_NODELIST"
_SLURM_TASKS = "SLURM_TASKS_PER_NODE"
_SLOTS = re.compile(r"\s+slots\s*=\s*([0-9]+)$")


@dataclasses.dataclass(frozen=True)
class HostList:
    """The hosts that a job may use.

    Attributes:
      slots: Number of ranks for each host, in the order of the list; UNKNOWN_SLOTS if it is open.
      source: Origin of the list, as in a message: "--hostfile=FILE"; "-H" for that option.
      is_allocation: Whether a scheduler has listed the hosts, and not the user.
    """

    slots: dict[str, int]
    source: str = "-H"
    is_allocation: bool = False


def read(hosts: str | None, hostfile: str | None, environ: Mapping[str, str]) -> HostList | None:
    """Returns the hosts from the first source that is set.

    The sources are `-H`, `--hostfile`, and the variables of PBS, LSF and Slurm. An allocation of
    this host alone has nothing to add to the default, which counts the GPUs of this host.

    Args:
      hosts: `-H`, or None.
      hostfile: `--hostfile`, or None.
      environ: Environment variables.

    Returns:
      The hosts; None for this host alone.

    Raises:
      UserError: If both options are set, or a list cannot be read.
    """
    if hosts is not None and hostfile is not None:
        raise UserError("-H and --hostfile both set the hosts of the ranks. Use one of them.")
    if hosts is not None:
        return HostList(host_facts.parse_hosts(hosts, UNKNOWN_SLOTS))
    if hostfile is not None:
        source = f"--hostfile={hostfile}"
        return HostList(_read_file(hostfile, source), source)
    allocation = _read_allocation(environ)
    if allocation is None:
        return None
    slots = {_local_name(name): count for name, count in allocation.slots.items()}
    if len(slots) == 1 and all(host_facts.is_local(name) for name in slots):
        return None
    return dataclasses.replace(allocation, slots=slots)


def _read_allocation(environ: Mapping[str, str]) -> HostList | None:
    """Returns the hosts that a scheduler has given to this job; None without a scheduler."""
    for variable in _FILE_VARIABLES:
        if path := environ.get(variable):
            slots = _read_file(path, f"${variable} ({path})")
            return HostList(slots, f"${variable}", is_allocation=True)
    if nodes := environ.get(_SLURM_HOSTS):
        slots = _parse_slurm(nodes, environ.get(_SLURM_TASKS, ""))
        return HostList(slots, f"${_SLURM_HOSTS}", is_allocation=True)
    return None


def _read_file(path: str, source: str) -> dict[str, int]:
    """Returns the slots of each host in a file.

    Raises:
      UserError: If the file cannot be read, has an invalid line or no host.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{source} cannot be read ({error.strerror}). Set -H HOST:SLOTS,... instead."
        ) from None
    except ValueError:
        raise UserError(f"{source} is not a text file. Write one host in each line.") from None
    try:
        return parse_lines(text)
    except ValueError as error:
        raise UserError(
            f"{source} is not valid: {error}. Write HOST, HOST:SLOTS or HOST slots=N in each line."
        ) from None


def parse_lines(text: str) -> dict[str, int]:
    """Returns the slots of each host in the text of a file.

    A line is `HOST`, `HOST:SLOTS` or `HOST slots=N`, and `#` begins a comment. The slots of lines
    with the same host add up, where a line without slots counts as one. If a host has a single line
    and no slots, they are unknown, because schedulers list a host once by default.

    Raises:
      ValueError: For another form, or without hosts.
    """
    slots: Counter[str] = Counter()
    num_lines: Counter[str] = Counter()
    open_hosts: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        word = line.partition("#")[0].strip()
        if not word:
            continue
        try:
            name, count = parse_host(_SLOTS.sub(r":\1", word), UNKNOWN_SLOTS)
        except ValueError:
            raise ValueError(f"line {number} is '{word[:60]}'") from None
        if count == UNKNOWN_SLOTS:
            open_hosts.add(name)
        slots[name] += count or 1
        num_lines[name] += 1
    if not slots:
        raise ValueError("it lists no host")
    for name in open_hosts:
        if num_lines[name] == 1:
            slots[name] = UNKNOWN_SLOTS
    return dict(slots)


def _parse_slurm(nodes: str, tasks: str) -> dict[str, int]:
    """Returns the slots of each host in an allocation of Slurm.

    One task on a node is Slurm's default and says nothing about ranks, so it is taken as unknown.

    Raises:
      UserError: If a variable cannot be read.
    """
    try:
        names = launcher_variables.expand_node_list(nodes)
        counts = launcher_variables.expand_task_counts(tasks) if tasks else [1] * len(names)
        slots = {}
        for name, count in zip(names, counts, strict=True):
            slots[parse_host(name, UNKNOWN_SLOTS)[0]] = UNKNOWN_SLOTS if count == 1 else count
    except ValueError:
        raise UserError(
            f"Slurm's variables cannot be read ({_SLURM_HOSTS}={nodes}, {_SLURM_TASKS}={tasks})."
            " Set -H HOST:SLOTS,... instead."
        ) from None
    return slots


def _local_name(name: str) -> str:
    """Returns this host's own name if `name` is the same with or without a domain."""
    own_name = socket.gethostname()
    is_own_name = name.partition(".")[0] == own_name or name == own_name.partition(".")[0]
    return own_name if is_own_name else name
