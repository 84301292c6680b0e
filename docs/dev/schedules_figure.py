"""Draws docs/reference/schedules.svg: the learning rate of each schedule for `model.fit`.

`docs/dev/reference.py` writes and checks the figure together with its pages. It is SVG written by
hand, so that the same schedules give the same bytes, with any version of any package.
"""

from hybrid_imagenet import schedules

EPOCHS = 90
WARMUP_EPOCHS = 5
POINTS = 360
# Title and schedule of each panel, with a peak of 1.
PANELS = {
    "constant": schedules.constant(1, EPOCHS, warmup_epochs=WARMUP_EPOCHS),
    "cosine": schedules.cosine(1, EPOCHS, warmup_epochs=WARMUP_EPOCHS),
    "polynomial (power 2)": schedules.polynomial(1, EPOCHS, warmup_epochs=WARMUP_EPOCHS),
    "step": schedules.step(1, EPOCHS, warmup_epochs=WARMUP_EPOCHS),
    "exponential (decay 0.9)": schedules.exponential(1, EPOCHS, warmup_epochs=WARMUP_EPOCHS),
    "hybrid": schedules.hybrid(1, EPOCHS),
}
COLUMNS = 3
# Sizes in the units of the drawing.
PANEL_WIDTH = 250
PANEL_HEIGHT = 190
PLOT_WIDTH = 200
PLOT_HEIGHT = 120
LEFT = 36
TOP = 26
# Part of the vertical axis that is above the peak.
HEADROOM = 0.1
STYLE = """
text { font: 12px sans-serif; fill: #333 }
.title { font-weight: bold }
.axis { stroke: #999; fill: none }
.rate { stroke: #0471fa; stroke-width: 2; fill: none }
.bound { stroke: #d8640f; stroke-width: 1.5; stroke-dasharray: 4 3; fill: none }
"""


def draw():
    """Returns the figure as SVG."""
    rows = -(-len(PANELS) // COLUMNS)
    width = COLUMNS * PANEL_WIDTH
    height = rows * PANEL_HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>Learning rate by epoch of {len(PANELS)} schedules</title>",
        f"<style>{STYLE}</style>",
        # Pages of a dark theme have no white background.
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (title, schedule) in enumerate(PANELS.items()):
        left = index % COLUMNS * PANEL_WIDTH + LEFT
        top = index // COLUMNS * PANEL_HEIGHT + TOP
        lines.append(f'<g transform="translate({left},{top})">')
        lines += panel(title, schedule)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>", ""])


def panel(title, schedule):
    """Returns the elements of a panel, whose plot begins at (0, 0).

    Args:
      title: Name of the schedule.
      schedule: Has a peak of 1.
    """
    epochs = [EPOCHS * index / POINTS for index in range(POINTS)]
    # The length of a step does not matter for a figure, only its start.
    values = [schedule(epoch, epoch, 1) for epoch in epochs]
    bounded = [epoch for epoch in epochs if epoch < schedule.bounded_epochs]
    rates = [value["learning_rate"] for value in values]
    lines = [
        f'<text class="title" x="0" y="-10">{title}</text>',
        f'<path class="axis" d="M0,0 V{PLOT_HEIGHT} H{PLOT_WIDTH}"/>',
        f'<text x="-6" y="{y(1) + 4:.1f}" text-anchor="end">peak</text>',
        f'<text x="-6" y="{y(0) + 4:.1f}" text-anchor="end">0</text>',
        f'<text x="{PLOT_WIDTH / 2:g}" y="{PLOT_HEIGHT + 30}" text-anchor="middle">epoch</text>',
    ]
    for epoch in (0, 30, 60, 90):
        label_y = PLOT_HEIGHT + 16
        lines.append(f'<text x="{x(epoch):.1f}" y="{label_y}" text-anchor="middle">{epoch}</text>')
    start = len(bounded)
    lines.append(polyline("rate", epochs[start:], rates[start:]))
    if bounded:
        lower = [value["lower_bound"] for value in values[: start + 1]]
        lines.append(polyline("bound", epochs[: start + 1], lower))
        end = x(schedule.bounded_epochs)
        lines.append(f'<path class="bound" d="M{end:.1f},{y(1):.1f} V{y(1 + HEADROOM):.1f}"/>')
        lines.append(f'<text x="{end + 8:.1f}" y="{y(1) + 2:.1f}">bounds of AdaBound</text>')
    return lines


def polyline(css_class, epochs, values):
    """Returns a line through points."""
    points = " ".join(f"{x(e):.1f},{y(v):.1f}" for e, v in zip(epochs, values, strict=True))
    return f'<polyline class="{css_class}" points="{points}"/>'


def x(epoch):
    """Returns the horizontal coordinate of an epoch."""
    return PLOT_WIDTH * epoch / EPOCHS


def y(rate):
    """Returns the vertical coordinate of a learning rate."""
    return PLOT_HEIGHT * (1 - rate / (1 + HEADROOM))
