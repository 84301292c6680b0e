"""Validates and stores averaged weights, with the statistics of batch normalization that belong to
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import keras
import tensorflow as tf

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.training.batch_norm import Pairs


class AveragedWeights:
    """Puts the averaged weights in place for each validation, and takes the trained ones back after
    it.

    The statistics of batch normalization are measured again under the averaged weights, from
    training batches (`PreciseStatistics`), and not averaged along: the average of statistics seen
    on the way is not the statistics of the average. Activations of averaged weights spread less,
    since noise that pulls single steps apart cancels (Izmailov et al., arXiv 1803.05407, 3.2). It
    costs as many forward passes per validation and checkpoint as there are batches, and nothing per
    step.

    Training continues as if nothing had happened: all that the passes change is put back, the state
    of dropout too.
    """

    def __init__(
        self,
        model: keras.Model,
        average: WeightAverage,
        statistics: Pairs,
        measure: Callable[[], None],
        state: RunState,
    ):
        """Takes the network, the average of its weights, and (mean, variance) of every
        normalization layer.

        `measure` measures these again for the weights in place, merged over ranks, once after a
        step of `state`.
        """
        self._network = model
        self._average = average
        self._statistics = {v.path: v for pair in statistics for v in pair}
        self._own = {
            p: keras.Variable(v.numpy(), trainable=False, name=v.name)
            for p, v in self._statistics.items()
        }
        self._measure = measure
        self._state = state
        self._measured_at: int | None = None

    @property
    def variables(self) -> Mapping[str, keras.Variable]:
        """The averages and their statistics, by the path of the model's variable that each can take
        the place of.
        """
        return {**self._average.variables, **self._own}

    def refresh(self) -> None:
        """Measures the statistics under the averages as they are now; every rank must call it."""
        if self._measured_at == self._state.step:
            return
        self._measured_at = self._state.step
        with self._exchanged():
            self._measure()
            for path, variable in self._statistics.items():
                self._own[path].assign(variable.value)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Has the network hold the averages and their statistics inside; every rank must call
        it.
        """
        self.refresh()
        with self._exchanged():
            for path, variable in self._statistics.items():
                variable.assign(self._own[path].value)
            yield

    @contextlib.contextmanager
    def _exchanged(self) -> Iterator[None]:
        """Exchanges weights and averages, and back, also after an error: what was trained is saved
        then.
        """
        trained = [tf.identity(v.value) for v in self._network.non_trainable_variables]
        self._average.exchange()
        try:
            yield
        finally:
            self._average.exchange()
            for variable, value in zip(self._network.non_trainable_variables, trained, strict=True):
                variable.assign(value)
