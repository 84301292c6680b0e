"""How gradients travel, in plain values."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `start` is told about the exchange of gradients.

    Attributes:
      compression: `fp16` sends gradients in FP16, `none` in FP32.
      fusion_threshold_mb: a bucket of gradients is sent once it holds so many MiB; 0 sends each by itself.
      fp32_names: gradients whose names contain one of these texts are sent in FP32 in any case.
    """

    compression: str = "fp16"
    fusion_threshold_mb: float = 16.0
    fp32_names: tuple[str, ...] = ()

    @property
    def fusion_bytes(self) -> int:
        """The fusion threshold in bytes."""
        return int(self.fusion_threshold_mb * 2**20)

    def wire(self, name: str) -> str:
        """The type in which the gradient of this name travels."""
        if self.compression == "none" or any(text in name for text in self.fp32_names):
            return "float32"
        return {"fp16": "float16"}[self.compression]
