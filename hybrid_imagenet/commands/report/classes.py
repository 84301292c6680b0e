"""Shows which classes the last validation confused, and its worst errors.

The worst errors are the wrong predictions with the highest probability.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hybrid_imagenet.commands.report.tables import DASH, table
from hybrid_imagenet.errors import pluralize, printable

# A larger confusion matrix does not fit on a page.
_MAX_MATRIX_CLASSES = 30
_MAX_CONFUSED_PAIRS = 20
# Lines of each type in the summary as text.
_MAX_LINES = 3

ImageResults = Mapping[str, Any]
"""The arrays of image_results.npz (see `LoadedRun.image_results`)."""


def confusion_matrix(results: ImageResults) -> np.ndarray:
    """Counts the images of each true class and predicted class.

    Returns:
      int64 [classes, classes]: true classes are rows, predicted classes are columns.
    """
    classes = len(results["class_names"])
    cells = results["label"].astype(np.int64) * classes + results["predicted"]
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def confused_pairs(results: ImageResults) -> list[tuple[str, str, int]]:
    """Returns the most frequent confusions: true class, predicted class, images."""
    names = results["class_names"]
    counts = confusion_matrix(results)
    np.fill_diagonal(counts, 0)
    largest_cells = np.argsort(-counts, axis=None, kind="stable")[:_MAX_CONFUSED_PAIRS]
    pairs = []
    for cell in largest_cells:
        true_class, predicted_class = divmod(int(cell), len(counts))
        count = int(counts[true_class, predicted_class])
        if count:
            pairs.append((str(names[true_class]), str(names[predicted_class]), count))
    return pairs


def text_lines(results: ImageResults) -> Iterator[str]:
    """Yields the most frequent confusions and the worst errors as lines of text."""
    pairs = confused_pairs(results)
    if not pairs:
        return
    yield "Classes most often confused:"
    for true_class, predicted_class, count in pairs[:_MAX_LINES]:
        yield printable(
            f"- {pluralize(count, 'image')} of {true_class} predicted as {predicted_class}"
        )
    yield "Wrong with the highest probability:"
    for file, true_class, predicted_class, probability in _worst_rows(results)[:_MAX_LINES]:
        yield printable(f"- {file}: {true_class} predicted as {predicted_class} ({probability})")


def section(results: ImageResults) -> str:
    """Returns the confused classes and the worst errors as HTML.

    Few classes are shown as a confusion matrix, many as a table of the most frequent confusions.
    """
    images = pluralize(len(results["label"]), "image")
    right = int((results["label"] == results["predicted"]).sum())
    content = f'<p class="note">Last validation: {right} of {images} right.</p>'
    pairs = confused_pairs(results)
    if len(results["class_names"]) <= _MAX_MATRIX_CLASSES:
        content += _matrix_table(results)
    elif pairs:
        rows = [
            (true_class, predicted_class, str(count))
            for true_class, predicted_class, count in pairs
        ]
        content += table(("true class", "predicted class", "images"), rows)
    worst_rows = _worst_rows(results)
    if worst_rows:
        content += "<h4>Wrong with the highest probability</h4>"
        content += table(("image", "true class", "predicted class", "probability"), worst_rows)
    return content


def _matrix_table(results: ImageResults) -> str:
    """Returns the confusion matrix as a table.

    The larger its fraction of the row, the darker is a cell.
    """
    names = [html.escape(str(name)) for name in results["class_names"]]
    rows = []
    for true_class, counts in enumerate(confusion_matrix(results)):
        total = int(counts.sum())
        cells = []
        for predicted_class, count in enumerate(counts.tolist()):
            css_class = " class=hit" if predicted_class == true_class else ""
            part = count / max(total, 1)
            cells.append(f'<td style="--part:{part:.3f}"{css_class}>{count or ""}</td>')
        # A class without validation images is neither right nor wrong.
        right = f"{100 * counts[true_class] / total:.1f} %" if total else DASH
        rows.append(
            f'<tr><th scope="row">{names[true_class]}</th>'
            f'<td class="whole">{right}</td>{"".join(cells)}</tr>'
        )
    header = "".join(f'<th scope="col"><span>{name}</span></th>' for name in ["right", *names])
    return (
        '<div class="scroll"><table class="matrix">'
        f"<thead><tr><th>true \\ predicted</th>{header}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _worst_rows(results: ImageResults) -> list[tuple[str, str, str, str]]:
    """Returns the worst errors: file, true class, predicted class, probability."""
    names = results["class_names"]
    rows = []
    for index, file in zip(results["worst"].tolist(), results["worst_files"], strict=True):
        true_class = str(names[results["label"][index]])
        predicted_class = str(names[results["predicted"][index]])
        probability = f"{100 * results['probability'][index]:.1f} %"
        rows.append((str(file), true_class, predicted_class, probability))
    return rows
