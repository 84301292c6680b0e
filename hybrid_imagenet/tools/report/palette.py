"""The colors of a report, light and dark; tests hold them to their contrast and to what color-blind readers see."""

from __future__ import annotations

LIGHT = ("#0471fa", "#d8640f", "#004a38", "#9557ab", "#68390b", "#361f65", "#767c86")
DARK = ("#717bfc", "#d17d26", "#44c487", "#ce8be1", "#efdc4f", "#e8eeff", "#8a919c")
"""Of lines and bars, by number: each differs from every other, also for readers who lack a kind of cone, and from the
card behind it. The last, a grey, is for what has no name of its own."""
CARDS = {"light": "#ffffff", "dark": "#1e2126"}
COLORS = len(LIGHT)


def style() -> str:
    """The colors as rules of CSS: variables --c0 to --c6 by theme, lines .c0, keys and areas .f0."""
    light, dark = (";".join(f"--c{n}:{value}" for n, value in enumerate(colors)) for colors in (LIGHT, DARK))
    rules = [
        f":root{{{light}}}",
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}",
        f":root[data-theme=dark]{{{dark}}}",
    ]
    for n in range(COLORS):
        rules.append(f".c{n}{{stroke:var(--c{n})}}.key .c{n}{{border-color:var(--c{n})}}.f{n}{{fill:var(--c{n})}}")
    return "".join(rules)
