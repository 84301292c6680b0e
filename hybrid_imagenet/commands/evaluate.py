"""`hybrid-imagenet evaluate RUN`: loss, top-1 and top-5 of a trained network on a dataset.

Without --dataset, the network is evaluated on the dataset of its run, read as in training.

It runs in one process, or once per rank
(`hybrid-imagenet run --module=hybrid_imagenet.commands.evaluate -- RUN ...`). Every image counts
exactly once, whatever the number of ranks.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import comm
from hybrid_imagenet.checkpoints import store
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.config import stored
from hybrid_imagenet.config.flags import COMMON
from hybrid_imagenet.config.resumed_run import SECRET_MASK
from hybrid_imagenet.data import datasets, listing
from hybrid_imagenet.data.datasets import DatasetRequest
from hybrid_imagenet.errors import SharedError, UserError, pluralize, printable
from hybrid_imagenet.resilience import lossy_stream
from hybrid_imagenet.runlog.summary import is_top5_meaningful
from hybrid_imagenet.schedules.batch_schedule import MAX_BATCH

if TYPE_CHECKING:
    import argparse
    import pathlib

    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork
    from hybrid_imagenet.data.sources.source import Source

_log = logging.getLogger(__name__)

_EPILOG = """\
Examples:
Evaluate the best checkpoint of a run on the validation images of its dataset:
  hybrid-imagenet evaluate runs/NAME --best
Evaluate it on other images with the same classes:
  hybrid-imagenet evaluate runs/NAME --best --dataset=folder --data_dir=new_photos
Evaluate on four ranks:
  hybrid-imagenet run -np 4 --module=hybrid_imagenet.commands.evaluate -- runs/NAME"""
# How a dataset is read. Without --dataset, the run has the values that the command line does not.
_DATASET_FLAGS = (
    "dataset",
    "data_dir",
    "data_cache_dir",
    "val_fraction",
    "num_examples",
    "bad_records",
    "max_bad_records",
)


@command_line.command
def main(argv: Sequence[str]) -> None:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    if comm.read_placement().size == 1:
        # With several ranks, an error must end all of them at the same time, and only rank 0 needs
        # to see the run. So this waits until the ranks are connected.
        command_line.find_checkpoint(arguments)
        _complete_dataset_flags(arguments)
        _check_num_classes(arguments)
    communicator = comm.start()
    results, network = _evaluate(arguments, communicator)
    if not math.isfinite(results["loss"]):
        raise SharedError(
            f"The loss of {network.origin} is {results['loss']} in {results['precision']}, because"
            " its scores are not finite numbers. Set --precision=float32, or use another"
            " checkpoint."
        )
    if communicator.rank == 0:
        if arguments.json:
            weights = "ema" if network.averaged else "trained"
            print(json.dumps({"checkpoint": network.origin, "weights": weights, **results}))
        else:
            print(_format_results(network, results))
    communicator.shutdown()


def _parser() -> command_line.Parser:
    parser = command_line.Parser(
        "evaluate",
        "Evaluates a trained network on one split of a dataset, on one rank or many. Every image"
        " counts once. Use it to check a checkpoint, or to measure a network on other images.",
        epilog=_EPILOG,
    )
    command_line.add_network_arguments(parser)
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help=(
            "dataset, as in training: digits, folder, tfrecord, ..., or a TFDS name (default: the"
            " dataset of the run, with its --data_dir, --val_fraction and so on)"
        ),
    )
    parser.add_argument(
        "--data_dir", metavar="DIR", help="directory or URL of the dataset (default: as in the run)"
    )
    parser.add_argument(
        "--data_cache_dir",
        metavar="DIR",
        help=(
            "directory for copies of the dataset's files, if --data_dir is a URL (default: of the"
            " run)"
        ),
    )
    parser.add_argument(
        "--val_fraction",
        type=command_line.fraction,
        metavar="FRACTION",
        help=(
            "fraction of each class that training held out for validation (only with"
            " --dataset=folder; default: as in the run, or 0 with --dataset)"
        ),
    )
    parser.add_argument(
        "--split",
        choices=datasets.SPLITS,
        default="validation",
        help="images to evaluate on (default: %(default)s)",
    )
    parser.add_argument(
        "--per_gpu_batch",
        type=command_line.positive_int_up_to(MAX_BATCH),
        default=64,
        metavar="IMAGES",
        help="images per rank and step (default: %(default)s)",
    )
    parser.add_argument(
        "--crop",
        metavar="FRACTION",
        type=command_line.fraction,
        help=(
            "side of the central square that is used, as a fraction of the shorter side (default:"
            " as in training; 0.875 for torchvision weights)"
        ),
    )
    parser.add_argument(
        "--precision",
        choices=("auto", "float32", "mixed_float16", "mixed_bfloat16"),
        default="auto",
        help=(
            "type to compute in; auto means float32 if the run was trained in it, and otherwise"
            " the fastest type of this machine (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--bad_records",
        choices=("fail", "skip"),
        help=(
            "whether to fail at a record that cannot be read, or to skip it (default: as in the"
            " run, or fail with --dataset)"
        ),
    )
    parser.add_argument(
        "--max_bad_records",
        type=command_line.non_negative_int,
        metavar="RECORDS",
        help=(
            "with --bad_records=skip, fail if there are more bad records than this (default: of"
            " the run, or 100 with --dataset)"
        ),
    )
    parser.add_argument("--json", action="store_true", help="print the results as one JSON object")
    return parser


def _complete_dataset_flags(arguments: argparse.Namespace) -> None:
    """Sets the flags that describe the dataset, from its run if --dataset is not set.

    Raises:
      UserError: If the checkpoint does not belong to a run, or a password was not stored.
    """
    defaults: Mapping[str, Any] = {
        "val_fraction": 0.0,
        "bad_records": "fail",
        "max_bad_records": COMMON["max_bad_records"].default,
    }
    if arguments.dataset is None:
        defaults = _dataset_flags_of_run(arguments.checkpoint)
        print(f"evaluating on --dataset={defaults['dataset']} of the run", file=sys.stderr)
        _print_tuning_split(defaults, arguments.split)
    for name in _DATASET_FLAGS:
        if getattr(arguments, name, None) is None:
            value = defaults.get(name)
            if isinstance(value, str) and SECRET_MASK in value:
                raise UserError(
                    f"--{name}={value} of the run cannot be used again, because passwords are not"
                    f" stored. Set --{name}."
                )
            setattr(arguments, name, value)


def _print_tuning_split(flags: Mapping[str, Any], split: str) -> None:
    """Prints which images these are, if the run has held out training images (--tuning_split)."""
    size = flags.get("tuning_split", 0.0)
    if not size:
        return
    if split == "train":
        line = f"these include the images that the run held out (--tuning_split={size:g})"
    elif flags.get("eval_split") == "tuning":
        line = f"these are the validation images; the run was validated on --tuning_split={size:g}"
    else:
        return
    print(line, file=sys.stderr)


def _dataset_flags_of_run(path: pathlib.Path) -> Mapping[str, Any]:
    checkpoint = store.find_checkpoint(path).path
    # A checkpoint is in RUN/checkpoints.
    directory = checkpoint.parent.parent
    if not (directory / "config.json").exists():
        raise UserError(
            f"{checkpoint} is not in the directory of a run, which would name its dataset. Set"
            " --dataset."
        )
    flags: Mapping[str, Any] = stored.read(directory)["flags"]
    return flags


def _check_num_classes(arguments: argparse.Namespace) -> None:
    """Compares the numbers of classes before TensorFlow is loaded, which takes seconds.

    Raises:
      UserError: If the checkpoint and the dataset have different numbers, or one of them cannot be
        read.
    """
    network_classes = store.find_checkpoint(arguments.checkpoint).meta.get("num_classes")
    request = DatasetRequest.from_flags(arguments, arguments.split, num_classes=network_classes)
    dataset_classes = request.probe().num_classes
    # Either number can be unknown before the files are read.
    if network_classes is None or dataset_classes is None:
        return
    if network_classes != dataset_classes:
        raise UserError(
            _different_classes_message(
                arguments.dataset, dataset_classes, arguments.checkpoint, network_classes
            )
        )


def _different_classes_message(
    dataset: str, dataset_classes: int, checkpoint: object, network_classes: int
) -> str:
    return (
        f"--dataset={dataset} has {dataset_classes} classes, but {checkpoint} has"
        f" {network_classes}. Use the dataset of the training, or one with the same classes."
    )


def _evaluate(
    arguments: argparse.Namespace, communicator: comm.Communicator
) -> tuple[dict[str, Any], TrainedNetwork]:
    """Evaluates on all ranks; returns the results, the same on each, and the network."""
    # Imported late: TensorFlow starts with the threads that comm sets.
    import tensorflow as tf

    from hybrid_imagenet.data import pipeline
    from hybrid_imagenet.training import hardware, same_data
    from hybrid_imagenet.training.evaluation import Validation
    from hybrid_imagenet.training.losses import LOSSES
    from hybrid_imagenet.training.step import EvaluationStep

    network = _shared_network(arguments, communicator)
    with communicator.raise_on_all_ranks():
        if communicator.rank == 0:
            _complete_dataset_flags(arguments)
    for name, value in communicator.broadcast_object(
        {name: getattr(arguments, name, None) for name in _DATASET_FLAGS}
    ).items():
        setattr(arguments, name, value)
    with communicator.raise_on_all_ranks():
        source = _open_source(arguments, network)
        requested_precision = _requested_precision(arguments, network)
        precision = hardware.choose_precision(requested_precision, network.model)
        model = network.build(precision)
    same_data.check_ranks(communicator, {arguments.split: source})
    if communicator.rank == 0:
        for note in source.notes:
            _log.warning("data: %s", note)
    communicator.broadcast_variables([variable.value for variable in model.weights])
    compute_dtype = precision.removeprefix("mixed_")
    step = EvaluationStep(
        model,
        lambda batch: network.preprocess(batch["image"], compute_dtype),
        loss=LOSSES[network.loss],
        flip=network.eval_flip,
    )
    host_options = pipeline.HostOptions(
        threads=tf.config.threading.get_intra_op_parallelism_threads() or 1,
        bad_records=arguments.bad_records,
        max_bad_records=arguments.max_bad_records,
    )
    validation = Validation(
        step,
        source,
        communicator,
        batch=arguments.per_gpu_batch,
        image_size=network.image_size,
        crop_fraction=arguments.crop or network.crop_fraction,
        options=host_options,
    )
    results: dict[str, Any] = {}
    for name, value in validation.run().items():
        results[name.removeprefix("val_")] = value
    results["precision"] = precision
    return results, network


def _requested_precision(arguments: argparse.Namespace, network: TrainedNetwork) -> str:
    """Returns --precision, but float32 instead of auto for a run that was trained in float32.

    Every machine can compute in float32. For other runs, auto depends on the machine: FP16
    convolutions need a GPU, and BF16 is fast on few processors.
    """
    if arguments.precision == "auto" and network.precision == "float32":
        return "float32"
    return str(arguments.precision)


def _shared_network(
    arguments: argparse.Namespace, communicator: comm.Communicator
) -> TrainedNetwork:
    """Returns the network with its weights on rank 0, and without them on other ranks.

    Only rank 0 reads the file, which other hosts may not have.
    """
    from hybrid_imagenet.checkpoints.pretrained import TrainedNetwork

    network: TrainedNetwork | None = None
    with communicator.raise_on_all_ranks():
        if communicator.rank == 0:
            network = command_line.load_network(arguments)
    description = communicator.broadcast_object(network.description() if network else None)
    return network or TrainedNetwork.from_description(description)


def _open_source(arguments: argparse.Namespace, network: TrainedNetwork) -> Source:
    """Opens the dataset, and compares its classes with those of the network.

    Raises:
      UserError: If the dataset has other classes, or the same ones in another order.
    """
    num_classes = len(network.class_names)
    source = DatasetRequest.from_flags(arguments, arguments.split, num_classes=num_classes).open()
    if source.num_classes != num_classes:
        raise UserError(
            _different_classes_message(
                arguments.dataset, source.num_classes, network.origin, num_classes
            )
        )
    source_names = list(map(listing.normalize_name, source.class_names))
    network_names = list(map(listing.normalize_name, network.class_names))
    if source_names != network_names and set(source_names) == set(network_names):
        raise UserError(
            f"--dataset={arguments.dataset} has the classes of {network.origin} in another order."
            " Use the dataset of the training."
        )
    difference = listing.class_name_difference(network.class_names, source.class_names)
    if difference:
        text = (
            f"{network.origin} has other class names ({difference}): labels are compared by number"
        )
        source.notes = (*source.notes, listing.DatasetNote(text))
    return source


def _format_results(network: TrainedNetwork, results: dict[str, Any]) -> str:
    name = printable(network.origin)
    if network.averaged:
        name += " (averaged weights)"
    images = pluralize(results["count"], "image")
    if results["dropped"]:
        images += f" ({results['dropped']} dropped)"
    values = [images, f"top-1 {100 * results['top1']:.3f} %"]
    if is_top5_meaningful(len(network.class_names)):
        values.append(f"top-5 {100 * results['top5']:.3f} %")
    values += [f"loss {results['loss']:.5f}", results["precision"]]
    return f"{name}: {', '.join(values)}"


# A rank of `hybrid-imagenet run --module` starts here.
if __name__ == "__main__":
    lossy_stream.install()
    sys.exit(main(sys.argv[1:]))
