"""Scalar oracles for the sample order, on Python's integers.

They are SplitMix64 (Steele et al.) and a Feistel permutation with cycle walking (Black and
Rogaway).
"""

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def finalize(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def round_keys(seed, epoch, rounds=8):
    state = finalize((seed + GOLDEN) & MASK)
    state = finalize((state + (epoch + 1) * GOLDEN) & MASK)
    keys = []
    for _ in range(rounds):
        state = (state + GOLDEN) & MASK
        keys.append(finalize(state))
    return keys


def example_at(position, n, seed, epoch):
    width = 1
    while width * width < n:
        width += 1
    height = (n + width - 1) // width
    keys = round_keys(seed, epoch)
    value = position
    while True:
        high, low = divmod(value, width)
        for i in range(0, len(keys), 2):
            low = (low + finalize(high ^ keys[i]) % width) % width
            high = (high + finalize(low ^ keys[i + 1]) % height) % height
        value = high * width + low
        if value < n:
            return value
