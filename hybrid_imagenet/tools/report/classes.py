"""Shows which classes a run's last validation confused, and the images that it got wrong with most
confidence.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hybrid_imagenet.errors import pluralize, printable
from hybrid_imagenet.tools.report.tables import table

_MATRIX = 30  # classes at most for a matrix
_PAIRS = 20

Results = Mapping[str, Any]


def matrix(results: Results) -> np.ndarray:
    """Counts the images of each true class (row) and predicted class (column), int64 [classes,
    classes].
    """
    classes = len(results["class_names"])
    flat = results["label"].astype(np.int64) * classes + results["predicted"]
    return np.bincount(flat, minlength=classes * classes).reshape(classes, classes)


def pairs(results: Results) -> list[tuple[str, str, int]]:
    """The true class, the predicted class and the number of images, most images first; right ones
    do not count.
    """
    counts, names = matrix(results), results["class_names"]
    np.fill_diagonal(counts, 0)
    most = np.argsort(-counts, axis=None, kind="stable")[:_PAIRS]
    chosen = [divmod(int(place), len(counts)) for place in most]
    return [(str(names[a]), str(names[b]), int(counts[a, b])) for a, b in chosen if counts[a, b]]


def lines(results: Results) -> Iterator[str]:
    """Yields what the page shows, in short."""
    if found := pairs(results)[:3]:
        yield "Classes most often confused:"
        yield from (
            printable(f"- {pluralize(n, 'image')} of {true} predicted as {other}")
            for true, other, n in found
        )
        yield "Wrong with the highest probability:"
        yield from (
            printable(f"- {name}: {true} predicted as {other} ({p})")
            for name, true, other, p in _worst(results)[:3]
        )


def section(results: Results) -> str:
    """The matrix, or beyond 30 classes the pairs most often confused, and the worst images."""
    right = int((results["label"] == results["predicted"]).sum())
    text = (
        f'<p class="note">Last validation: {right} of {pluralize(len(results["label"]), "image")}'
        " right.</p>"
    )
    if len(results["class_names"]) <= _MATRIX:
        text += _matrix(results)
    elif found := pairs(results):
        text += table(
            ("true class", "predicted class", "images"), [(a, b, str(n)) for a, b, n in found]
        )
    if worst := _worst(results):
        text += "<h4>Wrong with the highest probability</h4>"
        text += table(("image", "true class", "predicted class", "probability"), worst)
    return text


def _matrix(results: Results) -> str:
    """A row for each true class, a column for each predicted one; the darker, the larger the part
    of the row.
    """
    names = [html.escape(str(name)) for name in results["class_names"]]
    rows = []
    for number, (name, counts) in enumerate(zip(names, matrix(results), strict=True)):
        whole = max(int(counts.sum()), 1)
        cells = "".join(
            f'<td style="--part:{count / whole:.3f}"{" class=hit" if other == number else ""}>'
            f"{count or ''}</td>"
            for other, count in enumerate(counts.tolist())
        )
        right = f'<td class="whole">{100 * counts[number] / whole:.1f} %</td>'
        rows.append(f'<tr><th scope="row">{name}</th>{right}{cells}</tr>')
    heads = "".join(f'<th scope="col"><span>{name}</span></th>' for name in ["right", *names])
    body = (
        f"<thead><tr><th>true \\ predicted</th>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"
    )
    return f'<div class="scroll"><table class="matrix">{body}</table></div>'


def _worst(results: Results) -> list[tuple[str, str, str, str]]:
    names, places = results["class_names"], results["worst"].tolist()
    return [
        (
            str(file),
            str(names[results["label"][place]]),
            str(names[results["predicted"][place]]),
            f"{100 * results['probability'][place]:.1f} %",
        )
        for place, file in zip(places, results["worst_files"], strict=True)
    ]
