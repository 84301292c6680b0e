"""Training with less memory: activations inside a residual block are computed again in the backward pass."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hybrid_imagenet.models import normalization


@keras.saving.register_keras_serializable(package="hybrid_imagenet")
class RecomputingModel(keras.Model):
    """A functional model whose forward pass in training keeps only the activations between segments.

    The layers, their names and the inference pass are as in the plain functional model.
    """

    def cut(self, boundaries: Sequence[keras.KerasTensor]) -> RecomputingModel:
        """Names the tensors, in order, that are kept; what lies between two of them is computed again. Returns self."""
        ends = [self.input, *boundaries, self.output]
        segments = [keras.Model(a, b) for a, b in itertools.pairwise(ends)]
        # In a closure, because Keras would count the layers of an attribute a second time.
        self._run = lambda x: _run_segments(segments, x)
        return self

    def call(self, inputs: tf.Tensor, training: bool | None = None, mask: Any = None) -> tf.Tensor:
        """Runs the model; in training, with recomputation."""
        if training and hasattr(self, "_run"):
            return self._run(inputs)
        return super().call(inputs, training=training, mask=mask)


def _run_segments(segments: Sequence[keras.Model], x: tf.Tensor) -> tf.Tensor:
    """Runs the segments: the first (stem) and the last (classifier) keep activations, the blocks between do not."""
    x = segments[0](x, training=True)
    for segment in segments[1:-1]:
        x = recompute(segment, x)
    return segments[-1](x, training=True)


def recompute(segment: keras.Model, inputs: tf.Tensor) -> tf.Tensor:
    """`segment(inputs)` in training, with its activations computed again for the gradient.

    The second pass leaves the kept batch normalization statistics alone, so that a moving average moves once.
    """

    @tf.custom_gradient
    def run(x: tf.Tensor) -> tuple:
        def gradient(dy: tf.Tensor, variables: Sequence[tf.Variable] = ()) -> tuple:
            with tf.GradientTape() as tape, normalization.statistics_kept():
                # Waiting for dy puts the second pass where it is needed and keeps it from being merged with the first.
                with tf.control_dependencies([dy]):
                    again = tf.identity(x)
                tape.watch(again)
                outputs = segment(again, training=True)
            dx, *rest = tape.gradient(outputs, [again, *variables], output_gradients=dy)
            return dx, rest

        return segment(x, training=True), gradient

    return run(inputs)
