"""Draws docs/gpu-speed.svg: training speed on one GPU next to other programs.

The figures are those of docs/gpu-speed.csv. `docs/dev/reference.py` writes and checks the drawing.
"""

import csv
import itertools
import pathlib

DATA = pathlib.Path(__file__).parents[1] / "gpu-speed.csv"
# Sizes in the units of the drawing.
WIDTH = 840
ROW_HEIGHT = 30
BAR_HEIGHT = 18
HEADING_HEIGHT = 34
LABEL_WIDTH = 190
BAR_WIDTH = 300
STYLE = """
text { font: 13px sans-serif; fill: #1f2933 }
.heading { font-weight: bold }
.conditions { fill: #52606d }
.page { fill: #ffffff }
.other { fill: #94a3b8 }
.ours { fill: #3b82f6 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .conditions { fill: #b3bfcc }
  .page { fill: #1b2028 }
  .other { fill: #64748b }
  .ours { fill: #60a5fa }
}
"""


def draw():
    """Returns the figure as SVG."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    fastest = max(int(row["images_per_second"]) for row in rows)
    lines = []
    top = 8
    for gpu, group in itertools.groupby(rows, key=lambda row: row["gpu"]):
        lines.append(f'<text class="heading" x="12" y="{top + 20}">One {gpu}, images/s</text>')
        top += HEADING_HEIGHT
        for row in group:
            lines += bar(row, top, fastest)
            top += ROW_HEIGHT
        top += 8
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" role="img">',
            "<title>ResNet-50 training, 224 pixels, batch 256, FP16: images per second</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="page" width="{WIDTH}" height="{top}" rx="10"/>',
            *lines,
            "</svg>",
            "",
        ]
    )


def bar(row, top, fastest):
    """Returns the elements of a bar with its labels.

    Args:
      row: A row of the table.
      top: Vertical position.
      fastest: Images per second of the longest bar.
    """
    speed = int(row["images_per_second"])
    length = BAR_WIDTH * speed / fastest
    kind = "ours" if row["program"].startswith("hybrid_imagenet") else "other"
    baseline = top + BAR_HEIGHT - 4
    end = LABEL_WIDTH + length + 8
    return [
        f'<text x="{LABEL_WIDTH - 8}" y="{baseline}" text-anchor="end">{row["program"]}</text>',
        f'<rect class="{kind}" x="{LABEL_WIDTH}" y="{top}" width="{length:.1f}"'
        f' height="{BAR_HEIGHT}" rx="3"/>',
        f'<text x="{end:.1f}" y="{baseline}">{speed:,}'
        f' <tspan class="conditions">{row["conditions"]}</tspan></text>',
    ]
