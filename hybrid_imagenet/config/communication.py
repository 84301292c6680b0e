"""Flags for the exchange of gradients."""

from __future__ import annotations

import dataclasses

from hybrid_imagenet.config.options import option


@dataclasses.dataclass(frozen=True)
class Communication:
    """Communication."""

    allreduce: str = option(
        "ring",
        "How gradients are summed over GPUs; auto measures the others at the first step.",
        choices=("ring", "hierarchical", "masters", "torus", "hybrid", "auto"),
    )
    torus_grid: str | None = option(
        None, "Rows x columns of GPUs (VxH) for torus, masters and hybrid; default hosts x GPUs per host."
    )
    hybrid_threshold_kb: int = option(
        256, "With --allreduce=hybrid, smaller buckets go by masters and larger ones by ring.", unit="KiB", minimum=0
    )
    compression: str = option("fp16", "Type of gradients on the wire.", choices=("none", "fp16", "bf16"))
    fp32_gradients: tuple[str, ...] = option(
        (), "Send gradients of variables whose names contain one of these texts in FP32."
    )
    fusion_threshold_mb: float = option(
        16.0, "Send a bucket of gradients once it holds so much; 0 sends each by itself.", unit="MiB", minimum=0
    )
    late_fusion_mb: float | None = option(
        None,
        "The same for the last buckets of a step, which nothing hides; default 4 with NCCL, else as the others.",
        unit="MiB",
        minimum=0,
    )
    cycle_time_ms: float | None = option(
        None, "Pause between Horovod's looks at its queue; default 0.2 with NCCL, else 1.", unit="ms", minimum=0.1
    )
    autotune: bool = option(False, "Let Horovod choose fusion and cycle time while it trains.")
    wire_health_every_steps: int = option(
        100,
        "Count gradient values that overflow or vanish, in computation and on the wire, at every so many steps; 0 for "
        "never.",
        unit="steps",
        minimum=0,
    )
