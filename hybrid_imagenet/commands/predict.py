"""`hybrid-imagenet predict RUN IMAGE...`: prints the most probable classes of images."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.data import images
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, UserError, printable

if TYPE_CHECKING:
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork

_IMAGES_PER_BATCH = 32
_EPILOG = """\
Examples:
  hybrid-imagenet predict runs/NAME --best cat.jpg dog.png --top=3
  hybrid-imagenet predict runs/NAME photos/*.jpg --json > predictions.json"""


@command_line.command
def main(argv: Sequence[str]) -> int:
    """Runs the command line.

    An image that cannot be used is reported, and does not keep the others from being classified.
    """
    arguments = _parser().parse_args(argv)
    command_line.find_checkpoint(arguments)
    errors: list[UserError] = []

    def report(error: UserError) -> None:
        errors.append(error)
        command_line.print_user_error(error)

    # Most errors in the files are found before TensorFlow is loaded, which takes seconds.
    paths = []
    for path in arguments.images:
        try:
            _read_image(path)
        except UserError as error:
            report(error)
        else:
            paths.append(path)
    if paths:
        command_line.start_single_process("predict")
        network = command_line.load_network(arguments)
        results = []
        for path, values in probabilities(network, paths, report):
            results.append(_result(path, values, network.class_names, arguments.top))
        _print_results(results, as_json=arguments.json)
    return EXIT_USAGE if errors else EXIT_OK


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


def probabilities(
    network: TrainedNetwork, paths: Sequence[pathlib.Path], report: Callable[[UserError], None]
) -> Iterator[tuple[pathlib.Path, np.ndarray]]:
    """Yields each image file with the probability of each class, float64 [classes].

    Images are prepared as in an evaluation: the network sees the central square with a side of
    `crop_fraction` times the shorter side.

    Args:
      network: The network.
      paths: The image files.
      report: Is called with the error for a file that cannot be read or decoded, which is skipped.

    Raises:
      UserError: For scores that are not finite.
    """
    model = network.build()
    for start in range(0, len(paths), _IMAGES_PER_BATCH):
        batch = []
        decoded = []
        for path in paths[start : start + _IMAGES_PER_BATCH]:
            try:
                decoded.append(_decode_image(network, path))
            except UserError as error:
                report(error)
            else:
                batch.append(path)
        if not batch:
            continue
        pixels = np.stack(decoded)
        logits = model(network.preprocess(pixels), training=False).numpy().astype(np.float64)
        is_finite = np.isfinite(logits).all(axis=1)
        if not is_finite.all():
            first_bad_path = batch[int(is_finite.argmin())]
            raise UserError(
                f"The scores of {network.origin} for {first_bad_path} are not finite numbers,"
                " because its weights are too large. Use another checkpoint."
            )
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances = exponentials / exponentials.sum(axis=1, keepdims=True)
        yield from zip(batch, chances, strict=True)


def _decode_image(network: TrainedNetwork, path: pathlib.Path) -> np.ndarray:
    """Returns the part of an image that the network sees, uint8 [image_size, image_size, 3].

    Raises:
      UserError: If the file cannot be read or decoded.
    """
    import tensorflow as tf

    from hybrid_imagenet.data import augmentations

    content, header = _read_image(path)
    windows = augmentations.center_windows(
        np.array([[header.height, header.width]], np.int64), network.crop_fraction
    )
    branch, window = images.plan_decoding(
        np.array([header.kind], np.int64), windows, network.image_size
    )
    try:
        return images.decode_eagerly(
            lambda: images.decode(
                tf.constant(content),
                tf.constant(branch[0]),
                tf.constant(window[0]),
                network.image_size,
                accurate=True,
            )
        )
    except ValueError as error:
        raise _unusable_error(path, str(error)) from None


def _read_image(path: pathlib.Path) -> tuple[bytes, images.DecodedHeader]:
    """Returns an image file's content and its decoded header.

    Raises:
      UserError: If it cannot be read, or is not an image.
    """
    try:
        content = files.read_regular(path.expanduser(), images.MAX_BYTES)
        return content, images.decode_header(content)
    except OSError as error:
        reason = str(error.strerror)
    except ValueError as error:
        reason = str(error)
    raise _unusable_error(path, reason)


def _unusable_error(path: pathlib.Path, reason: str) -> UserError:
    # Some reasons are a predicate of the file, others are a sentence.
    problem = reason if reason.startswith(("is ", "has ")) else f"cannot be used: {reason}"
    return UserError(f"{path} {problem}. Pass an image file that can be read.")


def _result(
    path: pathlib.Path, values: np.ndarray, class_names: Sequence[str], top: int
) -> dict[str, Any]:
    """Returns the most probable classes of an image, JSON-ready.

    Args:
      path: The image file.
      values: The probability of each class, float64 [classes].
      class_names: The name of each class.
      top: The number of classes to return.
    """
    predictions = []
    for index in np.argsort(-values, kind="stable")[:top]:
        predictions.append(
            {
                "class": class_names[index],
                "index": int(index),
                "probability": float(values[index]),
            }
        )
    return {"image": str(path), "predictions": predictions}


def _print_results(results: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(results, indent=2))
        return
    for result in results:
        print(_format_result(result))


def _format_result(result: dict[str, Any]) -> str:
    lines = [printable(result["image"])]
    for prediction in result["predictions"]:
        percent = 100 * prediction["probability"]
        lines.append(f"  {percent:7.3f} %  {printable(prediction['class'])}")
    return "\n".join(lines)
