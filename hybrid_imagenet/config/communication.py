"""Flags for the exchange of gradients."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option


@dataclasses.dataclass(frozen=True)
class Communication:
    """Communication."""

    compression: str = option("fp16", "Type of gradients on the wire.", choices=("none", "fp16"))
