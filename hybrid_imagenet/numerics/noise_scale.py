"""Estimates the gradient noise scale, up to which a larger batch pays (McCandlish et al., arXiv 1812.06162)."""

from __future__ import annotations

import dataclasses


def estimate(small_square: float, big_square: float, small_batch: int, big_batch: int) -> tuple[float, float]:
    """Unbiased estimates of |G|^2 and tr(Sigma) from gradients of two batch sizes (appendix A.1).

        |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b),   tr(Sigma) = (|g_b|^2 - |g_B|^2) / (1/b - 1/B).

    Single estimates are noisy and may be negative: average both before dividing (`NoiseScale`).

    Args:
      small_square: square norm of a rank's gradient, averaged over ranks, unscaled.
      big_square: square norm of the gradient averaged over ranks, unscaled.
      small_batch: images per rank and update, b.
      big_batch: images of all ranks per update, B.

    Raises:
      ValueError: if B does not exceed b; a single rank shows no noise.
    """
    if big_batch <= small_batch:
        raise ValueError(f"batches {small_batch} and {big_batch}: the noise scale needs two different sizes")
    signal = (big_batch * big_square - small_batch * small_square) / (big_batch - small_batch)
    noise = (small_square - big_square) / (1.0 / small_batch - 1.0 / big_batch)
    return signal, noise


@dataclasses.dataclass
class NoiseScale:
    """Running averages of both estimates, corrected for their start at 0.

    Attributes:
      decay: of the exponential averages, per update.
    """

    decay: float = 0.99
    signal: float = 0.0
    noise: float = 0.0
    weight: float = 0.0

    def add(self, small_square: float, big_square: float, small_batch: int, big_batch: int) -> None:
        """Takes the square norms of one update, see `estimate`."""
        signal, noise = estimate(small_square, big_square, small_batch, big_batch)
        self.signal = self.decay * self.signal + (1.0 - self.decay) * signal
        self.noise = self.decay * self.noise + (1.0 - self.decay) * noise
        self.weight = self.decay * self.weight + (1.0 - self.decay)

    @property
    def value(self) -> float | None:
        """tr(Sigma) / |G|^2 in images; None as long as the averages do not tell (no data, or |G|^2 <= 0)."""
        if self.weight == 0.0 or self.signal <= 0.0:
            return None
        return max(0.0, self.noise / self.signal)


def advice(noise_scale: float | None, batch: int) -> str:
    """One line on whether a larger batch would pay: the steps to a loss go by 1 + noise scale / batch (2.3)."""
    if noise_scale is None:
        return f"gradient noise scale not known yet; batch {batch}"
    return f"gradient noise scale {noise_scale:.0f} images, batch {batch}: larger batches pay up to the noise scale"
