"""Oracles for the parts of the short recipe, in float64.

They are written from the papers' definitions and MosaicML's files.
"""

import math

import numpy as np


def binary_cross_entropy(logits, labels, smoothing):
    """Returns -sum_k (q_k log p_k + (1 - q_k) log(1 - p_k)) with p = sigmoid(z).

    The targets are q_k = (1 - e) [k = y] + e / K.
    """
    z = np.asarray(logits, np.float64)
    p = 1 / (1 + np.exp(-z))
    q = np.full_like(z, smoothing / z.shape[1])
    q[np.arange(len(labels)), labels] += 1 - smoothing
    return -(q * np.log(p) + (1 - q) * np.log(1 - p)).sum(1)


BINOMIAL = np.outer([1, 2, 1], [1, 2, 1]) / 16


def blurred(x, stride):
    """Convolves each channel with the binomial kernel, outermost pixels repeated, then samples.

    Reference: Zhang 2019, 3.2.
    """
    padded = np.pad(np.asarray(x, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    height, width = x.shape[1:3]
    out = np.zeros(x.shape)
    for i in range(height):
        for j in range(width):
            out[:, i, j] = np.einsum("bhwc,hw->bc", padded[:, i : i + 3, j : j + 3], BINOMIAL)
    return out[:, ::stride, ::stride]


def decay_decoupled(layer, decay, rate, peak):
    """Subtracts eta_t lambda theta from the weights, with eta_t = rate / peak.

    Reference: Loshchilov and Hutter, algorithm 1.
    """
    if layer["kernel"]:
        layer["w"] = layer["w"] - rate / peak * decay * layer["w"]


# MLPerf Training 2.0, MosaicML, 8xA100_80GB-methods/config.yaml. Values that the file omits are the
# defaults of composer 0.7.0. scale_schedule_ratio 0.32 multiplies the 90 epochs and rounds them
# down to a whole number (Time.__mul__). It does not affect the warmup
# (CosineAnnealingWithWarmupScheduler).
MOSAICML = {
    "batch": 2048,
    "lr": 2.048,
    "momentum": 0.875,
    "weight_decay": 5e-4,
    "smoothing": 0.08,
    "warmup": 8,
    "epochs": int(90 * 0.32),
    "crop": 176,
    "validation": 224,
    "validation_resize": 232,
    "delay": 0.4,
    "finetune": 0.2,
    "initial_scale": 0.5,
    "increment": 4,
    "average_every": 20,
    "half_life": 100,
    "eval_interval": 3,
}


def mosaicml_rate(epoch):
    """Returns the learning rate at a fractional epoch, as in composer/optim/scheduler.py."""
    c = MOSAICML
    if epoch < c["warmup"]:
        return c["lr"] * epoch / c["warmup"]
    return (
        c["lr"]
        * 0.5
        * (1 + math.cos(math.pi * (epoch - c["warmup"]) / (c["epochs"] - c["warmup"])))
    )


def mosaicml_size(epoch):
    """Returns the image size after a whole number of epochs.

    Reference: composer/algorithms/progressive_resizing.
    """
    c = MOSAICML
    elapsed = (epoch / c["epochs"] - c["delay"]) / (1 - c["finetune"] - c["delay"])
    scale = c["initial_scale"] + (1 - c["initial_scale"]) * min(max(elapsed, 0.0), 1.0)
    return round(c["crop"] * scale / c["increment"]) * c["increment"]
