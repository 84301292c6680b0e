"""Updates variables, moments, averages and the loss scale from reduced gradients, by one rule.

A GPU needs some microseconds to start a kernel, whatever its work. Variable by variable an update
of a ResNet-50 takes several hundred of them at the end of every step; over one vector of all
variables it takes some ten (docs/dev/performance-log.md has the table). A processor has no such
cost, and memory that is slow: there the vector would cost a fifth of a step of ResNet-50 on small
images, and the rule runs for each large variable, in place. The many small ones are a vector there
too: each program costs some hundredths of a second of the first step.

Both ways evaluate `GroupedOptimizer.rule`, compiled by XLA. With a GPU nothing is decided on the
host, which would have to wait: a step whose gradients are not finite keeps each old value by a
mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import private_api, xla
from hybrid_imagenet.comm.packing import ROW_SIZE
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.layout import Layout, Packed
from hybrid_imagenet.optimizers.loss_scale import LossScale
from hybrid_imagenet.optimizers.rule import TRUST_RATIOS, WEIGHTS, Before, Measured, Step

_AVERAGE = "average"  # the key of the averaged weights, beside WEIGHTS and the optimizer's slots
_LOSS_SCALE_COUNTS = 3
_LANES = 8  # of the scalars, see _late
_SMALL = 4096  # numbers at most in a variable that processors update together with others

Values = dict[str, Any]


class Scalars(NamedTuple):
    """What a step reads besides gradients and variables.

    Attributes:
      hyper: the values of the optimizer's `Hyper`.
      scale: the loss scale.
      counts: int64; the counters of the loss scale, then those of steps.
    """

    hyper: tf.Tensor
    scale: tf.Tensor
    counts: list[tf.Tensor]


class Early(NamedTuple):
    """What gradients do not change.

    Attributes:
      unscale: 1 / loss scale.
      scaled_decay: of coupled weight decay, times the loss scale, for each variable, [n], or row;
      None without any.
      shrink: what decoupled decay multiplies the weights by, [n]; None without it.
      share: of the new weights in the average; None without one.
      rule: what the rule has asked for.
    """

    unscale: tf.Tensor
    scaled_decay: tf.Tensor | None
    shrink: tf.Tensor | None
    share: tf.Tensor | None
    rule: Values


class Late(NamedTuple):
    """What follows from the sizes of the gradients alone.

    Attributes:
      scale, counts: new values of those of `Scalars`.
      norm: of all gradients, unscaled.
      square_sums: of each gradient, still scaled, [n].
      finite: whether the step is taken.
      ratios: for the log; None without any.
      rule: what the rule has of each layer.
    """

    scale: tf.Tensor
    counts: list[tf.Tensor]
    norm: tf.Tensor
    square_sums: tf.Tensor
    finite: tf.Tensor
    ratios: tf.Tensor | None
    rule: Values


class Known(NamedTuple):
    """What a rule has of a step: all of `Early`, `Late.rule`, `Late.finite` and the values of
    `Hyper`.
    """

    early: Early
    layers: Values
    finite: tf.Tensor
    hyper: tf.Tensor


class Update:
    """The update of an optimizer's variables.

    Variables stay what they are, one for each layer: for a GPU they are copied into the vector and,
    as parts of the new vector, put back without a copy.
    """

    def __init__(
        self,
        inner: Any,
        loss_scale: LossScale,
        average: WeightAverage | None = None,
        *,
        packed: bool | None = None,
    ) -> None:
        """Takes the parts; where XLA is not supported the same operations run one by one.

        Args:
          inner: a `GroupedOptimizer`.
          loss_scale: what the gradients are multiplied by.
          average: follows the weights.
          packed: one vector of all variables; by default where there is a GPU.
        """
        self._inner, self._loss_scale, self._average = inner, loss_scale, average
        self._packed = xla.has_gpu() if packed is None else packed
        self._jit_compile = xla.supported()
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def apply(self, reduced: Packed) -> tuple[tf.Tensor, tf.Tensor]:
        """One step inside a graph, from gradients that are still scaled.

        Returns:
          The sums of squares of the gradients [n] and their unscaled norm, float32.
        """
        shapes = [tuple(v.shape) for v in private_api.trainable_variables(self._inner)]
        layout = Layout(shapes, [i for bucket in reduced.members for i in bucket])
        counted = self._counted()
        scalars = Scalars(
            self._inner.hyper.vector(), self._loss_scale.scale.value, [v.value for v in counted]
        )
        if self._packed:
            new = self._together(layout, reduced, scalars)
        else:
            grads = layout.split(reduced)
            square_sums = _square_sums([grads.get(i, tf.zeros([0])) for i in range(len(shapes))])
            new = self._each(layout, grads, square_sums, scalars)
        self._loss_scale.scale.value.assign(new.scale)
        for variable, value in zip(counted, new.counts, strict=True):
            variable.value.assign(value)
        if new.ratios is not None:
            self._inner.trust_ratios.value.assign(new.ratios)
        return new.square_sums, new.norm

    def _counted(self) -> list[keras.Variable]:
        """The int64 scalars that a step changes: the counters of the loss scale, then counters of
        steps.
        """
        return [*self._loss_scale.variables[1:], self._inner.iterations, *self._inner.counters()]

    def _kept(self) -> dict[str, Sequence[keras.Variable]]:
        """Returns the variables that a step changes, by name, in the order of the trainable
        variables.
        """
        kept: dict[str, Sequence[keras.Variable]] = {
            WEIGHTS: private_api.trainable_variables(self._inner)
        }
        kept |= {slot: getattr(self._inner, slot) for slot in self._inner.slots}
        if self._average is not None:
            kept[_AVERAGE] = list(self._average.variables.values())
        return kept

    def _compiled(self, key: tuple[Any, ...], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, traced once for each key and kinds of arguments."""
        if key not in self._programs:
            self._programs[key] = tf.function(
                function, autograph=False, jit_compile=self._jit_compile
            )
        return self._programs[key]

    # All variables as one vector

    def _together(self, layout: Layout, reduced: Packed, scalars: Scalars) -> Late:
        """Compiles two programs: what can be done while gradients travel, and all that follows the
        last of them.
        """
        kept = self._kept()
        rows = {name: layout.pack([v.value for v in held]) for name, held in kept.items()}
        before, after = (
            self._compiled((part, *layout.order), functools.partial(getattr(self, part), layout))
            for part in ("before", "after")
        )
        new, values, ends = after(
            list(reduced.buckets), rows, before(rows[WEIGHTS], *scalars), *scalars
        )
        for name, held in kept.items():
            for i, value in layout.unpack(values[name], ends[name]).items():
                held[i].value.assign(value)
        return new

    def before(self, layout: Layout, weights: tf.Tensor, *given: Any) -> Early:
        """Computes all that gradients do not change; the device does so while it waits for them."""
        decays = layout.spread_constant(self._of_decayed(self._inner.decay))
        return self._early(Scalars(*given), lambda: layout.sums(weights), decays)

    def after(
        self, layout: Layout, buckets: Sequence[tf.Tensor], kept: Values, early: Early, *given: Any
    ) -> tuple[Late, Values, Values]:
        """Computes all new values from the old ones, as scalars, as [rows, ROW_SIZE], and as the
        ends of these.
        """
        grad = tf.reshape(
            tf.concat([tf.cast(bucket, tf.float32) for bucket in buckets], 0),
            [layout.rows, ROW_SIZE],
        )
        new = self._late(layout.sums(grad), early, Scalars(*given))
        decay = layout.spread_constant(self._of_decayed(self._inner.decay))
        step = self._step(Known(early, new.rule, new.finite, given[0]), _ways(layout), decay)
        values = _where(new.finite, self._new(grad, kept, step, early), kept)
        # A vector that comes out is a kernel more.
        return new._replace(rule={}), values, {name: layout.ends(values[name]) for name in kept}

    # Each large variable by itself

    def _each(
        self,
        layout: Layout,
        grads: Mapping[int, tf.Tensor],
        square_sums: tf.Tensor,
        scalars: Scalars,
    ) -> Late:
        """Compiles a program for each shape of a large variable, which it changes in place, and one
        for all others.
        """
        kept, decays = self._kept(), self._of_decayed(self._inner.decay)
        early = self._early(scalars, lambda: _square_sums([v.value for v in kept[WEIGHTS]]), decays)
        new = self._late(square_sums, early, scalars)
        known = Known(early, new.rule, new.finite, scalars.hyper)
        small = Layout(layout.shapes, [i for i in grads if math.prod(layout.shapes[i]) <= _SMALL])

        for i in [i for i in grads if i not in small.order]:
            kernel = self._inner.kinds[i] is ParameterKind.KERNEL
            one = self._compiled(("one", layout.shapes[i], kernel), functools.partial(self._one, i))
            one(
                {name: held[i].value for name, held in kept.items()},
                grads[i],
                tf.constant(i),
                known,
            )
        if small.order:
            rows = {name: small.pack([v.value for v in held]) for name, held in kept.items()}
            many = self._compiled(("small",), functools.partial(self._many, small))
            for name, values in many(rows, small.pack(grads), known).items():
                for i, value in small.unpack(values).items():
                    kept[name][i].value.assign(value)
        return new

    def _one(
        self,
        example: int,
        held: Mapping[str, tf.Variable],
        grad: tf.Tensor,
        position: tf.Tensor,
        known: Known,
    ) -> None:
        """Updates the variable at a position, int32 scalar, which has the shape and kind of
        variable `example`.
        """
        ways: dict[str, Callable[..., Any]] = {
            "spread": lambda vector: (
                vector if vector.shape.rank == 0 else tf.gather(vector, position)
            ),
            "norms": lambda values: tf.sqrt(tf.reduce_sum(tf.square(values))),
            "each": lambda values, function: function(example, values),
        }
        step = self._step(known, ways)

        def update() -> None:
            new = self._new(
                grad, {name: v.read_value() for name, v in held.items()}, step, known.early
            )
            for name, variable in held.items():
                variable.assign(new[name])

        tf.cond(known.finite, update, lambda: None)  # a mask would take a third longer

    def _many(self, layout: Layout, kept: Values, grad: tf.Tensor, known: Known) -> Values:
        """Returns the new values of a layout's variables from the old ones, as [rows, ROW_SIZE]."""
        step = self._step(known, _ways(layout))
        return _where(known.finite, self._new(grad, kept, step, known.early), kept)

    # What both have in common

    def _early(
        self, scalars: Scalars, weight_sums: Callable[[], tf.Tensor], decays: np.ndarray
    ) -> Early:
        """All that gradients do not change; `decays` has a coefficient for each row, or for each
        variable.
        """
        number = tf.cast(scalars.counts[_LOSS_SCALE_COUNTS], tf.float32) + 1.0
        hyper = self._by_name(scalars.hyper)
        shrink = None
        if self._inner.decoupled:
            shrink = 1.0 - self._of_decayed(self._inner.decoupled) * self._inner.decay_share(hyper)
        now = Before(
            hyper=hyper,
            number=number,
            counters=scalars.counts[_LOSS_SCALE_COUNTS + 1 :],
            weight_sums=lambda: (
                weight_sums() if shrink is None else weight_sums() * tf.square(shrink)
            ),
        )
        return Early(
            unscale=1.0 / scalars.scale,
            scaled_decay=decays * (self._inner.decays(hyper) * scalars.scale)
            if decays.any()
            else None,
            shrink=shrink,
            share=None if self._average is None else self._average.share(number),
            rule=self._inner.before(now),
        )

    def _late(self, square_sums: tf.Tensor, early: Early, scalars: Scalars) -> Late:
        """Computes the next loss scale, counters and norm, and what the rule has of each layer."""
        totals, scale, counts = _first_lane(square_sums), scalars.scale, scalars.counts
        finite = tf.math.is_finite(totals)
        taken = tf.cast(finite, tf.int64)
        scaling = self._loss_scale.next(finite, scale, *counts[:_LOSS_SCALE_COUNTS])
        hyper, (updates, *others) = self._by_name(scalars.hyper), counts[_LOSS_SCALE_COUNTS:]
        others = [count + taken * tf.cast(hyper["phase"] > 0.5, tf.int64) for count in others]
        lanes = [*scaling, updates + taken, *others, tf.sqrt(totals) * early.unscale]
        # All of one kernel, as sums of a common vector; scalars that are computed as such become a
        # kernel each.
        scale, *counts, norm = (
            tf.reduce_sum(tf.where(_FIRST, lane, tf.zeros_like(lane))) for lane in lanes
        )
        layers = self._inner.layers(Measured(hyper, early.rule, early.unscale, square_sums))
        ratios = layers.pop(TRUST_RATIOS, None)
        return Late(
            scale, counts, norm, square_sums, tf.reduce_any(_FIRST & finite), ratios, layers
        )

    def _step(
        self, known: Known, ways: Mapping[str, Callable[..., Any]], decay: Any = None
    ) -> Step:
        """The step of some variables. `decay` is that of each row; without it that of each variable
        is spread.
        """
        scaled: Any = known.early.scaled_decay
        if scaled is None:
            decay = scaled = 0.0
        elif decay is None:
            decay, scaled = (
                ways["spread"](tf.constant(self._of_decayed(self._inner.decay))),
                ways["spread"](scaled),
            )
        return Step(
            hyper=self._by_name(known.hyper),
            before=known.early.rule | known.layers,
            unscale=known.early.unscale,
            decay=decay,
            scaled_decay=scaled,
            **ways,
        )

    def _new(self, grad: tf.Tensor, kept: Values, step: Step, early: Early) -> Values:
        """The new values by the names of the old ones."""
        values = {name: value for name, value in kept.items() if name != _AVERAGE}
        if early.shrink is not None:
            values[WEIGHTS] *= step.spread(early.shrink)
        new = self._inner.rule(grad, values, step)
        if early.share is not None:
            new[_AVERAGE] = kept[_AVERAGE] - early.share * (kept[_AVERAGE] - new[WEIGHTS])
        return new

    def _by_name(self, hyper: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(self._inner.hyper.names, tf.unstack(hyper), strict=True))

    def _of_decayed(self, coefficient: float) -> np.ndarray:
        """A coefficient for the variables that weight decay acts on, 0 for the others, float32
        [n].
        """
        found = np.zeros(len(self._inner.kinds), np.float32)
        found[self._inner.decayed_indices()] = coefficient
        return found


_FIRST = np.arange(_LANES) == 0


def _first_lane(vector: tf.Tensor) -> tf.Tensor:
    """The sum of a vector in the first lane, nothing in the others: [_LANES]."""
    return tf.reduce_sum(tf.where(_FIRST[:, None], vector[None], 0.0), 1)


def _ways(layout: Layout) -> dict[str, Callable[..., Any]]:
    """What a `Step` offers, for the variables of a layout in rows."""
    return {
        "spread": layout.spread,
        "norms": lambda values: layout.spread(tf.sqrt(layout.sums(values))),
        "each": layout.each,
    }


def _where(finite: tf.Tensor, new: Values, old: Values) -> Values:
    return {name: tf.where(finite, new[name], value) for name, value in old.items()}


def _square_sums(values: Sequence[tf.Tensor]) -> tf.Tensor:
    return 2.0 * tf.stack([tf.nn.l2_loss(value) for value in values])
