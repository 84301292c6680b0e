"""Tests the contrast of the colors of a report."""

import numpy as np
import pytest

from hybrid_imagenet.commands.report import page, svg

THEMES = {"light": svg.LIGHT, "dark": svg.DARK}
# Weights of linear red, green and blue in the relative luminance (sRGB).
LUMINANCE = np.array([0.2126729, 0.7151522, 0.0721750])


def linear(color):
    """Returns the linear RGB of #rrggbb (sRGB)."""
    values = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(color, other):
    """Returns the contrast ratio of WCAG 2."""
    low, high = sorted(LUMINANCE @ linear(c) + 0.05 for c in (color, other))
    return high / low


@pytest.mark.parametrize("theme", THEMES)
def test_colors_and_text_have_the_contrast_of_wcag(theme):
    text = page._TEMPLATE.read_text()
    block = text[text.index(f"color-scheme: {theme};") :].split("}")[0]
    values = {}
    for declaration in block.split(";"):
        if declaration.strip().startswith("--"):
            name, value = declaration.split(":")
            values[name.strip()] = value.strip()
    for color in THEMES[theme]:
        # WCAG 2.1, 1.4.11, demands this contrast of graphical objects.
        assert contrast(color, values["--card"]) >= 3, color
    for ink in ("--ink", "--soft", "--good", "--bad"):
        for ground in ("--card", "--bg"):
            assert contrast(values[ink], values[ground]) >= 4.5, (ink, ground)
