"""Runs a program on ranks, and as Keras alone in one process with the batches of all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import hybrid_imagenet as hi
from tests.library.models import BATCH, STEPS

EPOCHS = 2
ROUNDED = "each rank rounds to 16 bits"
"""Why programs in FP16 or BF16 differ; see `Program.differs`."""


class Place:
    """The place where a program runs, with everything that the program must do differently there.

    Attributes:
      size: Number of ranks.
      alone: Whether the program runs in one process with the batches of all ranks. It then uses the
        library only where Keras has no equivalent.
    """

    def __init__(self, size: int, rank: int | None = None):
        self.size = size
        self._rank = rank
        self.alone = rank is None
        self.batch = BATCH * size if self.alone else BATCH
        self.examples = BATCH * STEPS * size
        self._bare = self.alone

    def optimizer(self, inner: Any, sparse: bool = False, **arguments: Any) -> Any:
        """Wraps an optimizer on ranks; alone, only where plain Keras would differ.

        Alone, an optimizer is wrapped if it is from the library or has arguments of the wrapper. It
        is also wrapped for `sparse` gradients, because Keras alone does not update rows that are
        absent from a batch, nor their state.
        """
        if (
            self.alone
            and not arguments
            and not sparse
            and type(inner).__module__.startswith("keras.")
        ):
            return inner
        self._bare = False
        return hi.DistributedOptimizer(inner, **arguments)

    def compiled(self, **arguments: Any) -> dict[str, Any]:
        """Returns the arguments of `compile` that choose how steps run: eagerly if alone."""
        return {"run_eagerly": True} if self.alone else arguments

    def share(self, data: Any) -> Any:
        """Returns the part of all data that this place trains on."""
        return data if self.alone else hi.data.shard(data, self._rank, self.size)

    def callbacks(self, *more: Any) -> list[Any]:
        """Returns the callbacks for `fit`."""
        return [*([] if self._bare else hi.callbacks.default_callbacks()), *more]

    def ready(self, model: keras.Model) -> None:
        """Prepares a model for a loop without `fit`."""
        if not self.alone:
            hi.broadcast_model(model)


Result = tuple[keras.Model, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and the expected differences of its weights.

    Attributes:
      run: Returns a model and a history.
      close: Bound on the differences between its weights and those from one process.
      differs: Reason for larger differences, or an empty string if there are none.
      logs: Whether histories are equal too.
    """

    run: Callable[[Place], Result]
    close: float = 2e-6
    differs: str = ""
    logs: bool = True


def run(program: Program, place: Place, seed: int = 3) -> dict[str, Any]:
    """Returns weights, state of optimizers and history of a program, ready for JSON."""
    keras.utils.set_random_seed(seed)
    try:
        model, history = program.run(place)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizers = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    return {
        "weights": [_to_list(v) for v in model.weights],
        "state": [_to_list(v) for o in optimizers for v in o.variables],
        "updates": sum(int(o.iterations) for o in optimizers),
        "history": {name: np.asarray(values, float).tolist() for name, values in history.items()},
        "reductions": sum(_reductions(optimizer) for optimizer in optimizers),
        "skipped": sum(_skipped(optimizer) for optimizer in optimizers),
    }


def _reductions(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how often an optimizer has reduced gradients over ranks."""
    if not isinstance(optimizer, hi.DistributedOptimizer):
        return 0
    return optimizer.reducer.statistics().get("steps", 0)


def _skipped(optimizer: keras.optimizers.Optimizer) -> int:
    """Returns how many steps an optimizer has skipped."""
    if not isinstance(optimizer, hi.DistributedOptimizer):
        return 0
    return int(optimizer.loss_scale.skipped_steps)


def _to_list(variable: Any) -> list[float]:
    return np.asarray(variable.numpy(), float).ravel().tolist()


def alone(program: Program, size: int) -> dict[str, Any]:
    """Runs a program in this process, with the batches of `size` ranks."""
    return run(program, Place(size))


def on_rank(program: Program) -> dict[str, Any]:
    """Runs a program on this rank, with a different random seed on each rank."""
    return run(program, Place(hi.size(), hi.rank()), 3 + hi.rank())
