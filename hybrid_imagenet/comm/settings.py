"""Defines how ranks communicate: flags, and the registries of all-reduces and engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.options import invalid_reason, option, options_of


@dataclasses.dataclass(frozen=True)
class AllReduceOptions:
    """Options of every all-reduce: none."""


@dataclasses.dataclass(frozen=True)
class GridOptions(AllReduceOptions):
    """Options of an all-reduce on a grid of ranks.

    `algorithms.HierarchicalMasters` uses the rows of the grid as groups.
    """

    torus_grid: str | None = option(
        None,
        "Rows x columns of GPUs for the torus, as VxH; for masters a row is a group (default:"
        " a published grid, one row per host, or nearly a square).",
    )


@dataclasses.dataclass(frozen=True)
class SizeOptions(GridOptions):
    """Options of an all-reduce that depends on the size of a bucket."""

    size_switch_kb: int = option(
        256,
        "Sum buckets below this size by masters, larger ones by the ring.",
        unit="KiB",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class AllReduceSpec:
    """A value of --allreduce.

    Attributes:
      constructor: Class of the algorithm as "module:Class", called with `algorithms.RankContext`
        and the options.
      options: Dataclass of the algorithm's options.
      one_operation: Whether Horovod over NCCL runs the algorithm as one operation per bucket. Other
        algorithms are composed of operations among process sets, which Horovod negotiates again at
        each step. That includes the torus, because with one row per host it is `hierarchical`.
    """

    constructor: str
    options: type[AllReduceOptions] = AllReduceOptions
    one_operation: bool = False


ALGORITHMS = {
    "ring": AllReduceSpec("hybrid_imagenet.comm.algorithms:Ring", one_operation=True),
    "torus": AllReduceSpec("hybrid_imagenet.comm.algorithms:Torus", GridOptions),
    "hierarchical": AllReduceSpec(
        "hybrid_imagenet.comm.algorithms:Hierarchical", one_operation=True
    ),
    "masters": AllReduceSpec("hybrid_imagenet.comm.algorithms:HierarchicalMasters", GridOptions),
    "size_switched": AllReduceSpec("hybrid_imagenet.comm.algorithms:SizeSwitched", SizeOptions),
}
ENGINES = {
    "horovod": "hybrid_imagenet.comm.horovod_engine:HorovodCommunicator",
    "tensorflow": "hybrid_imagenet.comm.tensorflow_engine:TensorFlowCommunicator",
}
"""Communicator class of each engine."""
# With NCCL, buckets are smaller at the end of backpropagation, because no computation hides the
# last one. With equal buckets it held 28 % of the bytes of ResNet-50.
_NCCL_LAST_BUCKET_BYTES = 4 << 20
WIRE_DTYPES = {"none": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Name of the dtype in which gradients are sent, by --compression."""


@dataclasses.dataclass(frozen=True)
class SharedCommunicationFlags:
    """Flags of communication that all optimizers of a process share."""

    engine: str = option(
        "auto",
        "Library that connects the ranks: Horovod, or TensorFlow's own collective operations; auto"
        " uses Horovod if it is installed and MPI has started the ranks.",
        choices=("auto", *ENGINES),
    )
    allreduce: str = option(
        "ring",
        "Algorithm that sums gradients over GPUs; compare them with"
        " `hybrid-imagenet bench allreduce`.",
        choices=tuple(ALGORITHMS),
    )
    fusion_threshold_mb: float = option(
        16.0,
        "Send a bucket of gradients once it holds this much; 0 sends each by itself.",
        unit="MiB",
        minimum=0,
    )


@dataclasses.dataclass(frozen=True)
class CommunicationFlags(SharedCommunicationFlags):
    """Communication.

    The first line is the title of these flags in --help.
    """

    compression: str = option(
        "fp16", "Type in which gradients are sent.", choices=tuple(WIRE_DTYPES)
    )


@dataclasses.dataclass(frozen=True)
class CommunicationSettings(SharedCommunicationFlags):
    """Settings of a communicator: the flags, and values that follow from other flags.

    Attributes:
      options: Options of the all-reduce algorithm, of the class that its line in `ALGORITHMS` has;
        by default those that the class declares.
      neighbors: Number of ranks that `Communicator.allreduce_neighbors` sums over; a divisor of
        the number of ranks.
      deterministic: Whether TensorFlow runs in deterministic mode. It then rejects clocks inside
        the step, so steps are not timed.
    """

    options: AllReduceOptions = AllReduceOptions()
    neighbors: int = 1
    deterministic: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError for values that are wrong for every number of ranks."""
        choices = {"allreduce": self.allreduce, "engine": self.engine}
        for name, value in choices.items():
            reason = invalid_reason(value, options_of(SharedCommunicationFlags)[name])
            if reason:
                raise ValueError(f"{name}={value}: {reason}")
        option_class = ALGORITHMS[self.allreduce].options
        if type(self.options) is AllReduceOptions:
            object.__setattr__(self, "options", option_class())
        if type(self.options) is not option_class:
            raise ValueError(f"options={self.options}: not of allreduce={self.allreduce}")

    def with_options(self, values: Mapping[str, Any]) -> CommunicationSettings:
        """Returns these settings with options of the algorithm by name.

        Raises:
          ValueError: For an option that the algorithm does not have.
        """
        option_class = ALGORITHMS[self.allreduce].options
        names = {field.name for field in dataclasses.fields(option_class)}
        for name in sorted(values.keys() - names):
            raise ValueError(f"{name}: there is no such option with allreduce={self.allreduce}")
        return dataclasses.replace(self, options=option_class(**values))

    @property
    def fusion_bytes(self) -> int:
        """Number of bytes at which a bucket is complete."""
        return int(self.fusion_threshold_mb * 2**20)

    def last_bucket_bytes(self, nccl: bool) -> int | None:
        """Returns `fusion_bytes` for the last buckets of a step; None if it is the same.

        Args:
          nccl: Whether gradients are sent by NCCL.
        """
        return _NCCL_LAST_BUCKET_BYTES if nccl else None
