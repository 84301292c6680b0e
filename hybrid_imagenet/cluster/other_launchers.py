"""Recognizes launchers that cannot connect the ranks of this program, by their variables.

Under such a launcher each process would consider itself the only one and train alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from hybrid_imagenet.errors import UserError

IGNORE_VARIABLE = "HYBRID_IMAGENET_IGNORE_LAUNCHER"
"""If set to 1, a process trains alone in spite of another launcher's variables."""


class _Launcher(NamedTuple):
    """A launcher and the variables that it sets.

    Attributes:
      name: Name for messages.
      size_variable: Variable with the number of processes; "" if the launcher does not set one.
      rank_variable: Variable with the number of a process, from 0.
      size_is_enough: Whether the size alone shows that this launcher has started the process.
        Other programs set variables of common names too, so these count only with the rank.
    """

    name: str
    size_variable: str
    rank_variable: str
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
    # PALS sets the size of the job as PMI_SIZE, which can be turned off. It always sets the size on
    # the host.
    _Launcher("PALS", "PALS_LOCAL_SIZE", "PALS_RANKID"),
    _Launcher("a launcher with PMIx", "", "PMIX_RANK"),
    _Launcher("a launcher of PyTorch, such as torchrun,", "WORLD_SIZE", "RANK"),
    _Launcher("a launcher of PyTorch, such as torchrun,", "WORLD_SIZE", "LOCAL_RANK"),
)
# Only one launcher sets these, so a rank above 0 shows that there are several processes.
_UNAMBIGUOUS_RANK_VARIABLES = ("PALS_RANKID", "PMIX_RANK")


def reject_other_launchers(environ: Mapping[str, str]) -> None:
    """Raises UserError if another launcher has started several processes.

    Args:
      environ: Environment variables of this process.
    """
    if environ.get(IGNORE_VARIABLE, "") not in ("", "0"):
        return
    for launcher in _LAUNCHERS:
        if _has_started_several(launcher, environ):
            variables = {
                name: environ[name]
                for name in (launcher.size_variable, launcher.rank_variable)
                if name in environ
            }
            raise UserError(_message(variables, launcher.name))
    if len(_sagemaker_hosts(environ)) > 1:
        raise UserError(_message({"SM_HOSTS": environ["SM_HOSTS"]}, "SageMaker"))


def _has_started_several(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    """Returns whether the variables of a launcher say that it has started several processes."""
    size = _read_number(environ, launcher.size_variable)
    rank = _read_number(environ, launcher.rank_variable)
    if size is not None and size > 1 and (launcher.size_is_enough or rank is not None):
        return True
    is_unambiguous = launcher.rank_variable in _UNAMBIGUOUS_RANK_VARIABLES
    return rank is not None and rank > 0 and is_unambiguous


def _read_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _sagemaker_hosts(environ: Mapping[str, str]) -> list[str]:
    """Returns the hosts of a SageMaker job; an empty list outside SageMaker.

    SageMaker starts the program once on each host, unless its MPI is enabled.
    """
    try:
        hosts = json.loads(environ.get("SM_HOSTS", "") or "[]")
    except ValueError:
        return []
    return hosts if isinstance(hosts, list) else []


def _message(variables: Mapping[str, str], launcher: str) -> str:
    """Returns the error about a launcher, which its `variables` have shown."""
    values = " and ".join(f"{name}={value}" for name, value in variables.items())
    verb = "says" if len(variables) == 1 else "say"
    pronoun = "it" if len(variables) == 1 else "them"
    return (
        f"{values} {verb} that {launcher} has started several processes. It does not connect them"
        " for this program, so each would train alone. Start the job once, with hybrid-imagenet"
        f" run -np N. If this is a single process, unset {pronoun} or set {IGNORE_VARIABLE}=1."
    )
