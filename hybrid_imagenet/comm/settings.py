"""How gradients travel, in plain values."""

from __future__ import annotations

import dataclasses

ALGORITHMS = ("ring", "hierarchical", "masters", "torus", "hybrid", "auto")
COMPRESSIONS = ("none", "fp16", "bf16")
_WIRES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `start` is told about the exchange of gradients. The fields bear the names of the flags.

    Attributes:
      allreduce: the algorithm, one of ALGORITHMS.
      torus_grid: rows and columns of ranks, VxH, for torus, masters and hybrid; None for the default.
      hybrid_threshold_kb: buckets of fewer KiB go by masters, larger ones by ring.
      compression: the type of gradients on the wire, one of COMPRESSIONS.
      fp32_gradients: gradients whose names contain one of these texts are sent in FP32 in any case.
      fusion_threshold_mb: a bucket is sent once it holds so many MiB; 0 sends each gradient by itself.
      cycle_time_ms: pause of Horovod's thread between looks at its queue.
      autotune: Horovod chooses fusion and cycle time while training; gradients are then sent one by one.
      wire_health_every_steps: steps between counts of what gradients lose in 16 bits; 0 for never.
      deterministic: read no clocks inside the step, which TensorFlow refuses in deterministic mode.
    """

    allreduce: str = "ring"
    torus_grid: str | None = None
    hybrid_threshold_kb: int = 256
    compression: str = "fp16"
    fp32_gradients: tuple[str, ...] = ()
    fusion_threshold_mb: float = 16.0
    cycle_time_ms: float = 1.0
    autotune: bool = False
    wire_health_every_steps: int = 0
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Refuses what no choice of ranks could make work."""
        if self.allreduce not in ALGORITHMS:
            raise ValueError(f"allreduce={self.allreduce}: choose one of {', '.join(ALGORITHMS)}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression}: choose one of {', '.join(COMPRESSIONS)}")

    @property
    def fusion_bytes(self) -> int:
        """Bytes after which a bucket is sent."""
        return 0 if self.autotune else int(self.fusion_threshold_mb * 2**20)

    def wire(self, name: str) -> str:
        """The type in which the gradient of this name travels."""
        if any(text in name for text in self.fp32_gradients):
            return "float32"
        return _WIRES[self.compression]
