"""Implementation: JAX, ResNet-50 with all that this program's step does, one program of XLA.

Images of bytes are flipped and normalized in the step. It has label smoothing, moving statistics, a
loss scale, LARS with momentum and weight decay, and keeps the weights where gradients are not
finite. With `byte_pooling`, max pooling keeps one byte per output and its gradient gathers by it,
as `hybrid_imagenet.models.stem_program` does; otherwise it is XLA's own.
"""

from __future__ import annotations

from typing import Any

from benchmarks._step_protocol import send, serve, settings
from benchmarks.peers.step_jax import (
    _KINDS,
    _LOSS_SCALE,
    Network,
    Weights,
    jax,
    jnp,
)

_MEAN = (123.675, 116.28, 103.53)
_DEVIATION = (58.395, 57.12, 57.375)
_SMOOTHING = 0.1
_STATISTICS_MOMENTUM = 0.9
_MOMENTUM = 0.9
_DECAY = 5e-5
_TRUST = 1e-3
_RATE = 0.1


def _windows(x: jax.Array) -> list[jax.Array]:
    """The nine pixels of each window of 3 x 3 with stride 2, row by row."""
    _, height, width, _ = x.shape
    padded = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
    return [
        padded[:, row : row + height - 1 : 2, column : column + width - 1 : 2]
        for row in range(3)
        for column in range(3)
    ]


def _pool_with_winners(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest, *others = _windows(x)
    winners = jnp.zeros(largest.shape, jnp.uint8)
    for number, value in enumerate(others, 1):
        is_larger = value > largest
        largest = jnp.where(is_larger, value, largest)
        winners = jnp.where(is_larger, jnp.uint8(number), winners)
    return largest, winners


@jax.custom_vjp
def _pool(x: jax.Array) -> jax.Array:
    return _pool_with_winners(x)[0]


def _pool_gradient(winners: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    wide = dy.astype(jnp.float32)

    def from_window(row: int, column: int) -> jax.Array:
        return jnp.where(winners == 3 * row + column, wide, 0.0)

    def from_below(values: jax.Array) -> jax.Array:
        return jnp.pad(values[:, 1:], ((0, 0), (0, 1), (0, 0), (0, 0)))

    def from_right(values: jax.Array) -> jax.Array:
        return jnp.pad(values[:, :, 1:], ((0, 0), (0, 0), (0, 1), (0, 0)))

    even_even = from_window(1, 1)
    even_odd = from_window(1, 2) + from_right(from_window(1, 0))
    odd_even = from_window(2, 1) + from_below(from_window(0, 1))
    odd_odd = (
        from_window(2, 2)
        + from_right(from_window(2, 0))
        + from_below(from_window(0, 2))
        + from_below(from_right(from_window(0, 0)))
    )
    rows = [jnp.stack([even_even, even_odd], 3), jnp.stack([odd_even, odd_odd], 3)]
    batch, height, width, channels = dy.shape
    whole = jnp.stack(rows, 2).reshape(batch, 2 * height, 2 * width, channels)
    return (whole.astype(dy.dtype),)


_pool.defvjp(_pool_with_winners, _pool_gradient)


class BytePoolingNetwork(Network):
    """The network with pooling by bytes."""

    def pool(self, x: jax.Array) -> jax.Array:
        """The maximum of 3 x 3 pixels with stride 2."""
        return _pool(x)


def main() -> None:
    """Builds the network and serves steps, on a GPU where JAX sees one."""
    options = settings()
    if (options["model"], options["width"], options["stem"]) != ("resnet50", 64, "imagenet"):
        send(skipped="the JAX implementation is a ResNet-50. Remove it from --peers.")
        return
    kind = _KINDS[options["precision"]]
    network = (BytePoolingNetwork if options["byte_pooling"] else Network)(
        kind, options["num_classes"]
    )
    size = options["image_size"]
    batch = options["batch"]
    network.apply([], jnp.zeros((1, size, size, 3), kind))
    images = jax.random.randint(jax.random.key(0), (batch, size, size, 3), 0, 256, jnp.uint8)
    labels = jax.random.randint(jax.random.key(1), (batch,), 0, options["num_classes"])
    draws = jax.random.uniform(jax.random.key(2), (batch,))

    def scaled_loss(weights: Weights, images: jax.Array) -> tuple[jax.Array, Any]:
        scores = jax.nn.log_softmax(network.apply(weights, images))
        loss = -jnp.take_along_axis(scores, labels[:, None], 1).mean()
        loss = (1 - _SMOOTHING) * loss - _SMOOTHING * scores.mean()
        return _LOSS_SCALE * loss, network.statistics

    def step(
        weights: Weights, momenta: Weights, moving: Weights, images: jax.Array, draws: jax.Array
    ) -> tuple[Weights, Weights, Weights, jax.Array]:
        flipped = jnp.where(draws[:, None, None, None] < 0.5, images[:, :, ::-1], images)
        pixels = flipped.astype(jnp.float32) - jnp.array(_MEAN)
        pixels = (pixels / jnp.array(_DEVIATION)).astype(kind)
        differentiate = jax.value_and_grad(scaled_loss, has_aux=True)
        (loss, statistics), gradients = differentiate(weights, pixels)
        moving = [
            _STATISTICS_MOMENTUM * old + (1 - _STATISTICS_MOMENTUM) * new
            for old, new in zip(moving, statistics, strict=True)
        ]
        square_sums = [jnp.sum(gradient * gradient) for gradient in gradients]
        is_finite = jnp.isfinite(sum(square_sums))
        new_weights, new_momenta = [], []
        for weight, momentum, gradient, square_sum in zip(
            weights, momenta, gradients, square_sums, strict=True
        ):
            gradient = gradient / _LOSS_SCALE
            if weight.ndim > 1:
                weight_norm = jnp.sqrt(jnp.sum(weight * weight))
                norm = jnp.sqrt(square_sum) / _LOSS_SCALE + _DECAY * weight_norm + 1e-9
                gradient = (gradient + _DECAY * weight) * (_TRUST * weight_norm / norm)
            velocity = _MOMENTUM * momentum + gradient
            new_momenta.append(jnp.where(is_finite, velocity, momentum))
            new_weights.append(jnp.where(is_finite, weight - _RATE * velocity, weight))
        return new_weights, new_momenta, moving, loss / _LOSS_SCALE

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    state = (
        network.made,
        [jnp.zeros_like(weight) for weight in network.made],
        [jnp.zeros_like(value) for value in network.statistics],
    )

    def run(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            *state, loss = compiled(*state, images, draws)
        return float(loss)

    serve(run, name="jax", version=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
