"""Compiles the whole update after the last reduction into one function over one long vector: for GPUs.

A GPU needs some microseconds to begin a kernel, whatever its work. Variable by variable an update of a ResNet-50 takes
several hundred of them, one after the other, at the end of every step; here it takes fewer than ten
(docs/dev/performance-log.md has the table). Nothing is decided on the host, which would have to wait: a step
whose gradients are not finite keeps each old value by a mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.numerics.packing import ROW
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.base import TOTALS, TRUST_RATIOS, WEIGHTS, Before, GroupedOptimizer, Step
from hybrid_imagenet.optimizers.layout import Layout, Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale

_AVERAGE = "average"
_OWN = _SHARE, _UNSCALE, _DECAY = "share_of_average", "unscale", "scaled_decay"
_LOSS_SCALE_COUNTS = 3
_LANES = 8  # of the scalars, see _scalars

Values = dict[str, Any]


class FlatUpdate:
    """Updates variables, moments, averages and the loss scale from buckets of reduced gradients.

    Variables stay what they are, one for each layer: they are copied into the vector and, as parts of the new vector,
    put back without a copy.
    """

    def __init__(
        self, inner: GroupedOptimizer, loss_scale: LossScale, average: WeightAverage | None, jit_compile: bool
    ) -> None:
        """For an optimizer that has been built; without `jit_compile` the same operations run one by one."""
        self._inner, self._loss_scale, self._average = inner, loss_scale, average
        self._jit_compile = jit_compile
        self._programs: dict[tuple[Any, ...], tuple[Callable[..., Values], Callable[..., Values]]] = {}

    def apply(self, reduced: Packed) -> tuple[tf.Tensor, tf.Tensor]:
        """One step inside a graph, from gradients that are still scaled.

        Returns:
          The sums of squares of the gradients [n] and their unscaled norm, float32.
        """
        shapes = [tuple(v.shape) for v in self._inner._trainable_variables]
        layout = Layout(shapes, [i for bucket in reduced.members for i in bucket])
        hyper = self._inner.hyper.vector()
        if self._inner.phases == 1:
            return self._apply(0, layout, reduced.buckets, hyper)
        with tf.device("CPU:0"):
            later = hyper[self._inner.hyper.names.index("phase")] > 0.5
        branches = [functools.partial(self._apply, phase, layout, reduced.buckets, hyper) for phase in (0, 1)]
        return tf.cond(later, branches[1], branches[0])

    def _apply(
        self, phase: int, layout: Layout, buckets: Sequence[tf.Tensor], hyper: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        kept = self._kept(phase)
        counted = self._counted(phase)
        packed = {name: layout.pack([v.value for v in held]) for name, held in kept.items()}
        early, late = self._programs_for(phase, layout)
        totals = [v.value for v in self._inner.totals]
        scalars = hyper, self._loss_scale.scale.value, [v.value for v in counted], totals
        new = late(list(buckets), packed, early(packed[WEIGHTS], *scalars), *scalars)
        for name, held in kept.items():
            for i, value in layout.unpack(new[name], new["ends"][name]).items():
                held[i].value.assign(value)
        self._loss_scale.scale.value.assign(new["scale"])
        for variable, value in zip([*counted, *self._inner.totals], [*new["counts"], *new[TOTALS]], strict=True):
            variable.value.assign(value)
        if TRUST_RATIOS in new:
            self._inner.trust_ratios.value.assign(new[TRUST_RATIOS])
        return new["square_sums"], new["norm"]

    def _counted(self, phase: int) -> list[keras.Variable]:
        """The int64 scalars that a step changes: the counters of the loss scale, then counters of steps."""
        return [*self._loss_scale.variables[1:], self._inner.iterations, *self._inner.counters_in(phase)]

    def _kept(self, phase: int) -> dict[str, Sequence[keras.Variable]]:
        """Returns the variables that a step of a phase changes, by name, in the order of the trainable variables."""
        kept: dict[str, Sequence[keras.Variable]] = {WEIGHTS: self._inner._trainable_variables}
        kept |= {slot: getattr(self._inner, slot) for slot in self._inner.slots_in(phase)}
        if self._average is not None:
            kept[_AVERAGE] = list(self._average.variables.values())
        return kept

    def _programs_for(self, phase: int, layout: Layout) -> tuple[Callable[..., Values], Callable[..., Values]]:
        """Compiles the parts before and after gradients are there; traced once for each order of the variables."""
        key = phase, *layout.order
        if key not in self._programs:
            parts = functools.partial(self.before, phase, layout), functools.partial(self.after, phase, layout)
            early, late = (tf.function(part, autograph=False, jit_compile=self._jit_compile) for part in parts)
            self._programs[key] = early, late
        return self._programs[key]

    def before(
        self,
        phase: int,
        layout: Layout,
        weights: tf.Tensor,
        hyper: tf.Tensor,
        scale: tf.Tensor,
        counts: Sequence[tf.Tensor],
        totals: Sequence[tf.Tensor],
    ) -> Values:
        """Computes all that gradients do not change; the device does so while it waits for them."""
        number = tf.cast(counts[_LOSS_SCALE_COUNTS], tf.float32) + 1.0
        now = Before(
            phase=phase,
            hyper=self._by_name(hyper),
            number=number,
            counters=counts[_LOSS_SCALE_COUNTS + 1 :],
            totals=totals,
            weight_sums=lambda: layout.sums(self._decayed(weights, layout, hyper)),
        )
        found = self._inner.before(now) | {_UNSCALE: 1.0 / scale}
        if not isinstance(decay := self._decay(layout), float):
            found[_DECAY] = decay * scale
        if self._average is not None:
            found[_SHARE] = self._average.share(number)
        return found

    def after(
        self,
        phase: int,
        layout: Layout,
        buckets: Sequence[tf.Tensor],
        kept: Values,
        before: Values,
        hyper: tf.Tensor,
        scale: tf.Tensor,
        counts: Sequence[tf.Tensor],
        totals: Sequence[tf.Tensor],
    ) -> Values:
        """Computes all new values from the old ones, as [rows, ROW] or scalars."""
        grad = tf.reshape(tf.concat([tf.cast(bucket, tf.float32) for bucket in buckets], 0), [layout.rows, ROW])
        square_sums = layout.sums(grad)
        scalars = self._scalars(_first_lane(square_sums), scale, before[_UNSCALE], counts)
        finite = scalars.pop("finite")
        step = Step(
            phase=phase,
            hyper=self._by_name(hyper),
            before={name: value for name, value in before.items() if name not in (*_OWN, TOTALS)},
            unscale=before[_UNSCALE],
            square_sums=square_sums,
            decay=self._decay(layout),
            scaled_decay=before.get(_DECAY, 0.0),
            spread=layout.spread,
            norms=lambda values: layout.spread(tf.sqrt(layout.sums(values))),
            each=layout.each,
        )
        values = {name: value for name, value in kept.items() if name != _AVERAGE}
        values[WEIGHTS] = self._decayed(values[WEIGHTS], layout, hyper)
        new = self._inner.rule(grad, values, step)
        if self._average is not None:
            new[_AVERAGE] = kept[_AVERAGE] - before[_SHARE] * (kept[_AVERAGE] - new[WEIGHTS])
        for name, old in kept.items():
            new[name] = tf.where(finite, new[name], old)
        new[TOTALS] = [tf.where(finite, a, b) for a, b in zip(before.get(TOTALS, []), totals, strict=True)]
        new["ends"] = {name: layout.ends(new[name]) for name in kept}
        return new | {"square_sums": square_sums} | scalars

    def _decayed(self, weights: tf.Tensor, layout: Layout, hyper: tf.Tensor) -> tf.Tensor:
        """The weights after decoupled decay, with which the step begins."""
        if not self._inner.decoupled:
            return weights
        decays = np.zeros(len(layout.shapes), np.float32)
        decays[self._inner.decayed_indices()] = self._inner.decoupled
        return weights * (1.0 - layout.spread_constant(decays) * self._inner.decay_share(self._by_name(hyper)))

    def _by_name(self, hyper: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(self._inner.hyper.names, tf.unstack(hyper), strict=True))

    def _scalars(
        self, totals: tf.Tensor, scale: tf.Tensor, unscale: tf.Tensor, counts: Sequence[tf.Tensor]
    ) -> dict[str, Any]:
        """The new scalars, all of one kernel: as sums over lanes of a common vector, of which only the first counts.

        Scalars that are computed as such become a kernel each.
        """
        finite = tf.math.is_finite(totals)
        taken = tf.cast(finite, tf.int64)
        scaling = self._loss_scale.next(finite, scale, *counts[:_LOSS_SCALE_COUNTS])
        lanes = [*scaling, *(count + taken for count in counts[_LOSS_SCALE_COUNTS:]), tf.sqrt(totals) * unscale]
        scale, *counts, norm = (tf.reduce_sum(tf.where(_FIRST, lane, tf.zeros_like(lane))) for lane in lanes)
        return {"scale": scale, "counts": counts, "norm": norm, "finite": tf.reduce_any(_FIRST & finite)}

    def _decay(self, layout: Layout) -> Any:
        """The coefficients for each row, or the number 0."""
        decays = np.array([self._inner.decay_of(i) for i in range(len(layout.shapes))], np.float32)
        return tf.constant(layout.spread_constant(decays)) if decays.any() else 0.0


_FIRST = np.arange(_LANES) == 0


def _first_lane(vector: tf.Tensor) -> tf.Tensor:
    """The sum of a vector in the first lane, nothing in the others: [_LANES]."""
    return tf.reduce_sum(tf.where(_FIRST[:, None], vector[None], 0.0), 1)
