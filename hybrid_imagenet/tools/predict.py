"""`hybrid-imagenet predict RUN IMAGE...`: the most probable classes of images."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.checkpoints import store
from hybrid_imagenet.data import images
from hybrid_imagenet.errors import UserError, printable
from hybrid_imagenet.tools import command_line

if TYPE_CHECKING:
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork

_BATCH = 32


def _parser() -> command_line.Parser:
    parser = command_line.Parser("predict", "Prints the most probable classes of images.")
    command_line.add_network_arguments(parser)
    parser.add_argument(
        "images", nargs="+", type=pathlib.Path, metavar="IMAGE", help=f"{images.FORMAT_NAMES} files"
    )
    parser.add_argument(
        "--top", type=command_line.positive_int, default=5, help="classes per image (%(default)s)"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list, one entry per image"
    )
    return parser


@command_line.command
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    store.find_checkpoint(arguments.checkpoint)  # before TensorFlow is loaded
    for path in arguments.images:
        _probed(path)
    command_line.start_single_process("predict")
    network = command_line.load_network(arguments)
    results = []
    for path, values in zip(
        arguments.images, probabilities(network, arguments.images), strict=True
    ):
        best = np.argsort(-values, kind="stable")[: arguments.top]
        entries = [
            {"class": network.class_names[i], "index": int(i), "probability": float(values[i])}
            for i in best
        ]
        results.append({"image": str(path), "predictions": entries})
    print(
        json.dumps(results, indent=2)
        if arguments.json
        else "\n".join(_text(result) for result in results)
    )


def probabilities(network: TrainedNetwork, paths: Sequence[pathlib.Path]) -> Iterator[np.ndarray]:
    """The probability of each class, float64 [classes], for each image file in turn.

    An image is prepared as for evaluation: the central square of `crop_fraction` of its shorter
    side.

    Raises:
      UserError: for a file that cannot be read or decoded, or scores that are not finite.
    """
    model = network.build()
    for start in range(0, len(paths), _BATCH):
        pixels = np.stack([_pixels(network, path) for path in paths[start : start + _BATCH]])
        logits = model(network.preprocess(pixels), training=False).numpy().astype(np.float64)
        finite = np.isfinite(logits).all(axis=1)
        if not finite.all():
            raise UserError(
                f"{paths[start + int(finite.argmin())]}: the scores of {network.origin} for this"
                " image are not finite numbers, because its weights are too large; give another"
                " checkpoint"
            )
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        yield from exponentials / exponentials.sum(axis=1, keepdims=True)


def _pixels(network: TrainedNetwork, path: pathlib.Path) -> np.ndarray:
    """The part of an image file that the network looks at, uint8 [s, s, 3]."""
    import tensorflow as tf

    from hybrid_imagenet.data import augmentations

    content, kind, height, width = _probed(path)
    try:
        windows = augmentations.center(np.array([[height, width]], np.int64), network.crop_fraction)
        branch, window = images.branches(np.array([kind], np.int64), windows, network.image_size)
        decoded = images.decode(
            tf.constant(content),
            tf.constant(branch[0]),
            tf.constant(window[0]),
            network.image_size,
            accurate=True,
        )
        return np.asarray(decoded.numpy())
    except tf.errors.OpError:
        raise UserError(
            f"{path}: the image does not decode; give a file that is not damaged"
        ) from None


def _probed(path: pathlib.Path) -> tuple[bytes, int, int, int]:
    """Returns an image file's content, and its kind, height and width (`images.probe`); raises
    UserError.
    """
    try:
        content = files.read_regular(path.expanduser(), images.MAX_BYTES)
        return content, *images.probe(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give an image file that can be read") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}; give an image file that can be read") from None


def _text(result: dict[str, Any]) -> str:
    lines = [
        f"  {100 * entry['probability']:7.3f} %  {printable(entry['class'])}"
        for entry in result["predictions"]
    ]
    return "\n".join([printable(result["image"]), *lines])
