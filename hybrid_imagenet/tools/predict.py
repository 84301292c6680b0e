"""`hybrid-imagenet predict RUN IMAGE...`: prints the most probable classes of images."""

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

_IMAGES_PER_BATCH = 32
_EPILOG = """\
Examples:
  hybrid-imagenet predict runs/NAME --best cat.jpg dog.png --top=3
  hybrid-imagenet predict runs/NAME photos/*.jpg --json > predictions.json"""


@command_line.command
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    # Errors in the files are reported before TensorFlow is loaded, which takes seconds.
    store.find_checkpoint(arguments.checkpoint)
    for path in arguments.images:
        _read_image(path)
    command_line.start_single_process("predict")
    network = command_line.load_network(arguments)
    results = []
    for path, values in zip(
        arguments.images, probabilities(network, arguments.images), strict=True
    ):
        best = np.argsort(-values, kind="stable")[: arguments.top]
        predictions = []
        for index in best:
            predictions.append(
                {
                    "class": network.class_names[index],
                    "index": int(index),
                    "probability": float(values[index]),
                }
            )
        results.append({"image": str(path), "predictions": predictions})
    if arguments.json:
        print(json.dumps(results, indent=2))
    else:
        print("\n".join(_format_result(result) for result in results))


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "predict",
        "Prints the most probable classes of images with their probabilities. Images are prepared"
        " as in an evaluation of the run.",
        epilog=_EPILOG,
    )
    command_line.add_network_arguments(parser)
    parser.add_argument(
        "images",
        nargs="+",
        type=pathlib.Path,
        metavar="IMAGE",
        help=f"image file: {images.FORMAT_NAMES}",
    )
    parser.add_argument(
        "--top",
        type=command_line.positive_int,
        default=5,
        metavar="CLASSES",
        help="number of classes to print for each image (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON list with one entry per image"
    )
    return parser


def probabilities(network: TrainedNetwork, paths: Sequence[pathlib.Path]) -> Iterator[np.ndarray]:
    """Yields the probability of each class, float64 [classes], for each image file in turn.

    Images are prepared as in an evaluation: the network sees the central square with a side of
    `crop_fraction` times the shorter side.

    Raises:
      UserError: for a file that cannot be read or decoded, or scores that are not finite.
    """
    model = network.build()
    for start in range(0, len(paths), _IMAGES_PER_BATCH):
        batch = paths[start : start + _IMAGES_PER_BATCH]
        pixels = np.stack([_decode_image(network, path) for path in batch])
        logits = model(network.preprocess(pixels), training=False).numpy().astype(np.float64)
        is_finite = np.isfinite(logits).all(axis=1)
        if not is_finite.all():
            first_bad_path = batch[int(is_finite.argmin())]
            raise UserError(
                f"The scores of {network.origin} for {first_bad_path} are not finite numbers,"
                " because its weights are too large. Use another checkpoint."
            )
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        yield from exponentials / exponentials.sum(axis=1, keepdims=True)


def _decode_image(network: TrainedNetwork, path: pathlib.Path) -> np.ndarray:
    """Returns the part of an image that the network sees, uint8 [image_size, image_size, 3]."""
    import tensorflow as tf

    from hybrid_imagenet.data import augmentations

    content, kind, height, width = _read_image(path)
    try:
        windows = augmentations.center_windows(
            np.array([[height, width]], np.int64), network.crop_fraction
        )
        branch, window = images.plan_decoding(
            np.array([kind], np.int64), windows, network.image_size
        )
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
            f"{path} cannot be decoded, because it is damaged. Use an intact image file."
        ) from None


def _read_image(path: pathlib.Path) -> tuple[bytes, int, int, int]:
    """Returns an image file's content, kind, height and width (`images.decode_header`).

    Raises:
      UserError: if it cannot be read, or is not an image.
    """
    try:
        content = files.read_regular(path.expanduser(), images.MAX_BYTES)
        return content, *images.decode_header(content)
    except OSError as error:
        reason = str(error.strerror)
    except ValueError as error:
        reason = str(error)
    # Some reasons are a predicate of the file, others are a sentence.
    problem = reason if reason.startswith(("is ", "has ")) else f"cannot be used: {reason}"
    raise UserError(f"{path} {problem}. Pass an image file that can be read.")


def _format_result(result: dict[str, Any]) -> str:
    lines = [printable(result["image"])]
    for prediction in result["predictions"]:
        percent = 100 * prediction["probability"]
        lines.append(f"  {percent:7.3f} %  {printable(prediction['class'])}")
    return "\n".join(lines)
