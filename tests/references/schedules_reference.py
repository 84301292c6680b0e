"""Oracles for the schedules: the papers' formulas in exact rational arithmetic where they allow it.

`epoch` is a Fraction, images processed over the size of the data set at the start of a step.
"""

import math
from fractions import Fraction


def goyal(epoch, peak, start=Fraction(1, 10)):
    """Goyal et al., 2.2 and 5.1: 5 epochs from 0.1 to the peak, then divided by 10 at epochs 30, 60
    and 80.
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
    """Lu, Lu, Liang, 2.2.1: peak * 0.9^..., by the number of the epoch counted from 1."""
    number = math.floor(epoch) + 1
    power = {"epoch-T-1": number - warmup - 1, "epoch-T": number - warmup, "epoch": number}[reading]
    value = Fraction(peak)
    for _ in range(power):
        value = value * 9 / 10
    return value


def mlperf(epoch, peak, warmup, total):
    """MLPerf's reference: linear from 0, then polynomial of power 2 to 0 over what is left."""
    if epoch < warmup:
        return peak * epoch / warmup
    left = (total - epoch) / Fraction(total - warmup)
    return peak * left * left


def cosine(epoch, peak, warmup, total):
    """Loshchilov and Hutter, equation 5, after a linear warmup from 0."""
    if epoch < warmup:
        return peak * epoch / warmup
    return (
        float(peak)
        / 2
        * (1 + math.cos(float((epoch - warmup) / Fraction(total - warmup)) * math.pi))
    )


def mikami_a(epoch, warmup=34, total=90):
    """Mikami et al., 3.2, configuration A."""
    start, base = Fraction(1, 10**5), 34
    if epoch < warmup:
        return start + (base - start) * epoch / warmup
    return base * ((total - epoch) / Fraction(total - warmup)) ** 2


def mikami_b(epoch):
    """Mikami et al., 3.2, configuration B, as printed."""
    if epoch < 5:
        return Fraction(2, 10) + (29 - Fraction(2, 10)) * epoch / 5
    if epoch < 30:
        return 29 * (1 - epoch / 90) ** 2
    return 50 * (1 - epoch / 90) ** 2
