"""What the record of an epoch holds beside its results; stops after too many skipped steps, or
where ranks differ.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.comm.agreement import checksum
from hybrid_imagenet.data.sources.source import ReadCounter
from hybrid_imagenet.errors import NumericsError
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import GroupedOptimizer
from hybrid_imagenet.training.late_copies import LateCopies

_NAMED = 8  # of the layers with non-finite gradients; backpropagation meets the last ones first


@dataclasses.dataclass(frozen=True)
class NumericsGuard:
    """Adds loss scale, skipped steps and gradient norm to the records; stops a run that only skips.

    The verdict on each step is the same on every rank, and all ranks look at the same steps, so all
    stop together.

    Attributes:
      optimizer: skips steps.
      max_skipped_steps: in a row, after which a run stops.
      copies: hold what the optimizer tells.
    """

    optimizer: DistributedOptimizer
    max_skipped_steps: int
    copies: LateCopies

    def check(self, step: int, train_loss: float) -> dict[str, float]:
        """Returns the values of a step whose metrics were fetched, for its record.

        Raises:
          NumericsError: if the limit is reached.
        """
        values, in_a_row = self.values(), int(self._value("skipped_in_a_row"))
        if in_a_row >= self.max_skipped_steps:
            layers = self.optimizer.non_finite_variables()
            more = f" and {len(layers) - _NAMED} more" if len(layers) > _NAMED else ""
            raise NumericsError(
                f"step {step}: the last {in_a_row} steps had non-finite gradients (loss"
                f" {train_loss:.4g}, loss scale {values['loss_scale']:g}; in"
                f" {', '.join(layers[-_NAMED:]) or 'none of this step'}{more}, last layer last);"
                " the newest checkpoint is still good: lower the learning rate, lengthen the"
                " warmup or use --precision=float32, and start again with --resume"
            )
        return values

    def values(self) -> dict[str, float]:
        """Returns loss scale, skipped steps and gradient norm as they are now."""
        return {
            "loss_scale": self._value("loss_scale"),
            "skipped_steps": int(self._value("skipped_steps")),
            "grad_norm": self._value("grad_norm"),
        }

    def _value(self, name: str) -> float:
        return float(self.copies.read(name)[0])


class WeightCheck:
    """Compares a checksum of all weights over ranks after every epoch, and names the ranks that
    differ.
    """

    def __init__(self, allgather: Callable[[Any], list[Any]], variables: Sequence[keras.Variable]):
        """`allgather` collects one small object per rank, in the order of ranks."""
        self._allgather = allgather
        self._checksum = tf.function(lambda: checksum(variables), autograph=False)

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Compares the checksums; adds nothing to the record.

        Raises:
          NumericsError: on every rank, if the weights are not the same everywhere.
        """
        sums = self._allgather(int(self._checksum().numpy()))
        differing = [rank for rank, value in enumerate(sums) if value != max(sums, key=sums.count)]
        if differing:
            raise NumericsError(
                f"epoch {epoch + 1}: the weights of rank {', '.join(map(str, differing))} differ"
                " from those of the other ranks; check that host's memory and drivers, and start"
                " again with --resume"
            )
        return {}


class TrustRatios:
    """Gives `trust_ratios`, the LARS ratio of each layer in the last step, in epochs in which LARS
    runs.
    """

    def __init__(self, optimizer: GroupedOptimizer, variables: Sequence[keras.Variable]):
        """Takes the `variables` that the optimizer was built on."""
        self._optimizer = optimizer
        self._names = [variables[i].path for i in optimizer.kernel_indices()]

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Fetches the ratios; none before LARS runs."""
        if not (self._optimizer.scales_layers and self._optimizer.hyperparameters["phase"] > 0):
            return {}
        return {
            "trust_ratios": dict(
                zip(self._names, self._optimizer.trust_ratios.numpy().tolist(), strict=True)
            )
        }


class Costs:
    """Gives `communication_seconds`, `slowest_rank`, `slowest_rank_seconds`, `bytes_read`, `reads`
    and `checkpoint_seconds` (of checkpoints since the last record) of an epoch.

    All ranks leave a reduction at the same time; the slowest enters it last and so waits least. The
    mean of what the others wait longer is the time that a step loses to it.
    """

    def __init__(
        self,
        communicator: Communicator,
        reads: ReadCounter,
        checkpoint_seconds: Callable[[], float],
        reduction_statistics: Callable[[], dict[str, Any]],
    ):
        """Takes what counts this rank's costs.

        Args:
          communicator: gathers the costs of all ranks.
          reads: counts training data read.
          checkpoint_seconds: returns the time of checkpoints.
          reduction_statistics: `GradientReducer.statistics`.
        """
        self._reduction_statistics = reduction_statistics
        self._checkpoint_seconds = checkpoint_seconds
        self._communicator = communicator
        self._reads = reads
        self._before = (reads.bytes_read, reads.operations)

    def __call__(self, epoch: int) -> dict[str, Any]:
        """Gathers the ranks' counters; every rank calls it."""
        read = (self._reads.bytes_read, self._reads.operations)
        exposed = self._reduction_statistics().get("exposed_ms")
        own = [exposed, *(now - then for now, then in zip(read, self._before, strict=True))]
        self._before = read
        waits, read_bytes, reads = zip(*self._communicator.allgather_object(own), strict=True)
        values = {
            "bytes_read": sum(read_bytes),
            "reads": sum(reads),
            "checkpoint_seconds": self._checkpoint_seconds(),
        }
        if None not in waits:
            seconds = [wait / 1000 for wait in waits]
            values["communication_seconds"] = min(seconds)
            values["slowest_rank"] = seconds.index(min(seconds))
            values["slowest_rank_seconds"] = sum(seconds) / len(seconds) - min(seconds)
        return values


class RelativeUpdates:
    """Gives `relative_updates`, |update| / |weights| of each kernel in the last step of an epoch.

    The update is what the step has changed, with momentum and weight decay: it means the same for
    every optimizer and phase. The kernels are copied before that step and compared after it, on
    their device; the host reads the ratios with the epoch's other values.

    Attributes:
      ratios: of the last whole epoch, float32 [kernels]; part of a checkpoint, which may lie
        between an epoch's last step and its record.
    """

    def __init__(self, kernels: Sequence[keras.Variable]):
        """`kernels`: the weights of convolutions and dense layers."""
        self._names = [kernel.path for kernel in kernels]
        self.ratios = keras.Variable(
            np.zeros(len(kernels), np.float32), trainable=False, name="relative_updates"
        )
        self._copy = tf.function(
            lambda: [tf.identity(kernel.value) for kernel in kernels], autograph=False
        )

        def compare(before: list[tf.Tensor]) -> None:
            pairs = zip(kernels, before, strict=True)
            self.ratios.assign(
                tf.stack([tf.norm(kernel.value - old) / tf.norm(old) for kernel, old in pairs])
            )

        self._compare = tf.function(compare, autograph=False)
        self._before: list[tf.Tensor] | None = None

    def step_begins(self, start: float, end: float) -> None:
        """Copies the kernels if an epoch ends in the step over the fractional epochs `start` to
        `end`.
        """
        if self._names and math.floor(end) > math.floor(start):
            self._before = self._copy()

    def step_ends(self) -> None:
        """Compares them with what the step has made of them."""
        if self._before is not None:
            self._compare(self._before)
            self._before = None

    def of_epoch(self, epochs: float) -> dict[str, Any]:
        """Fetches the ratios where whole epochs are done, and none inside of one."""
        if not self._names or not float(epochs).is_integer():
            return {}
        return {
            "relative_updates": dict(zip(self._names, self.ratios.numpy().tolist(), strict=True))
        }
