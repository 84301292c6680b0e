"""`hybrid-imagenet export RUN --to=FILE`: converts a trained network and compares the outputs."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.checkpoints import store
from hybrid_imagenet.errors import UserError, did_you_mean
from hybrid_imagenet.tools import command_line, export_checks

if TYPE_CHECKING:
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
    from hybrid_imagenet.tools.export_forms import Form

TOLERANCE = 1e-4  # of the largest logit, or of 1 if that is larger
_BATCHES = (3, 1)  # two sizes, so that a fixed batch would show
TITLES = {
    ".keras": "Keras",
    ".onnx": "ONNX",
    ".safetensors": "weights of torchvision's network, for images that are normalized as there",
    "": "a directory with a TensorFlow SavedModel",
}
"""The forms in which a network is written, by the suffix of the file; `export_forms.FORMS` has
their functions.
"""


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "export", "Writes a trained network in another form, and checks that outputs agree."
    )
    command_line.add_network_arguments(parser)
    parser.add_argument(
        "--to",
        metavar="FILE",
        required=True,
        help=(
            "new file; its suffix tells the form: .keras, .onnx, .safetensors, none (directory with"
            " a SavedModel)"
        ),
    )
    return parser


@command_line.command
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    target_path = files.output_path("--to", arguments.to)
    if target_path.exists():
        raise UserError(f"--to={target_path}: exists already; give a new name")
    if not target_path.parent.is_dir():
        raise UserError(
            f"--to={target_path}: there is no directory {target_path.parent}; create it"
        )
    if target_path.suffix not in TITLES:
        forms = ", ".join(f"{suffix or 'no suffix'} ({title})" for suffix, title in TITLES.items())
        near = did_you_mean(target_path.suffix, TITLES)
        raise UserError(f"--to={target_path}: the name must end in one of: {forms}{near}")
    # Before TensorFlow is loaded, which takes seconds.
    export_checks.check_form(target_path.suffix, store.find_checkpoint(arguments.checkpoint).meta)
    command_line.start_single_process("export")
    from hybrid_imagenet.tools import export_forms

    network = command_line.load_network(arguments)
    difference = export(network, export_forms.FORMS[target_path.suffix], target_path)
    title = TITLES[target_path.suffix]
    command_line.print_escaped(
        f"wrote {target_path} ({title}); outputs differ by at most {difference:.1e} of the largest"
        " logit"
    )


def export(network: TrainedNetwork, form: Form, path: pathlib.Path) -> float:
    """Writes a network, runs what was written, and compares the outputs on random images.

    The file has its name only once it has passed; before, it is a hidden file beside it.

    Returns:
      The largest difference of a logit, as a fraction of the largest logit (or of 1 if that is
      larger).

    Raises:
      UserError: for a network that such a file cannot hold, a file that cannot be written, or
        outputs that differ by more than `TOLERANCE`.
    """
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        form.write(network, temporary)
        difference = _difference(network, form, temporary)
        if not difference <= TOLERANCE:  # a NaN must not pass
            raise UserError(
                f"--to={path}: outputs of the file differ by {difference:.1e} of the largest logit;"
                " it was not kept, choose another form"
            )
        temporary.rename(path)
    except OSError as error:
        raise UserError(
            f"--to={path}: cannot be written ({error.strerror or error}); give another place"
        ) from None
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        elif temporary.exists():
            temporary.unlink()
    return difference


def _difference(network: TrainedNetwork, form: Form, path: pathlib.Path) -> float:
    from hybrid_imagenet.tools import export_forms

    original, written = export_forms.outputs(network), form.open(network, path)
    differences = []
    for batch in _BATCHES:
        shape = (batch, network.image_size, network.image_size, 3)
        pixels = np.random.default_rng(batch).integers(0, 256, shape).astype(np.float32)
        expected = original(pixels)
        if not np.isfinite(expected).all():
            raise UserError(
                f"{network.origin}: its scores for random images are not finite numbers, because"
                " its weights are too large; give another checkpoint"
            )
        differences.append(
            np.abs(written(pixels) - expected).max() / max(1.0, np.abs(expected).max())
        )
    return float(np.max(differences))
