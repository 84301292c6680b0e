"""Implementation: JAX, ResNet v1.5 in NHWC, compiled as one program by XLA; weights in FP32, computation as asked."""

from __future__ import annotations

import math
import sys
from typing import Any

from benchmarks._step_protocol import say, serve, settings
from hybrid_imagenet.numerics.depths import BASIC, DEPTHS

try:
    import jax
    import jax.numpy as jnp
except ImportError:
    say(skipped="JAX is not installed here; name an interpreter that has it with --torch_python=PATH")
    sys.exit(0)

_LOSS_SCALE = 1024.0  # of FP16
_KINDS = {"float32": jnp.float32, "mixed_bfloat16": jnp.bfloat16, "mixed_float16": jnp.float16}


class Network:
    """Makes weights when it is first called, with weights=None, and reads them in the same order afterwards."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.kind = options, _KINDS[options["precision"]]
        self.weights: list[jax.Array] = []
        self.given: Any = None

    def weight(self, shape: tuple[int, ...], value: float | None = None) -> jax.Array:
        """The next weight: constant, or normal by the number of inputs."""
        if self.given is not None:
            return next(self.given)
        made = jax.random.normal(jax.random.key(len(self.weights)), shape) * math.sqrt(2 / math.prod(shape[:-1]))
        self.weights.append(made if value is None else jnp.full(shape, value))
        return self.weights[-1]

    def conv_norm(self, x: jax.Array, outputs: int, size: int, stride: int = 1) -> jax.Array:
        """A convolution and batch normalization, whose statistics are in FP32."""
        kernel = self.weight((size, size, x.shape[-1], outputs)).astype(self.kind)
        padding = [(size // 2, size // 2)] * 2
        y = jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        scale, offset = self.weight((outputs,), 1.0), self.weight((outputs,), 0.0)
        wide = y.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = (wide * wide).mean((0, 1, 2)) - mean * mean
        return ((wide - mean) * (scale * jax.lax.rsqrt(variance + 1e-5)) + offset).astype(self.kind)

    def __call__(self, given: list[jax.Array] | None, x: jax.Array) -> jax.Array:
        """Images [b, s, s, 3] to logits, float32 [b, classes]."""
        self.given = None if given is None else iter(given)
        options = self.options
        large, basic = options["stem"] == "imagenet", options["model"] in BASIC
        x = self.conv_norm(
            x.astype(self.kind), options["width"], 7 if large else 3, 1 if options["stem"] == "3x3" else 2
        )
        x = jax.nn.relu(x)
        if large:
            low = jnp.array(-jnp.inf, self.kind)
            x = jax.lax.reduce_window(x, low, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
        for stage, count in enumerate(DEPTHS[options["model"]]):
            for index in range(count):
                x = self.block(x, options["width"] * 2**stage, 2 if stage and not index else 1, basic)
        logits = x.astype(jnp.float32).mean((1, 2)) @ self.weight((x.shape[-1], options["num_classes"]))
        return logits + self.weight((options["num_classes"],), 0.0)

    def block(self, x: jax.Array, width: int, stride: int, basic: bool) -> jax.Array:
        """3x3 and 3x3, or 1x1, 3x3, 1x1; projection where the shape changes."""
        outputs = width if basic else 4 * width
        y = x if basic else jax.nn.relu(self.conv_norm(x, width, 1))
        y = jax.nn.relu(self.conv_norm(y, width, 3, stride))
        y = self.conv_norm(y, outputs, 3 if basic else 1)
        same = stride == 1 and x.shape[-1] == outputs
        return jax.nn.relu(y + (x if same else self.conv_norm(x, outputs, 1, stride)))


def main() -> None:
    """Builds the network and serves steps, on a GPU where JAX sees one."""
    options = settings()
    network = Network(options)
    size = options["image_size"]
    images = jax.random.normal(jax.random.key(0), (options["batch"], size, size, 3))
    labels = jax.random.randint(jax.random.key(1), (options["batch"],), 0, options["num_classes"])
    network(None, images[:1])
    scale = _LOSS_SCALE if options["precision"] == "mixed_float16" else 1.0

    def scaled_loss(weights: list[jax.Array], images: jax.Array, labels: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(network(weights, images))
        return -scale * jnp.take_along_axis(scores, labels[:, None], 1).mean()

    def step(state: tuple[list[jax.Array], list[jax.Array]], *batch: jax.Array) -> tuple[Any, jax.Array]:
        weights, momenta = state
        loss, gradients = jax.value_and_grad(scaled_loss)(weights, *batch)
        momenta = [0.9 * m + g / scale for m, g in zip(momenta, gradients, strict=True)]
        return ([w - 1e-3 * m for w, m in zip(weights, momenta, strict=True)], momenta), loss / scale

    compiled = jax.jit(step, donate_argnums=0)
    state = (network.weights, [jnp.zeros_like(weight) for weight in network.weights])

    def run(steps: int) -> float:
        nonlocal state
        for _ in range(steps):
            state, loss = compiled(state, images, labels)
        return float(loss)

    serve(run, name="jax", version=f"jax {jax.__version__}")


main()
