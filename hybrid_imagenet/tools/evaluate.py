"""`hybrid-imagenet evaluate RUN --dataset=NAME`: loss, top-1 and top-5 of a trained network.

Started once, or once per rank
(`hybrid-imagenet run --module=hybrid_imagenet.tools.evaluate -- RUN ...`): every image counts
exactly once, whatever the number of ranks.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import comm, data
from hybrid_imagenet.checkpoints import store
from hybrid_imagenet.data import DatasetRequest, listing
from hybrid_imagenet.errors import SharedError, UserError, pluralize, printable
from hybrid_imagenet.resilience import lossy_stream
from hybrid_imagenet.tools import command_line

if TYPE_CHECKING:
    import argparse

    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
    from hybrid_imagenet.data.sources.source import Source

_log = logging.getLogger(__name__)


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "evaluate", "Evaluates a trained network on one split of a dataset, on one rank or many."
    )
    command_line.add_network_arguments(parser)
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="NAME",
        help="as in training: digits, folder, tfrecord, ..., a TFDS name",
    )
    parser.add_argument("--data_dir", metavar="DIR", help="where the dataset is")
    parser.add_argument(
        "--data_cache_dir", metavar="DIR", help="for copies of files of a URL, as in training"
    )
    parser.add_argument(
        "--val_fraction",
        type=command_line.fraction,
        default=0.0,
        help="of a folder, as in training",
    )
    parser.add_argument("--split", choices=data.SPLITS, default="validation", help="(%(default)s)")
    parser.add_argument(
        "--per_gpu_batch",
        type=command_line.positive_int,
        default=64,
        metavar="IMAGES",
        help="images per rank and step (%(default)s)",
    )
    parser.add_argument(
        "--crop",
        metavar="FRACTION",
        type=command_line.fraction,
        help=(
            "side of the central square, as a fraction of the shorter side (default: as trained;"
            " foreign: 0.875)"
        ),
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "mixed_float16", "mixed_bfloat16"),
        default="auto",
        help=(
            "compute type (%(default)s: float32 if the run was trained in it, else the fastest of"
            " this machine)"
        ),
    )
    parser.add_argument(
        "--bad_records", choices=("fail", "skip"), default="fail", help="end, or omit (%(default)s)"
    )
    parser.add_argument(
        "--max_bad_records",
        type=int,
        default=100,
        metavar="RECORDS",
        help="bad records above which it ends (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


@command_line.command
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    if (
        comm.placement().size == 1
    ):  # of several ranks rank 0 alone needs the checkpoint, and all end together
        _check(arguments)
    communicator = comm.start()
    results, network = _evaluate(arguments, communicator)
    if not math.isfinite(results["loss"]):
        raise SharedError(
            f"{network.origin}: the loss is {results['loss']} in {results['precision']}, because"
            " scores are not finite numbers; set --precision=float32, or give another checkpoint"
        )
    if communicator.rank == 0:
        facts = {"checkpoint": network.origin, "weights": "ema" if network.averaged else "trained"}
        print(json.dumps({**facts, **results}) if arguments.json else _line(network, results))
    communicator.shutdown()


def _check(arguments: argparse.Namespace) -> None:
    """Finds out before TensorFlow is loaded what listings and the checkpoint's description show;
    raises UserError.
    """
    classes = store.find_checkpoint(arguments.checkpoint).meta.get("num_classes")
    found = DatasetRequest.from_flags(arguments, arguments.split, num_classes=classes).probe()
    if None not in (classes, found.num_classes) and classes != found.num_classes:
        raise UserError(
            f"--dataset={arguments.dataset}: {found.num_classes} classes, but"
            f" {arguments.checkpoint} has {classes}"
        )


def _evaluate(
    arguments: argparse.Namespace, communicator: comm.Communicator
) -> tuple[dict[str, Any], TrainedNetwork]:
    # Imported late: TensorFlow starts with the threads that comm sets.
    import tensorflow as tf

    from hybrid_imagenet.data import pipeline
    from hybrid_imagenet.training import hardware, same_data
    from hybrid_imagenet.training.evaluation import Validation
    from hybrid_imagenet.training.losses import LOSSES
    from hybrid_imagenet.training.step import EvaluationStep

    network = _shared_network(arguments, communicator)
    with communicator.raise_on_all_ranks():
        source = _source(arguments, network)
        precision = hardware.choose_precision(_asked(arguments, network), network.model)
        model = network.build(precision)
    same_data.check_ranks(communicator, {arguments.split: source})
    if communicator.rank == 0:
        for note in source.notes:
            _log.warning("data: %s", note)
    communicator.broadcast_variables([variable.value for variable in model.weights])
    compute = precision.removeprefix("mixed_")
    threads = tf.config.threading.get_intra_op_parallelism_threads() or 1
    results = Validation(
        EvaluationStep(
            model,
            lambda batch: network.preprocess(batch["image"], compute),
            loss=LOSSES[network.loss],
            flip=network.eval_flip,
        ),
        source,
        communicator,
        batch=arguments.per_gpu_batch,
        image_size=network.image_size,
        crop_fraction=arguments.crop or network.crop_fraction,
        options=pipeline.HostOptions(
            threads=threads,
            bad_records=arguments.bad_records,
            max_bad_records=arguments.max_bad_records,
        ),
    ).run()
    values = {name.removeprefix("val_"): value for name, value in results.items()}
    return {**values, "precision": precision}, network


def _asked(arguments: argparse.Namespace, network: TrainedNetwork) -> str:
    """The precision asked for; `auto` is that of a run in float32, which every machine has.

    Others go by the machine: FP16 convolutions need a GPU, and BF16 pays on few processors.
    """
    return (
        "float32"
        if (arguments.precision, network.precision) == ("auto", "float32")
        else arguments.precision
    )


def _shared_network(
    arguments: argparse.Namespace, communicator: comm.Communicator
) -> TrainedNetwork:
    """The network with its weights on rank 0, which alone reads the file, and without them
    elsewhere.
    """
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork

    network: TrainedNetwork | None = None
    with communicator.raise_on_all_ranks():
        if communicator.rank == 0:
            network = command_line.load_network(arguments)
    description = communicator.broadcast_object(network.description() if network else None)
    return network or TrainedNetwork.from_description(description)


def _source(arguments: argparse.Namespace, network: TrainedNetwork) -> Source:
    classes = len(network.class_names)
    source = DatasetRequest.from_flags(arguments, arguments.split, num_classes=classes).open()
    if source.num_classes != classes:
        raise UserError(
            f"--dataset={arguments.dataset}: {source.num_classes} classes, but {network.origin} has"
            f" {classes}"
        )
    if source.class_names != network.class_names and set(source.class_names) == set(
        network.class_names
    ):
        raise UserError(
            f"--dataset={arguments.dataset}: it has the classes of {network.origin} in another"
            " order"
        )
    if found := listing.class_name_difference(network.class_names, source.class_names):
        text = f"{network.origin} has other class names ({found}): labels are compared by number"
        source.notes = (*source.notes, listing.DatasetNote(text))
    return source


def _line(network: TrainedNetwork, results: dict[str, Any]) -> str:
    which = " (averaged weights)" if network.averaged else ""
    top5 = f"top-5 {100 * results['top5']:.3f} %, " if len(network.class_names) > 5 else ""
    dropped = f" ({results['dropped']} dropped)" if results["dropped"] else ""
    return (
        f"{printable(network.origin)}{which}: {pluralize(results['count'], 'image')}{dropped},"
        f" top-1 {100 * results['top1']:.3f} %, {top5}loss {results['loss']:.5f},"
        f" {results['precision']}"
    )


if __name__ == "__main__":  # as a rank of `hybrid-imagenet run --module`
    lossy_stream.install()
    sys.exit(main(sys.argv[1:]))
