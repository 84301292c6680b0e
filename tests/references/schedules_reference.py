"""Oracles for the schedules: the papers' formulas, in exact rational arithmetic if possible.

`epoch` is a Fraction: the images processed over the size of the dataset at the start of a step.
"""

import math
from fractions import Fraction


def goyal(epoch, peak, start=Fraction(1, 10)):
    """Rises from 0.1 to the peak in 5 epochs, then divides by 10 at epochs 30, 60 and 80.

    Reference: Goyal et al., 2.2 and 5.1.
    """
    if epoch < 5:
        return start + (peak - start) * epoch / 5
    if epoch < 30:
        return peak
    if epoch < 60:
        return peak / 10
    if epoch < 80:
        return peak / 100
    return peak / 1000


def lu(epoch, peak, warmup, reading):
    """Returns peak * 0.9^..., by the number of the epoch counted from 1.

    Reference: Lu, Lu, Liang, 2.2.1.
    """
    number = math.floor(epoch) + 1
    power = {"epoch-T-1": number - warmup - 1, "epoch-T": number - warmup, "epoch": number}[reading]
    value = Fraction(peak)
    for _ in range(power):
        value = value * 9 / 10
    return value


def mlperf(epoch, peak, warmup, total):
    """Rises linearly from 0, then falls to 0 with a polynomial of power 2.

    Reference: MLPerf's reference implementation.
    """
    if epoch < warmup:
        return peak * epoch / warmup
    left = (total - epoch) / Fraction(total - warmup)
    return peak * left * left


def cosine(epoch, peak, warmup, total):
    """Falls with a cosine after a linear warmup from 0.

    Reference: Loshchilov and Hutter, equation 5.
    """
    if epoch < warmup:
        return peak * epoch / warmup
    return (
        float(peak)
        / 2
        * (1 + math.cos(float((epoch - warmup) / Fraction(total - warmup)) * math.pi))
    )


def mikami_a(epoch, warmup=34, total=90):
    """Returns configuration A of Mikami et al., 3.2."""
    start = Fraction(1, 10**5)
    base = 34
    if epoch < warmup:
        return start + (base - start) * epoch / warmup
    return base * ((total - epoch) / Fraction(total - warmup)) ** 2


def mikami_b(epoch):
    """Returns configuration B of Mikami et al., 3.2, as printed."""
    if epoch < 5:
        return Fraction(2, 10) + (29 - Fraction(2, 10)) * epoch / 5
    if epoch < 30:
        return 29 * (1 - epoch / 90) ** 2
    return 50 * (1 - epoch / 90) ** 2
