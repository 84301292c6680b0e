"""What an elastic rank keeps while the ranks around it change."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.callbacks.commits import Memory
from hybrid_imagenet.guardian import Guardian


@dataclasses.dataclass(frozen=True)
class Survivor:
    """The parts of a rank that outlive its sessions.

    Attributes:
      memory: the state committed last.
      guardian: ends this rank if it is stopped; None if --stall_seconds is 0.
    """

    memory: Memory
    guardian: Guardian | None
