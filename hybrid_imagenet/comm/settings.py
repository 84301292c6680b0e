"""Defines the flags of communication in plain values, and the table of gradient-reduction algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

Compression = Literal["none", "fp16", "bf16"]
Engine = Literal["auto", "horovod", "tensorflow"]

ALGORITHMS = {
    "ring": "hybrid_imagenet.comm.algorithms:Ring",
    "torus": "hybrid_imagenet.comm.algorithms:Torus",
    "hierarchical": "hybrid_imagenet.comm.algorithms:Hierarchical",
    "masters": "hybrid_imagenet.comm.algorithms:Masters",
    "size_switched": "hybrid_imagenet.comm.selection:SizeSwitched",
    "auto": "hybrid_imagenet.comm.selection:Auto",
}
"""The class of each algorithm; the arguments of its constructor that have defaults are flags of the same name."""
COMPRESSIONS = get_args(Compression)
ENGINES: dict[Engine, str] = {
    "horovod": "hybrid_imagenet.comm.horovod_engine:HorovodCommunicator",
    "tensorflow": "hybrid_imagenet.comm.tensorflow_engine:TensorFlowCommunicator",
}
"""The communicator of each engine."""
_CYCLE_MS, _NCCL_CYCLE_MS = 1.0, 0.2
_NCCL_LATE_MB = 4.0
_WIRES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Communication:
    """Communication.

    Attributes:
      engine: what connects the ranks: Horovod, or TensorFlow's own collective operations; auto takes Horovod where it
        is installed.
      allreduce: how gradients are summed over GPUs; auto measures the others at the first step.
      compression: type in which gradients are sent.
      fp32_gradients: send gradients of variables whose names contain one of these texts in FP32.
      fusion_threshold_mb: send a bucket of gradients once it holds this much; 0 sends each by itself.
      cycle_time_ms: pause between Horovod's looks at its queue; default 0.2 with NCCL, else 1.
      gradient_health_every_steps: steps between counts of gradient values that overflow or underflow, in computation
        and in the exchange; 0 for never.
    """

    engine: Engine = "auto"
    allreduce: str = "ring"
    compression: Compression = "fp16"
    fp32_gradients: tuple[str, ...] = ()
    fusion_threshold_mb: Annotated[float, ">= 0", "MiB"] = 16.0
    cycle_time_ms: Annotated[float | None, ">= 0.1", "ms"] = None
    gradient_health_every_steps: Annotated[int, ">= 0", "steps"] = 100


@dataclasses.dataclass(frozen=True)
class Settings(Communication):
    """The settings of the exchange of gradients that `start` takes: the flags, and what comes with them.

    Attributes:
      options: the algorithm's options, by name.
      late_fusion_mb: `fusion_threshold_mb` for the last buckets of a step, which nothing hides; None for 4 with NCCL,
        else as the others.
      neighbors: ranks that `Communicator.allreduce_neighbors` sums over: 0 to neighbors - 1, and so on.
      deterministic: read no clocks inside the step, which TensorFlow refuses in deterministic mode.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    late_fusion_mb: float | None = None
    neighbors: int = 1
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Refuses what no choice of ranks could make work."""
        if self.allreduce not in ALGORITHMS:
            raise ValueError(f"allreduce={self.allreduce}: choose one of {', '.join(ALGORITHMS)}")
        if self.engine != "auto" and self.engine not in ENGINES:
            raise ValueError(f"engine={self.engine}: choose one of auto, {', '.join(ENGINES)}")
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"compression={self.compression}: choose one of {', '.join(COMPRESSIONS)}")

    @property
    def fusion_bytes(self) -> int:
        """Bytes after which a bucket is sent."""
        return int(self.fusion_threshold_mb * 2**20)

    def late_bytes(self, nccl: bool) -> int | None:
        """Returns the same for the last buckets; None for no difference."""
        if self.late_fusion_mb is None and not nccl:
            return None
        return int((_NCCL_LATE_MB if self.late_fusion_mb is None else self.late_fusion_mb) * 2**20)

    def cycle_ms(self, nccl: bool) -> float:
        """Returns the pause of Horovod's thread. A GPU's step is short, and so are the waits that hide behind it."""
        return (_NCCL_CYCLE_MS if nccl else _CYCLE_MS) if self.cycle_time_ms is None else self.cycle_time_ms

    def wire(self, name: str) -> str:
        """Returns the type in which the gradient of this name travels."""
        if any(text in name for text in self.fp32_gradients):
            return "float32"
        return _WIRES[self.compression]
