"""Contrast of the colors of a report, and their differences for readers who lack a kind of cone."""

import itertools

import numpy as np
import pytest

from hybrid_imagenet.tools.report import page, svg

THEMES = {"light": svg.LIGHT, "dark": svg.DARK}
# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency", 2009:
# matrices on linear RGB for a missing kind of cone.
SEEN = {
    "all three cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)
WHITE = XYZ.sum(axis=1)


def linear(color):
    """Linear RGB of #rrggbb (sRGB)."""
    parts = np.array([int(color[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb):
    """CIE 1976 L*a*b* of linear RGB."""
    t = XYZ @ rgb / WHITE
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(color, other):
    """WCAG 2's contrast ratio."""
    low, high = sorted(XYZ[1] @ linear(c) + 0.05 for c in (color, other))
    return high / low


def test_the_measures_on_known_values():
    assert contrast("#000000", "#ffffff") == pytest.approx(21, abs=0.01)
    assert lab(linear("#ff0000")) == pytest.approx([53.24, 80.09, 67.20], abs=0.1)
    red, green = (np.clip(SEEN["deuteranopia"] @ linear(c), 0, 1) for c in ("#d62728", "#2ca02c"))
    both = np.linalg.norm(lab(linear("#d62728")) - lab(linear("#2ca02c")))
    assert np.linalg.norm(lab(red) - lab(green)) < 0.4 * both  # the pair that is known to fail


@pytest.mark.parametrize("theme", THEMES)
def test_colors_stand_out_from_the_card(theme):
    for color in THEMES[theme]:
        assert contrast(color, svg.CARDS[theme]) >= 3, color  # WCAG 2.1, 1.4.11: graphical objects


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("reader", SEEN)
def test_any_two_colors_differ_for_every_reader(theme, reader):
    seen = {color: lab(np.clip(SEEN[reader] @ linear(color), 0, 1)) for color in THEMES[theme]}
    for one, other in itertools.combinations(seen, 2):
        assert np.linalg.norm(seen[one] - seen[other]) >= 20, (one, other)


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_readable(theme):
    text = page._TEMPLATE.read_text()
    block = text[text.index(f"color-scheme:{theme};") :].split("}")[0]
    values = dict(part.strip().split(":") for part in block.split(";") if part.strip().startswith("--"))
    full = {
        name: value if len(value) == 7 else "#" + "".join(2 * c for c in value[1:]) for name, value in values.items()
    }
    assert full["--card"] == svg.CARDS[theme]
    for ink in ("--ink", "--soft", "--good", "--bad"):
        for ground in ("--card", "--bg"):
            assert contrast(full[ink], full[ground]) >= 4.5, (ink, ground)
