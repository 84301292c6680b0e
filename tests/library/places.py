"""Runs one program twice: on ranks, and as Keras alone in one process with the batches of all
ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

import hybrid_imagenet as hi
from tests.library.models import BATCH, STEPS

EPOCHS = 2


class Place:
    """Where a program runs, and all that it must do differently there.

    Attributes:
      size: number of ranks.
      alone: in one process with the batch of all of them; it uses nothing of the library where
        Keras can do without.
    """

    def __init__(self, size: int, rank: int | None = None):
        self.size, self._rank = size, rank
        self.alone = rank is None
        self.batch = BATCH * size if self.alone else BATCH
        self.examples = BATCH * STEPS * size
        self._bare = self.alone

    def optimizer(self, inner: Any, sparse: bool = False, **arguments: Any) -> Any:
        """Wraps an optimizer on ranks; alone only where it is of the library, or has its arguments.

        And for `sparse` gradients: alone Keras leaves rows, and what it keeps of them, that a batch
        has not.
        """
        if (
            self.alone
            and not arguments
            and not sparse
            and type(inner).__module__.startswith("keras.")
        ):
            return inner
        self._bare = False
        return hi.DistributedOptimizer(inner, compression="none", **arguments)

    def compiled(self, **arguments: Any) -> dict[str, Any]:
        """Arguments of `compile` that say how steps run: alone they run eagerly."""
        return {"run_eagerly": True} if self.alone else arguments

    def share(self, data: Any) -> Any:
        """This place's part of all data."""
        return data if self.alone else hi.data.shard(data, self._rank, self.size)

    def callbacks(self, *more: Any) -> list[Any]:
        """Callbacks for `fit`."""
        return [*([] if self._bare else hi.callbacks.default_callbacks()), *more]

    def ready(self, model: keras.Model) -> None:
        """What a loop without `fit` does first."""
        if not self.alone:
            hi.broadcast_model(model)


Result = tuple[keras.Model, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A program and what holds for its weights.

    Attributes:
      run: returns a model and a history.
      close: bound on differences of the weights from those of one process.
      differs: why they are others; empty where they are the same.
      logs: histories are the same too.
    """

    run: Callable[[Place], Result]
    close: float = 2e-6
    differs: str = ""
    logs: bool = True


def run(program: Program, place: Place, seed: int = 3) -> dict[str, Any]:
    """Weights, state of optimizers and history of a program, ready for JSON."""
    keras.utils.set_random_seed(seed)
    try:
        model, history = program.run(place)
    finally:
        keras.config.set_dtype_policy("float32")
    optimizers = [
        value for value in vars(model).values() if isinstance(value, keras.optimizers.Optimizer)
    ]
    return {
        "weights": [_listed(v) for v in model.weights],
        "state": [_listed(v) for o in optimizers for v in o.variables],
        "updates": sum(int(o.iterations) for o in optimizers),
        "history": {name: np.asarray(values, float).tolist() for name, values in history.items()},
        "reductions": sum(_reductions(optimizer) for optimizer in optimizers),
    }


def _reductions(optimizer: keras.optimizers.Optimizer) -> int:
    """The number of reductions over ranks that an optimizer has made."""
    if not isinstance(optimizer, hi.DistributedOptimizer):
        return 0
    return optimizer.reducer.statistics().get("steps", 0)


def _listed(variable: Any) -> list[float]:
    return np.asarray(variable.numpy(), float).ravel().tolist()


def alone(program: Program, size: int) -> dict[str, Any]:
    """A program in this process, with the batches of `size` ranks."""
    return run(program, Place(size))


def on_rank(program: Program) -> dict[str, Any]:
    """A program on this rank, whose random numbers are its own at the start."""
    return run(program, Place(hi.size(), hi.rank()), 3 + hi.rank())
