"""Oracles for the optimizers in float64, written step by step from the papers' formulas.

A layer is a dictionary: "w" (array), "kernel" (whether weight decay and LARS apply) and the state.
"excluded" marks a kernel without weight decay, which LARS scales all the same.
Functions and classes change the layers in place.
"""

import numpy as np


def layers_of(weights, kernels):
    return [
        {
            "w": np.array(w, np.float64),
            "kernel": k,
            "m": np.zeros(np.shape(w)),
            "v": np.zeros(np.shape(w)),
        }
        for w, k in zip(weights, kernels, strict=True)
    ]


def luo_bounds(t, final_lr, gamma):
    """Returns eta_l(t), eta_u(t).

    Reference: Luo et al., algorithm 2 and section 4.
    """
    return final_lr * (1 - 1 / (gamma * t + 1)), final_lr * (1 + 1 / (gamma * t))


def lu_bounds(t, warmup, peak, beta2=0.999):
    """Returns Bl = t/T lr N and Bu = lr N + 1/((1 - b2) t) - 1/((1 - b2) T).

    Reference: Lu, Lu, Liang, 2.2.1.
    """
    return t / warmup * peak, peak + 1 / ((1 - beta2) * t) - 1 / ((1 - beta2) * warmup)


def bounded_adam_step(
    layer,
    grad,
    t,
    alpha,
    lower,
    upper,
    *,
    beta1=0.9,
    beta2=0.999,
    eps=1e-8,
    corrected=True,
    decay=0.0,
):
    """Updates m and v, then w -= clip(s / (sqrt(v) + eps), lower, upper) m."""
    g = grad + decay * layer["w"]
    layer["m"] = beta1 * layer["m"] + (1 - beta1) * g
    layer["v"] = beta2 * layer["v"] + (1 - beta2) * g * g
    s = alpha * np.sqrt(1 - beta2**t) / (1 - beta1**t) if corrected else alpha
    layer["w"] = (
        layer["w"] - np.clip(s / (np.sqrt(layer["v"]) + eps), lower, max(upper, lower)) * layer["m"]
    )


def lars_ratio(w, grad, trust_coefficient, decay, eps=0.0, eps_rule="add"):
    """Returns the trust ratio of You, Gitman, Ginsburg, equation 6; 1 if a norm is zero."""
    wn = np.sqrt((w * w).sum())
    gn = np.sqrt((grad * grad).sum())
    if wn == 0 or gn == 0:
        return 1.0
    denominator = gn + decay * wn
    if eps_rule == "add":
        return trust_coefficient * wn / (denominator + eps)
    return trust_coefficient * wn / (eps if denominator < eps else denominator)


def layer_rate(
    layer,
    grad,
    lr,
    *,
    variant="you",
    trust_coefficient=0.001,
    decay=1e-4,
    eps=0.0,
    eps_rule="add",
    share=1.0,
):
    """Returns the learning rate of a layer.

    `share` is between no LARS (0) and full LARS (1). The result is the geometric mean of both rates
    with this weight.
    """
    if variant == "none" or not layer["kernel"]:
        return lr
    ratio = lars_ratio(layer["w"], grad, trust_coefficient, decay, eps, eps_rule)
    if variant == "larc":
        ratio = min(ratio / lr, 1.0)
    return lr ** (1 - share) * (lr * ratio) ** share


def lars_step(layer, grad, lr, momentum, *, decay=1e-4, nesterov=False, **ratio_arguments):
    """Updates v = m v + lr ratio (g + beta w), w -= v.

    With Nesterov: v = m v - lr g, w += m v - lr g. Reference: You et al., algorithm 1.
    """
    rate = layer_rate(layer, grad, lr, decay=decay, **ratio_arguments)
    g = grad + (decay if layer["kernel"] else 0.0) * layer["w"]
    if nesterov:
        layer["m"] = momentum * layer["m"] - rate * g
        layer["w"] = layer["w"] + momentum * layer["m"] - rate * g
    else:
        layer["m"] = momentum * layer["m"] + rate * g
        layer["w"] = layer["w"] - layer["m"]


def sgd_step(layer, grad, lr, momentum, *, decay=0.0, nesterov=False):
    """Updates u = m u + g, w -= lr u; Nesterov as in `lars_step`.

    Reference: Goyal et al., equation 9.
    """
    g = grad + (decay if layer["kernel"] else 0.0) * layer["w"]
    if nesterov:
        layer["m"] = momentum * layer["m"] - lr * g
        layer["w"] = layer["w"] + momentum * layer["m"] - lr * g
    else:
        layer["m"] = momentum * layer["m"] + g
        layer["w"] = layer["w"] - lr * layer["m"]


def adamw_step(layer, grad, t, lr, *, beta1=0.9, beta2=0.999, eps=1e-7, decay=0.004):
    """Takes a step of AdamW, without decay of biases and normalization.

    Reference: Loshchilov and Hutter, algorithm 2, with the "epsilon hat" of Kingma and Ba.
    """
    layer["m"] = beta1 * layer["m"] + (1 - beta1) * grad
    layer["v"] = beta2 * layer["v"] + (1 - beta2) * grad * grad
    rate = lr * np.sqrt(1 - beta2**t) / (1 - beta1**t)
    decayed = (1 - lr * decay * layer["kernel"]) * layer["w"]
    layer["w"] = decayed - rate * layer["m"] / (np.sqrt(layer["v"]) + eps)


def lamb_step(layer, grad, t, lr, *, beta1=0.9, beta2=0.999, eps=1e-6, decay=0.01):
    """Takes a step of LAMB with phi(z) = z.

    Biases and normalization have no decay and no scaling, as in the authors' code. Reference: You
    et al. 2020, algorithm 2.
    """
    layer["m"] = beta1 * layer["m"] + (1 - beta1) * grad
    layer["v"] = beta2 * layer["v"] + (1 - beta2) * grad * grad
    m = layer["m"] / (1 - beta1**t)
    v = layer["v"] / (1 - beta2**t)
    update = m / (np.sqrt(v) + eps)
    ratio = 1.0
    if layer["kernel"]:
        update = update + decay * layer["w"]
        wn = np.sqrt((layer["w"] ** 2).sum())
        un = np.sqrt((update**2).sum())
        ratio = wn / un if wn > 0 and un > 0 else 1.0
    layer["w"] = layer["w"] - lr * ratio * update


def newton_schulz(matrix, steps=5):
    """Brings all singular values to about 1 with five steps of an odd quintic.

    It computes the singular values explicitly. Reference: Jordan et al. 2024.
    """
    u, s, v = np.linalg.svd(matrix / (np.sqrt((matrix**2).sum()) + 1e-7), full_matrices=False)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


def muon_step(layer, grad, lr, momentum, *, decay=0.01, nesterov=True, steps=5):
    """Updates with u = momentum u + g, orthogonalized as [outputs, inputs]; decoupled decay.

    Other parameters use momentum without orthogonalization.
    """
    layer["m"] = momentum * layer["m"] + grad
    update = grad + momentum * layer["m"] if nesterov else layer["m"]
    if not layer["kernel"]:
        layer["w"] = layer["w"] - lr * update
        return
    matrix = np.moveaxis(update, -1, 0).reshape(update.shape[-1], -1)
    rows, columns = matrix.shape
    matrix = newton_schulz(matrix, steps) * max(1, rows / columns) ** 0.5
    update = np.moveaxis(matrix.reshape(rows, *update.shape[:-1]), 0, -1)
    layer["w"] = (1 - lr * decay) * layer["w"] - lr * update


class HybridReference:
    """Bounded AdaBound for `warmup_steps` steps, then SGD with LARS.

    Reference: Lu, Lu, Liang, 2.2.1.
    """

    def __init__(
        self, layers, *, warmup_steps, epoch_steps, peak, alpha=1e-3, momentum=0.9, **options
    ):
        self.layers = layers
        self.warmup_steps = warmup_steps
        self.epoch_steps = epoch_steps
        self.peak = peak
        self.alpha = alpha
        self.momentum = momentum
        self.options = {
            "handover": "continuous",
            "lars": "you",
            "corrected": True,
            "decay": 1e-4,
        } | options
        self.t = 0

    def step(self, grads, lr):
        self.t += 1
        o = self.options
        if self.t <= self.warmup_steps:
            lower, upper = lu_bounds(
                self.t / self.epoch_steps, self.warmup_steps / self.epoch_steps, self.peak
            )
            for layer, grad in zip(self.layers, grads, strict=True):
                decay = (
                    o["decay"]
                    if o.get("decay_in_warmup") and (layer["kernel"] or o.get("decay_all"))
                    else 0.0
                )
                bounded_adam_step(
                    layer,
                    grad,
                    self.t,
                    self.alpha,
                    lower,
                    upper,
                    corrected=o["corrected"],
                    decay=decay,
                )
            return
        for layer, grad in zip(self.layers, grads, strict=True):
            if self.t == self.warmup_steps + 1:
                start = {"continuous": self.peak, "reset": 0.0, "rescale": self.peak / (1 - 0.9)}[
                    o["handover"]
                ]
                layer["m"] = start * layer["m"]
            share = 1 - self.momentum if o["handover"] == "continuous" else 1.0
            ramp = o.get("ramp_steps", 0)
            lars = min(1.0, (self.t - 1 - self.warmup_steps) / ramp) if ramp else 1.0
            decays = layer["kernel"] or o.get("decay_all")
            decay = o["decay"] if decays and not layer.get("excluded") else 0.0
            rate = layer_rate(layer, grad, lr, variant=o["lars"], decay=decay, share=lars)
            g = grad + decay * layer["w"]
            layer["m"] = self.momentum * layer["m"] + share * rate * g
            layer["w"] = layer["w"] - layer["m"]
