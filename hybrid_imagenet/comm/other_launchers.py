"""Recognizes launchers that cannot connect the ranks of this program, from the variables that they
set.

Each process of such a launcher would take itself for the only one and train alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from hybrid_imagenet.errors import UserError

IGNORE_VARIABLE = "HYBRID_IMAGENET_IGNORE_LAUNCHER"
"""Set to 1, it has a process train alone in spite of another launcher's variables."""


class _Launcher(NamedTuple):
    """A launcher and the variables that it sets.

    Attributes:
      name: for messages.
      size: number of processes; "" if the launcher does not set it.
      rank: number of this process, from 0.
      size_is_enough: whether the size counts without the rank. Names that others use too need both.
    """

    name: str
    size: str
    rank: str
    size_is_enough: bool = False


_LAUNCHERS = (
    _Launcher(
        "an mpirun with PMI, such as MPICH's or Intel MPI's,",
        "PMI_SIZE",
        "PMI_RANK",
        size_is_enough=True,
    ),
    _Launcher("horovodrun without MPI", "HOROVOD_SIZE", "HOROVOD_RANK", size_is_enough=True),
    _Launcher("MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", size_is_enough=True),
    _Launcher("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", size_is_enough=True),
    _Launcher("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK"),
    # PALS sets the size of the job as PMI_SIZE, which may be off; the size on the host is always
    # there.
    _Launcher("PALS", "PALS_LOCAL_SIZE", "PALS_RANKID"),
    _Launcher("a launcher with PMIx", "", "PMIX_RANK"),
    _Launcher("a launcher of PyTorch, such as torchrun,", "WORLD_SIZE", "RANK"),
    _Launcher("a launcher of PyTorch, such as torchrun,", "WORLD_SIZE", "LOCAL_RANK"),
)
# These ranks are no one else's variables, so one above 0 says that there are several processes.
_RANK_IS_ENOUGH = ("PALS_RANKID", "PMIX_RANK")


def check(environ: Mapping[str, str]) -> None:
    """Raises UserError if the variables of another launcher say that it has started several
    processes.
    """
    if environ.get(IGNORE_VARIABLE, "") not in ("", "0"):
        return
    for launcher in _LAUNCHERS:
        size = _number(environ, launcher.size)
        rank = _number(environ, launcher.rank)
        by_size = size is not None and size > 1 and (launcher.size_is_enough or rank is not None)
        by_rank = rank is not None and rank > 0 and launcher.rank in _RANK_IS_ENOUGH
        if by_size or by_rank:
            names = [name for name in (launcher.size, launcher.rank) if name in environ]
            raise UserError(_message({name: environ[name] for name in names}, launcher.name))
    if len(_sagemaker_hosts(environ)) > 1:
        raise UserError(_message({"SM_HOSTS": environ["SM_HOSTS"]}, "SageMaker"))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _sagemaker_hosts(environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts of a SageMaker job, which starts the program once on each unless its MPI is
    enabled.
    """
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "") or "[]")
    except ValueError:
        return []
    return hosts if isinstance(hosts, list) else []


def _message(found: Mapping[str, str], launcher: str) -> str:
    given = " and ".join(f"{name}={value}" for name, value in found.items())
    verb = "says" if len(found) == 1 else "say"
    pronoun = "it" if len(found) == 1 else "them"
    return (
        f"{given} {verb} that {launcher} has started several processes. It does not connect them"
        " for this program, so each would train alone. Start the job once, with hybrid-imagenet"
        f" run -np N. If this is a single process, unset {pronoun} or set {IGNORE_VARIABLE}=1."
    )
