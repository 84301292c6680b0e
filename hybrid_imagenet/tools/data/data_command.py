"""`hybrid-imagenet data prepare|check`: converts and verifies datasets."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hybrid_imagenet import data, files
from hybrid_imagenet.data import datasets, listing
from hybrid_imagenet.errors import EXIT_OK, EXIT_USAGE, pluralize
from hybrid_imagenet.tools import command_line


def _parser() -> argparse.ArgumentParser:
    parser = command_line.Parser("data", "Converts and verifies datasets.")
    commands = parser.add_subparsers(dest="command", required=True)

    prepare = commands.add_parser(
        "prepare", help="write any dataset as TFRecord shards with an index and a manifest"
    )
    _add_source(prepare, "--from")
    prepare.add_argument(
        "--to", required=True, help="new directory for the shards; an interrupted one is continued"
    )
    prepare.add_argument(
        "--resize", type=command_line.positive_int, metavar="PIXELS", help="reduce larger images"
    )
    prepare.add_argument(
        "--quality",
        type=command_line.positive_int,
        default=90,
        help="of reduced JPEGs (%(default)s)",
    )
    prepare.add_argument(
        "--per_shard",
        type=command_line.positive_int,
        default=1024,
        help="images per shard (%(default)s)",
    )
    prepare.add_argument(
        "--bad_records", choices=("fail", "skip"), default="fail", help="end, or omit and list"
    )
    prepare.add_argument(
        "--max_bad_records",
        type=command_line.non_negative_int,
        default=100,
        help="bad records per split above which it ends (%(default)s)",
    )

    check = commands.add_parser(
        "check", help="verify every record of a dataset; report each bad one"
    )
    _add_source(check, "--dataset")
    check.add_argument("--split", choices=data.SPLITS, help="only this split")
    return parser


def _add_source(parser: argparse.ArgumentParser, flag: str) -> None:
    parser.add_argument(flag, dest="dataset", required=True, help=datasets.HELP)
    parser.add_argument(
        "--data_dir", help=f"where it lies: a directory, or for {datasets.URL_DATASETS} a URL"
    )
    parser.add_argument("--data_cache_dir", help="for copies of the files of a URL")
    parser.add_argument(
        "--num_classes",
        type=command_line.positive_int,
        help="classes, if the files do not name them",
    )
    parser.add_argument(
        "--num_examples",
        type=command_line.positive_int,
        help="training images of a synthetic dataset",
    )
    parser.add_argument(
        "--val_fraction",
        type=command_line.fraction,
        default=0.0,
        help="of a folder, as in training",
    )
    parser.add_argument(
        "--workers",
        type=command_line.positive_int,
        default=os.cpu_count() or 1,
        help="processes (%(default)s)",
    )


def _prepare(arguments: argparse.Namespace) -> int:
    from hybrid_imagenet.tools.data import prepare

    target = files.output_path("--to", arguments.to)
    settings = prepare.Settings(
        arguments.resize,
        arguments.quality,
        arguments.per_shard,
        arguments.bad_records == "skip",
        arguments.max_bad_records,
    )
    source = datasets.DatasetRequest.from_flags(arguments)
    manifest = prepare.prepare(source, target, settings, arguments.workers)
    for split, entry in manifest["splits"].items():
        size = sum(shard["bytes"] for shard in entry["shards"])
        left_out = (
            f", {entry['images_dropped']} of {entry['images_in']} images omitted (see"
            " manifest.json)"
        )
        shards = pluralize(len(entry["shards"]), "shard")
        command_line.print_escaped(
            f"{split}: {pluralize(entry['num_examples'], 'image')} in {shards}, {size} bytes"
            f"{left_out if entry['bad_records'] else ''}"
        )
    command_line.print_escaped(f"train with --dataset=tfrecord --data_dir={arguments.to}")
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> int:
    from hybrid_imagenet.tools.data import check

    if arguments.split is None:
        train, validation = (
            datasets.DatasetRequest.from_flags(arguments, split).open() for split in data.SPLITS
        )
        listing.check_splits(arguments.dataset, train.class_names, validation.class_names)
    faults = 0
    printed: set[str] = set()
    for split in [arguments.split] if arguments.split else data.SPLITS:
        for note in check.check(
            datasets.DatasetRequest.from_flags(arguments, split), arguments.workers
        ):
            # Both splits are in one directory, whose other files each of them skips.
            if note.text in printed:
                continue
            printed.add(note.text)
            command_line.print_escaped(str(note) if note.fault else f"note: {note}", sys.stdout)
            faults += note.fault
    print(pluralize(faults, "fault") if faults else "no faults")
    return EXIT_USAGE if faults else EXIT_OK


@command_line.command
def main(argv: Sequence[str]) -> int:
    """Runs the command line."""
    arguments = _parser().parse_args(argv)
    return {"prepare": _prepare, "check": _check}[arguments.command](arguments)
