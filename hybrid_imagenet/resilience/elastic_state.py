"""Keeps the state of an elastic rank while the ranks around it change."""

from __future__ import annotations

import dataclasses
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.resilience.reaper import Guardian


@dataclasses.dataclass
class Memory:
    """Keeps the committed state beyond the life of one session.

    Attributes:
      run_dir: the run's directory; None before it is known.
      checkpoint: what was committed last: the content of a checkpoint file, never written.
      world_size: number of ranks at that time.
      last_step: the last step that was begun.
    """

    run_dir: pathlib.Path | None = None
    checkpoint: Checkpoint | None = None
    world_size: int = 0
    last_step: int = 0
    _taken: float = 0.0

    def commit(self, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any], world_size: int) -> None:
        """Replaces the committed state."""
        self.checkpoint = Checkpoint(pathlib.Path("memory"), arrays, dict(meta))
        self.world_size = world_size
        self.last_step = meta["state"]["step"]
        self._taken = time.monotonic()

    def recall(self) -> Checkpoint | None:
        """Returns the committed state, with the run's clock at now."""
        if self.checkpoint is None:
            return None
        state = self.checkpoint.meta["state"]
        seconds = state["seconds"] + time.monotonic() - self._taken
        return dataclasses.replace(
            self.checkpoint, meta={**self.checkpoint.meta, "state": {**state, "seconds": seconds}}
        )


@dataclasses.dataclass(frozen=True)
class Survivor:
    """Keeps the parts of a rank that outlive its sessions.

    Attributes:
      memory: the state committed last.
      guardian: ends this rank if it is stopped; None if --stall_seconds is 0.
    """

    memory: Memory
    guardian: Guardian | None
