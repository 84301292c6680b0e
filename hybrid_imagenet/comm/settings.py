"""Defines the flags of communication in plain values, and the tables of all-reduces and engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.comm import cost_model
from hybrid_imagenet.comm.cost_model import Cost
from hybrid_imagenet.options import invalid_reason, option, options_of


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """An all-reduce without options."""


@dataclasses.dataclass(frozen=True)
class GridOptions:
    """Options of an all-reduce on a grid of ranks; the groups of `Masters` are its rows."""

    torus_grid: str | None = option(
        None,
        "Rows x columns of GPUs, as VxH; a row is a group of masters; default published, by host,"
        " or square.",
    )


@dataclasses.dataclass(frozen=True)
class SizeOptions(GridOptions):
    """Options of an all-reduce that depends on the size."""

    size_switch_kb: int = option(
        256, "Sum smaller buckets by masters, others by the ring.", unit="KiB", minimum=0
    )


@dataclasses.dataclass(frozen=True)
class AllReduce:
    """A value of --allreduce.

    Attributes:
      constructor: its class, as module:Class, called with `algorithms.Ranks` and the options.
      options: the dataclass of its options.
      cost: the planner's formula of its seconds; None stands for the ring's.
      one_operation: whether Horovod over NCCL sums a bucket in one operation. It composes the
        others of operations among sets of ranks, and negotiates those again at each step. A torus
        with one row per host is `hierarchical`.
    """

    constructor: str
    options: type = NoOptions
    cost: Cost | None = None
    one_operation: bool = False


ALGORITHMS = {
    "ring": AllReduce(
        "hybrid_imagenet.comm.algorithms:Ring", cost=cost_model.by_ring, one_operation=True
    ),
    "torus": AllReduce("hybrid_imagenet.comm.algorithms:Torus", GridOptions, cost_model.by_torus),
    "hierarchical": AllReduce(
        "hybrid_imagenet.comm.algorithms:Hierarchical",
        cost=cost_model.by_hierarchical,
        one_operation=True,
    ),
    "masters": AllReduce(
        "hybrid_imagenet.comm.algorithms:Masters", GridOptions, cost_model.by_masters
    ),
    "size_switched": AllReduce(
        "hybrid_imagenet.comm.algorithms:SizeSwitched", SizeOptions, cost_model.by_size
    ),
}
COMPRESSIONS = ("none", "fp16", "bf16")
ENGINES = {
    "horovod": "hybrid_imagenet.comm.horovod_engine:HorovodCommunicator",
    "tensorflow": "hybrid_imagenet.comm.tensorflow_engine:TensorFlowCommunicator",
}
"""The communicator of each engine."""
_NCCL_LATE_MB = 4
_WIRES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}


@dataclasses.dataclass(frozen=True)
class Communication:
    """Communication."""

    engine: str = option(
        "auto",
        "Connection between ranks: Horovod, or TensorFlow's own collective operations; auto takes"
        " Horovod where it is installed and MPI has started the ranks.",
        choices=("auto", *ENGINES),
    )
    allreduce: str = option(
        "ring",
        "How gradients are summed over GPUs; `hybrid-imagenet bench allreduce` compares.",
        choices=tuple(ALGORITHMS),
    )
    compression: str = option("fp16", "Type in which gradients are sent.", choices=COMPRESSIONS)
    fusion_threshold_mb: float = option(
        16.0,
        "Send a bucket of gradients once it holds this much; 0 sends each by itself.",
        unit="MiB",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class Settings(Communication):
    """The settings of the exchange of gradients that `start` takes: the flags, and what comes with
    them.

    Attributes:
      options: the algorithm's options, by name.
      neighbors: ranks that `Communicator.allreduce_neighbors` sums over: 0 to neighbors - 1, and so
      on.
      deterministic: read no clocks inside the step, which TensorFlow refuses in deterministic mode.
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    neighbors: int = 1
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Refuses what no choice of ranks could make work."""
        for name in ("allreduce", "engine", "compression"):
            value = getattr(self, name)
            if reason := invalid_reason(value, options_of(Communication)[name]):
                raise ValueError(f"{name}={value}: {reason}")
        known = {field.name for field in dataclasses.fields(ALGORITHMS[self.allreduce].options)}
        for name in sorted(set(self.options) - known):
            raise ValueError(f"{name}: there is no such option with allreduce={self.allreduce}")

    @property
    def fusion_bytes(self) -> int:
        """Bytes after which a bucket is sent."""
        return int(self.fusion_threshold_mb * 2**20)

    def late_bytes(self, nccl: bool) -> int | None:
        """Returns the same for the last buckets of a step, which nothing hides; None for no
        difference.
        """
        return _NCCL_LATE_MB << 20 if nccl else None

    @property
    def wire(self) -> str:
        """The type in which gradients travel."""
        return _WIRES[self.compression]
