"""Counts what Muon's Newton-Schulz steps cost on a GPU in each update; docs/planning.md has the formula."""

from __future__ import annotations

from collections.abc import Iterable

from hybrid_imagenet.analysis.gpu_models import Gpu, arithmetic
from hybrid_imagenet.analysis.gpu_roofline import KERNEL_SECONDS, MATRIX_SHARE

_PRODUCTS = 3  # of matrices in a step: X X^T, its square, and their sum times X


def operations(inputs: int, outputs: int, steps: int) -> float:
    """Floating-point operations of the products for one matrix: steps (4 m^2 n + 2 m^3), m the shorter side.

    X X^T and the product with X have m^2 n multiply-adds each, the square of X X^T m^3.

    Args:
      inputs: rows of a kernel, height x width x channels of a convolution.
      outputs: its columns.
      steps: of Newton and Schulz.
    """
    m, n = sorted((inputs, outputs))
    return steps * (4.0 * m * m * n + 2.0 * m**3)


def seconds(matrices: Iterable[tuple[int, int]], steps: int, gpu: Gpu) -> float:
    """Seconds of an update's products on a GPU, one kernel after the other, in the arithmetic of float32 there.

    Large products reach `MATRIX_SHARE` of the GPU's rate, and none takes less than `KERNEL_SECONDS`; both are assumed.

    Args:
      matrices: inputs and outputs of each kernel.
      steps: of Newton and Schulz.
      gpu: that computes them.
    """
    rate = MATRIX_SHARE * gpu.flops[arithmetic(gpu, "float32")]
    floor = steps * _PRODUCTS * KERNEL_SECONDS
    return sum(max(operations(*matrix, steps) / rate, floor) for matrix in matrices)
