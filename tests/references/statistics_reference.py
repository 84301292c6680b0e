"""Student's distribution from its density alone, for checking intervals. Imports nothing of the package."""

import math


def probability_within(t, freedom, steps=200_000):
    """Probability that Student's variable lies in [-t, t]: Simpson's rule over the density (Student 1908)."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def density(x):
        return scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2)

    width = t / steps
    inner = math.fsum((4 if i % 2 else 2) * density(i * width) for i in range(1, steps))
    return 2 * width / 3 * (density(0.0) + inner + density(t))


# Two-sided 95 % points as printed in tables of the distribution.
PRINTED_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}
