"""`hybrid-imagenet export RUN --to=FILE`: converts a trained network and compares the outputs."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
    from hybrid_imagenet.commands.export_formats import ExportFormat

# Packages that only ONNX files need.
_ONNX_PACKAGES = ("onnx", "tf2onnx", "onnxruntime")
# Accepted difference of a logit, as a fraction of the largest logit (or of 1 if that is larger).
TOLERANCE = 1e-4
# Two batch sizes, so that a file that accepts only one size fails.
_BATCH_SIZES = (3, 1)
FORMAT_TITLES = {
    ".keras": "Keras",
    ".onnx": "ONNX",
    "": "a directory with a TensorFlow SavedModel",
}
"""The file formats by suffix. `export_formats.FORMATS` has their functions, but imports TensorFlow.
"""
_EPILOG = """\
Examples:
  hybrid-imagenet export runs/NAME --best --to=network.onnx
  hybrid-imagenet export runs/NAME --to=network.keras"""


@command_line.command
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    path = files.output_path("--to", arguments.to)
    _check_path(path)
    # Before TensorFlow is loaded, which takes seconds.
    _check_packages(path.suffix)
    command_line.find_checkpoint(arguments)
    command_line.start_single_process("export")
    from hybrid_imagenet.commands import export_formats

    network = command_line.load_network(arguments)
    difference = export(network, export_formats.FORMATS[path.suffix], path)
    command_line.print_escaped(
        f"wrote {path} ({FORMAT_TITLES[path.suffix]}); outputs differ by at most {difference:.1e}"
        " of the largest logit"
    )


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "export",
        "Writes a trained network in another file format, to use it in other programs. The written"
        " file is run on random images, and kept only if its outputs agree.",
        epilog=_EPILOG,
    )
    command_line.add_network_arguments(parser)
    parser.add_argument(
        "--to",
        metavar="FILE",
        required=True,
        help=(
            "file to write, whose suffix selects the format: .keras, .onnx, or none for a directory"
            " with a SavedModel"
        ),
    )
    return parser


def _check_path(path: pathlib.Path) -> None:
    """Raises UserError if the file cannot be created, or its suffix is not a format."""
    if path.exists():
        raise UserError(f"--to={path} already exists. Choose a new name.")
    if not path.parent.is_dir():
        raise UserError(
            f"--to={path} is in the directory {path.parent}, which does not exist. Create it."
        )
    if path.suffix not in FORMAT_TITLES:
        formats = []
        for suffix, title in FORMAT_TITLES.items():
            formats.append(f"{suffix or 'no suffix'} ({title})")
        suggestion = did_you_mean(path.suffix, FORMAT_TITLES)
        raise UserError(
            f"--to={path} does not end in the suffix of a format. Use one of:"
            f" {', '.join(formats)}{suggestion}"
        )


def _check_packages(suffix: str) -> None:
    """Raises UserError if a package that a format needs is not installed."""
    for name in _ONNX_PACKAGES if suffix == ".onnx" else ():
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--to: {suffix} files need the package {name}. Run pip install {name}, or export"
                " to .keras, which needs no other package."
            )


def export(network: TrainedNetwork, export_format: ExportFormat, path: pathlib.Path) -> float:
    """Writes a network, runs the written file, and compares the outputs on random images.

    The file gets its name only after it has passed. Until then it is a hidden file in the same
    directory.

    Args:
      network: The network to write.
      export_format: How to write and open the file.
      path: The new file.

    Returns:
      The largest difference of a logit, as a fraction of the largest logit (or of 1 if that is
      larger).

    Raises:
      UserError: For a network that such a file cannot contain, a file that cannot be written, or
        outputs that differ by more than `TOLERANCE`.
    """
    temporary_path = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        export_format.write(network, temporary_path)
        difference = _largest_difference(network, export_format, temporary_path)
        # Written so that NaN fails, too.
        if not difference <= TOLERANCE:
            raise UserError(
                f"The outputs of --to={path} differ by {difference:.1e} of the largest logit, so"
                " the file was not kept. Choose another format."
            )
        temporary_path.rename(path)
    except OSError as error:
        raise UserError(
            f"--to={path} cannot be written ({error.strerror or error}). Choose another directory."
        ) from None
    finally:
        if temporary_path.is_dir():
            shutil.rmtree(temporary_path)
        elif temporary_path.exists():
            temporary_path.unlink()
    return difference


def _largest_difference(
    network: TrainedNetwork, export_format: ExportFormat, path: pathlib.Path
) -> float:
    from hybrid_imagenet.commands import export_formats

    compute_expected = export_formats.logits_function(network)
    compute_written = export_format.open(network, path)
    differences = []
    for batch_size in _BATCH_SIZES:
        shape = (batch_size, network.image_size, network.image_size, 3)
        pixels = np.random.default_rng(batch_size).integers(0, 256, shape).astype(np.float32)
        expected = compute_expected(pixels)
        if not np.isfinite(expected).all():
            raise UserError(
                f"The scores of {network.origin} for random images are not finite numbers, because"
                " its weights are too large. Use another checkpoint."
            )
        largest_logit = max(1.0, np.abs(expected).max())
        differences.append(np.abs(compute_written(pixels) - expected).max() / largest_logit)
    # Unlike Python's max, NumPy's keeps a NaN.
    return float(np.max(differences))
