"""Compares the data of all ranks, and those of a resumed run with those that it began with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.sources.source import Source, identity_difference
from hybrid_imagenet.errors import SharedError, UserError


def check_ranks(communicator: Communicator, sources: Mapping[str, Source]) -> None:
    """Checks that all ranks read the same data; every rank calls it.

    Args:
      communicator: Gathers the identities of the data of all ranks.
      sources: Sources by the name that an error uses, such as "training".

    Raises:
      SharedError: On all ranks; it names the first rank whose data differ from those of rank 0, and
        what is different.
    """
    identities = communicator.allgather_object(
        {name: source.identity for name, source in sources.items()}
    )
    for rank, rank_identities in enumerate(identities):
        for name in sources:
            difference = identity_difference(rank_identities[name], identities[0][name])
            if difference:
                raise SharedError(
                    f"the {name} data of rank {rank} on {communicator.hosts[rank]} differ from"
                    f" those of rank 0 on {communicator.hosts[0]}: {difference}. Use the same data"
                    " on all hosts."
                )


def check_resumed(checkpoint: CheckpointArchive, sources: Mapping[str, Source]) -> None:
    """Checks that a resumed run reads the data that its checkpoint describes.

    The rest of the epoch follows from the order of the examples, so it would be wrong with other
    data.

    Args:
      checkpoint: Checkpoint of the run.
      sources: Sources by their names in the checkpoint. A name that it does not contain is not
        checked.

    Raises:
      UserError: If data are different.
    """
    stored: Mapping[str, Any] = checkpoint.meta["data"]
    for name, source in sources.items():
        difference = identity_difference(source.identity, stored[name]) if name in stored else ""
        if difference:
            raise UserError(
                f"{checkpoint.path}: the {name} data differ from the data of the run:"
                f" {difference}. Resume with the data that the run was started with (and, for"
                " --tuning_split, the --seed), or start a new run on these data with --init_from."
            )
