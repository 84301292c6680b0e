"""Prepares a process for its place among the ranks, and connects it to the others."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Sequence

from hybrid_imagenet.comm.communicator import Communicator
from hybrid_imagenet.comm.environment import Placement, configure_tensorflow, placement, prepare
from hybrid_imagenet.comm.settings import ENGINES, Settings
from hybrid_imagenet.comm.single_process import SingleProcess
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.torus import parse_grid
from hybrid_imagenet.stages import START

ENGINE_VARIABLE = "HYBRID_IMAGENET_ENGINE"
"""Where `hybrid-imagenet run` tells the ranks of all hosts which engine --engine=auto means."""


def start(
    settings: Settings | None = None,
    *,
    threads: int | None = None,
    others: Sequence[Settings] = (),
    persistent_batch_norm: bool = True,
) -> Communicator:
    """Prepares this process for its place among the ranks and connects it to the others.

    Must come before TensorFlow starts, as it sets the number of threads: by default the cores of the host divided
    by the ranks on it. Without a launcher, or with one rank, no engine is needed or imported.

    Args:
      settings: how gradients travel; the default settings if None.
      threads: threads of this rank for TensorFlow's operations, if not chosen from the number of cores.
      others: settings of further reductions that the program will make by itself, so that their sets of ranks are known
        from the start.
      persistent_batch_norm: see `gpus.prepare`; never with `Settings.deterministic`.

    Raises:
      UserError: if the launcher's variables are incomplete, Horovod is missing, a rank has no GPU of its own, there is
        no GPU although TensorFlow is built for them, or the algorithm or grid does not fit the ranks and hosts.
    """
    settings = settings or Settings()
    check_grids(placement(), (settings, *others))
    persistent = persistent_batch_norm and not settings.deterministic
    return connect(ready(threads, persistent_batch_norm=persistent), settings, others)


def check_grids(place: Placement, settings: Sequence[Settings]) -> None:
    """Raises UserError for a grid that does not hold all ranks."""
    for text in filter(None, (each.options.get("torus_grid") for each in settings)):
        try:
            parse_grid(text, place.size)
        except ValueError as error:
            raise UserError(f"--torus_grid={text}: {error}") from None


def ready(threads: int | None = None, *, persistent_batch_norm: bool = True) -> Placement:
    """Sets what must be set before TensorFlow starts; returns this process's place. Arguments as for `start`."""
    place = placement()
    configure_tensorflow(place, prepare(place, threads, persistent_batch_norm=persistent_batch_norm))
    return place


def engine_of(asked: str) -> str:
    """The engine that connects the ranks: the one that is asked for, or that the launcher has chosen for all hosts.

    Else Horovod where it is installed, and TensorFlow's own without it, or for ranks that TF_CONFIG describes.
    """
    if asked != "auto":
        return asked
    chosen = next((name for name in ENGINES if name == os.environ.get(ENGINE_VARIABLE)), None)
    if chosen is not None:
        return chosen
    by_tf_config = bool(os.environ.get("TF_CONFIG")) and "OMPI_COMM_WORLD_RANK" not in os.environ
    return "horovod" if not by_tf_config and importlib.util.find_spec("horovod") else "tensorflow"


def connect_early(place: Placement) -> None:
    """Connects ranks whose engine must do so before TensorFlow is used: TensorFlow's own."""
    if place.size > 1 and engine_of("auto") == "tensorflow":
        from hybrid_imagenet.comm import tensorflow_engine

        tensorflow_engine.join(place)


def connect(place: Placement, settings: Settings, others: Sequence[Settings] = ()) -> Communicator:
    """Connects a process that is `ready` to the other ranks; arguments and errors as for `start`."""
    if place.size == 1:
        return SingleProcess(settings.gradient_health_every_steps)
    START.begin(f"connecting {place.size} ranks")
    if settings.engine == "auto" and place.rank == 0 and engine_of("auto") == "tensorflow":
        print("ranks connect by --engine=tensorflow, as Horovod is not used here", file=sys.stderr, flush=True)
    try:
        communicator = pkgutil.resolve_name(ENGINES[engine_of(settings.engine)])
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{place.size} ranks were started, but Horovod cannot be used ({reason}): install it, or do without it by "
            "--engine=tensorflow"
        ) from None
    connected: Communicator = communicator(settings, others=others)
    return connected
