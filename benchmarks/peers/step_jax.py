"""Trains ResNet-50 v1.5 with JAX in NHWC as one XLA program, with weights in FP32."""

from __future__ import annotations

import math
import sys
from typing import Any

from benchmarks._step_protocol import send, serve, settings

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    send(
        skipped=(
            f"JAX is not installed for {sys.executable}. Pass a Python that has it, with"
            " --torch_python=PYTHON for `step` or --python=PYTHON for `peer`."
        )
    )
    sys.exit(0)

_LOSS_SCALE = 1024.0
_KINDS = {"float32": jnp.float32, "mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
Weights = list[jax.Array]


class Network:
    """ResNet-50, whose `apply` makes the weights if it is called without them.

    Otherwise it reads them in the same order.
    """

    def __init__(self, kind: Any, classes: int) -> None:
        """Computes in a type; `made` are the weights."""
        self.kind, self.classes = kind, classes
        self.made: Weights = []
        self.given = iter(self.made)
        self.statistics: list[jax.Array] = []

    def weight(self, *shape: int, value: float | None = None) -> jax.Array:
        """The next weight: new ones are constant, or normal by the number of inputs."""
        if (given := next(self.given, None)) is not None:
            return given
        normal = jax.random.normal(jax.random.key(len(self.made)), shape) * math.sqrt(
            2 / math.prod(shape[:-1])
        )
        self.made.append(normal if value is None else jnp.full(shape, value))
        return self.made[-1]

    def conv_norm(self, x: jax.Array, outputs: int, size: int, stride: int = 1) -> jax.Array:
        """A convolution and batch normalization, whose statistics are in FP32."""
        kernel = self.weight(size, size, x.shape[-1], outputs).astype(self.kind)
        padding = [(size // 2, size // 2)] * 2
        layout = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=layout
        )
        scale, offset = self.weight(outputs, value=1.0), self.weight(outputs, value=0.0)
        wide = y.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = (wide * wide).mean((0, 1, 2)) - mean * mean
        self.statistics += [mean, variance]
        return ((wide - mean) * (scale * jax.lax.rsqrt(variance + 1e-5)) + offset).astype(self.kind)

    def pool(self, x: jax.Array) -> jax.Array:
        """The maximum of 3 x 3 pixels with stride 2."""
        padding = ((0, 0), (1, 1), (1, 1), (0, 0))
        return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)

    def apply(self, weights: Weights, x: jax.Array) -> jax.Array:
        """Images [b, s, s, 3] to logits, float32 [b, classes]."""
        self.given = iter(weights)
        self.statistics = []
        x = jax.nn.relu(self.conv_norm(x.astype(self.kind), 64, 7, 2))
        x = self.pool(x)
        for count, width in _STAGES:
            for index in range(count):
                stride = 2 if width > 64 and index == 0 else 1
                y = jax.nn.relu(self.conv_norm(x, width, 1))
                y = jax.nn.relu(self.conv_norm(y, width, 3, stride))
                y = self.conv_norm(y, 4 * width, 1)
                x = jax.nn.relu(y + (x if index else self.conv_norm(x, 4 * width, 1, stride)))
        means = x.astype(jnp.float32).mean((1, 2))
        return means @ self.weight(means.shape[-1], self.classes) + self.weight(
            self.classes, value=0.0
        )


def main() -> None:
    """Builds the network and serves steps, on a GPU where JAX sees one."""
    options = settings()
    if (options["model"], options["width"], options["stem"]) != ("resnet50", 64, "imagenet"):
        send(skipped="the JAX implementation is a ResNet-50. Remove it from --peers.")
        return
    network = Network(_KINDS[options["precision"]], options["num_classes"])
    images = jax.random.normal(
        jax.random.key(0), (options["batch"], options["image_size"], options["image_size"], 3)
    )
    labels = jax.random.randint(jax.random.key(1), (options["batch"],), 0, options["num_classes"])
    network.apply([], images[:1])

    def scaled_loss(weights: Weights, images: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(network.apply(weights, images))
        return -_LOSS_SCALE * jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def step(
        weights: Weights, momenta: Weights, *batch: jax.Array
    ) -> tuple[Weights, Weights, jax.Array]:
        loss, gradients = jax.value_and_grad(scaled_loss)(weights, *batch)
        momenta = [0.9 * m + g / _LOSS_SCALE for m, g in zip(momenta, gradients, strict=True)]
        return (
            [w - 1e-3 * m for w, m in zip(weights, momenta, strict=True)],
            momenta,
            loss / _LOSS_SCALE,
        )

    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = (network.made, [jnp.zeros_like(weight) for weight in network.made])

    def run(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            *state, loss = compiled(*state, images, labels)
        return float(loss)

    serve(run, name="jax", version=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
