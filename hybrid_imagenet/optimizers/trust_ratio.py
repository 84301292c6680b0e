"""Computes the trust ratio of LARS: the factor on a layer's learning rate.

It follows from the norms of the layer's weights and gradient.
"""

from __future__ import annotations

from typing import Any

import numpy as np

VARIANTS = ("you", "larc", "none")
EPS_RULES = ("add", "floor")


def trust_ratio(
    weight_norm: Any,
    gradient_norm: Any,
    *,
    eta: float = 0.001,
    decay: Any = 0.0,
    eps: float = 0.0,
    eps_rule: str = "add",
    xp: Any = np,
) -> Any:
    """Returns eta |w| / (|g| + decay |w|), and 1 where either norm is 0.

    Reference: You et al., arXiv 1708.03888, equation 6.

    Args:
      weight_norm: L2 norms of the weights, one per layer.
      gradient_norm: L2 norms of the gradients without weight decay, same shape.
      eta: trust coefficient.
      decay: coefficient of weight decay, which is part of the denominator; a number, or one per
        layer.
      eps: guards the denominator: `add` adds it (MLPerf's reference), `floor` replaces a
        denominator under eps by eps (the library of Mikami et al.).
      eps_rule: add or floor.
      xp: where `where` and `maximum` come from: numpy or tensorflow.
    """
    decayed_norm = gradient_norm + decay * weight_norm
    denominator = xp.maximum(decayed_norm, eps) if eps_rule == "floor" else decayed_norm + eps
    has_norms = (weight_norm > 0) & (gradient_norm > 0)
    # The inner `where` avoids a division by 0, whose result would not be used.
    return xp.where(has_norms, eta * weight_norm / xp.where(has_norms, denominator, 1.0), 1.0)


def clip_ratio(ratio: Any, learning_rate: Any, xp: Any = np) -> Any:
    """Returns min(ratio / learning_rate, 1): with LARC's clip no layer exceeds the global rate.

    A learning rate of 0 leaves the ratio at 1, which then has no effect.
    """
    return xp.where(
        ratio < learning_rate, ratio / xp.where(learning_rate > 0, learning_rate, 1.0), 1.0
    )


def blend_ratio(ratio: Any, blend: Any, xp: Any = np) -> Any:
    """Returns ratio^blend: from no scaling of a layer's rate (0) to that of LARS (1).

    The steps between are even in the logarithm.

    Args:
      ratio: of each layer, positive.
      blend: from 0 to 1; at 1 the ratio is returned as it is.
      xp: numpy or tensorflow.
    """
    return xp.where(blend < 1.0, ratio**blend, ratio)
