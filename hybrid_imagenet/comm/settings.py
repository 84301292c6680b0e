"""How gradients travel, in plain values."""

from __future__ import annotations

import dataclasses

ALGORITHMS = ("ring", "hierarchical", "masters", "torus", "hybrid", "auto")
COMPRESSIONS = ("none", "fp16", "bf16")
_CYCLE_MS, _NCCL_CYCLE_MS = 1.0, 0.2
_NCCL_LATE_MB = 4.0
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
      late_fusion_mb: the same for the last buckets, which nothing hides; None for 4 with NCCL, else no difference.
      cycle_time_ms: pause of Horovod's thread between looks at its queue; None for 0.2 with NCCL, else 1.
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
    late_fusion_mb: float | None = None
    cycle_time_ms: float | None = None
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

    def late_bytes(self, nccl: bool) -> int | None:
        """The same for the last buckets; None for no difference."""
        if self.autotune or (self.late_fusion_mb is None and not nccl):
            return None
        return int((_NCCL_LATE_MB if self.late_fusion_mb is None else self.late_fusion_mb) * 2**20)

    def cycle_ms(self, nccl: bool) -> float:
        """The pause of Horovod's thread. A GPU's step is short, and so are the waits that hide behind it."""
        return (_NCCL_CYCLE_MS if nccl else _CYCLE_MS) if self.cycle_time_ms is None else self.cycle_time_ms

    def wire(self, name: str) -> str:
        """The type in which the gradient of this name travels."""
        if any(text in name for text in self.fp32_gradients):
            return "float32"
        return _WIRES[self.compression]
