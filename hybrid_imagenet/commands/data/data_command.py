"""`hybrid-imagenet data prepare|check`: converts and verifies datasets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.data import datasets, listing
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, UserError, pluralize

_EPILOG = """\
Examples:
  hybrid-imagenet data prepare --from=folder --data_dir=photos --to=shards
  hybrid-imagenet data check --dataset=tfrecord --data_dir=shards"""
_PREPARE_EPILOG = """\
Examples:
Make shards of a directory of photos, with a fifth of each class for validation:
  hybrid-imagenet data prepare --from=folder --data_dir=photos --val_fraction=0.2 --to=shards
Make shards of ImageNet with smaller images:
  hybrid-imagenet data prepare --from=imagenet2012 --resize=256 --to=/data/shards"""
_CHECK_EPILOG = """\
Examples:
  hybrid-imagenet data check --dataset=tfrecord --data_dir=shards
  hybrid-imagenet data check --dataset=folder --data_dir=photos --val_fraction=0.2 --split=train"""


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser(
        "data",
        "Converts a dataset to a format that is read fast, or verifies one before a long run.",
        epilog=_EPILOG,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    prepare = commands.add_parser(
        "prepare",
        help="write any dataset as TFRecord shards with an index and a manifest",
        description="Writes a dataset as TFRecord shards with an index and a manifest. Use it for"
        " large datasets and slow or shared storage, because a few large files are read faster than"
        " many small ones. --resize makes decoding cheaper, too.",
        epilog=_PREPARE_EPILOG,
    )
    _add_source_arguments(prepare, "--from")
    prepare.add_argument(
        "--to",
        required=True,
        metavar="DIR",
        help="new directory for the shards; an interrupted call can be repeated to continue",
    )
    prepare.add_argument(
        "--resize",
        type=command_line.positive_int,
        metavar="PIXELS",
        help=(
            "reduce larger images until their shorter side has this many pixels (default: keep"
            " their size)"
        ),
    )
    prepare.add_argument(
        "--quality",
        type=command_line.positive_int,
        default=90,
        help="JPEG quality of reduced images (default: %(default)s)",
    )
    prepare.add_argument(
        "--per_shard",
        type=command_line.positive_int,
        default=1024,
        help="images per shard (default: %(default)s)",
    )
    prepare.add_argument(
        "--bad_records",
        choices=("fail", "skip"),
        default="fail",
        help=(
            "what to do with a record that cannot be used: fail, or skip it and list it in the"
            " manifest (default: %(default)s)"
        ),
    )
    prepare.add_argument(
        "--max_bad_records",
        type=command_line.non_negative_int,
        default=100,
        help="fail if more records than this are skipped in a split (default: %(default)s)",
    )

    check = commands.add_parser(
        "check",
        help="verify every record of a dataset; report each bad one",
        description="Reads every record of a dataset and reports each one that training could not"
        " use. Exit code: 0 without faults, 2 with faults.",
        epilog=_CHECK_EPILOG,
    )
    _add_source_arguments(check, "--dataset")
    check.add_argument(
        "--split", choices=datasets.SPLITS, help="the split to verify (default: both splits)"
    )
    return parser


def _add_source_arguments(parser: argparse.ArgumentParser, dataset_flag: str) -> None:
    """Adds the options that describe the dataset to read."""
    parser.add_argument(
        dataset_flag,
        dest="dataset",
        required=True,
        metavar="NAME",
        help=f"dataset to read: {datasets.HELP}",
    )
    parser.add_argument(
        "--data_dir",
        metavar="DIR",
        help=f"directory of the dataset, or for {datasets.URL_DATASETS} a URL",
    )
    parser.add_argument(
        "--data_cache_dir",
        metavar="DIR",
        help="local directory for copies of the files (only with a URL)",
    )
    parser.add_argument(
        "--num_classes",
        type=command_line.positive_int,
        help="number of classes, if the files do not name them",
    )
    parser.add_argument(
        "--num_examples",
        type=command_line.positive_int,
        help="number of training images (only for a synthetic dataset)",
    )
    parser.add_argument(
        "--val_fraction",
        type=command_line.fraction,
        default=0.0,
        help=(
            "fraction of each class to use for validation, as in training (only for a folder"
            " without a validation split)"
        ),
    )
    parser.add_argument(
        "--workers",
        type=command_line.positive_int,
        default=os.cpu_count() or 1,
        help="number of processes (default: the number of processors, %(default)s)",
    )


def _prepare(arguments: argparse.Namespace) -> int:
    from hybrid_imagenet.commands.data import prepare

    target = files.output_path("--to", arguments.to)
    settings = prepare.PrepareSettings(
        resize=arguments.resize,
        quality=arguments.quality,
        per_shard=arguments.per_shard,
        skip_bad_records=arguments.bad_records == "skip",
        max_bad_records=arguments.max_bad_records,
    )
    request = datasets.DatasetRequest.from_flags(arguments)
    try:
        manifest = prepare.prepare_dataset(request, target, settings, arguments.workers)
    except UserError as error:
        # Only this command calls the dataset --from.
        raise UserError(str(error).replace("--dataset=", "--from=", 1)) from None
    for split, entry in manifest["splits"].items():
        command_line.print_escaped(_describe_split(split, entry))
    command_line.print_escaped(f"train with --dataset=tfrecord --data_dir={arguments.to}")
    return EXIT_OK


def _describe_split(split: str, entry: Mapping[str, Any]) -> str:
    """Returns a line on a split, from its entry in the manifest."""
    num_bytes = sum(shard["bytes"] for shard in entry["shards"])
    images = pluralize(entry["num_examples"], "image")
    shards = pluralize(len(entry["shards"]), "shard")
    text = f"{split}: {images} in {shards}, {num_bytes} bytes"
    if entry["bad_records"]:
        text += (
            f", {entry['images_dropped']} of {entry['images_in']} images omitted (see"
            " manifest.json)"
        )
    return text


def _check(arguments: argparse.Namespace) -> int:
    from hybrid_imagenet.commands.data import check

    splits = [arguments.split] if arguments.split else datasets.SPLITS
    requests = [datasets.DatasetRequest.from_flags(arguments, split) for split in splits]
    if arguments.split is None:
        train, validation = [request.open() for request in requests]
        listing.check_splits(arguments.dataset, train.class_names, validation.class_names)
    num_faults = 0
    printed: set[str] = set()
    for request in requests:
        for note in check.check_split(request, arguments.workers):
            # Both splits may be in one directory, whose other files each of them skips.
            if note.text in printed:
                continue
            printed.add(note.text)
            if note.fault:
                num_faults += 1
                command_line.print_escaped(note.text, stream=sys.stdout)
            else:
                command_line.print_escaped(f"note: {note.text}", stream=sys.stdout)
    print(pluralize(num_faults, "fault") if num_faults else "no faults")
    return EXIT_USAGE if num_faults else EXIT_OK


@command_line.command
def main(argv: Sequence[str]) -> int:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "prepare":
        return _prepare(arguments)
    return _check(arguments)
