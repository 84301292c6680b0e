"""Compares the data of the ranks, and of a run with those that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.sources.source import Source, identity_difference
from hybrid_imagenet.errors import SharedError, UserError


def check_ranks(communicator: Communicator, sources: Mapping[str, Source]) -> None:
    """Compares what all ranks read; every rank calls it, once, with the sources by name.

    Raises:
      SharedError: on all ranks, naming the first rank that reads something else than rank 0, and in
        what it differs.
    """
    ranks = communicator.allgather_object(
        {name: source.identity for name, source in sources.items()}
    )
    for rank, found in enumerate(ranks):
        for name in sources:
            differs = identity_difference(found[name], ranks[0][name])
            if differs:
                raise SharedError(
                    f"the {name} data of rank {rank} on {communicator.hosts[rank]} are not those of"
                    f" rank 0 on {communicator.hosts[0]}: {differs}; give all hosts the same data"
                )


def check_resumed(checkpoint: CheckpointArchive, sources: Mapping[str, Source]) -> None:
    """Compares what is read now with what the run has read, as its checkpoint tells.

    Raises:
      UserError: if the data are others: the rest of the epoch would be that of another order.
    """
    stored: Mapping[str, Any] = checkpoint.meta["data"]
    for name, source in sources.items():
        differs = identity_difference(source.identity, stored[name]) if name in stored else ""
        if differs:
            raise UserError(
                f"{checkpoint.path}: the {name} data are not those of the run: {differs}; resume"
                " with the data it was started with (and, for --tuning_split, the --seed), or"
                " start a new run with --init_from on these"
            )
