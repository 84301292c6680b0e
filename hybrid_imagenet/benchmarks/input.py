"""Measures how fast images are read and decoded, and how long training waits for them.

    hybrid-imagenet bench input --json=input.json
    hybrid-imagenet bench input --source=tfrecord --data_dir=/data/shards

It prints images per second and core, CPU time per image, and bytes and operations read. Without
--source it generates 500x375 JPEGs of about 110 kB from scikit-learn's sample photographs, and
reads the files and prepared shards of two sizes.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

from hybrid_imagenet.benchmarks import photographs
from hybrid_imagenet.cluster.quiet import import_tensorflow
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.commands.command_line import positive_int
from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.augmentations import AUGMENTATIONS
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import EXIT_OK, UserError, without_secrets

_EPILOG = """\
Examples:
Measure generated photographs:
  hybrid-imagenet bench input
Measure your own dataset with eight threads:
  hybrid-imagenet bench input --source=tfrecord --data_dir=/data --threads=8"""

_WARMUP_BATCHES = 3
# A simulated trainer consumes images at this fraction of the speed at which they can be read.
_TRAINER_SPEED = 0.8
# Values that not every benchmark measures: key, factor and digits in the table.
_OPTIONAL_COLUMNS = (
    ("bytes_per_second", 1e-6, 1),
    ("operations_per_second", 1, 0),
    ("wait_share", 100, 1),
)


def main(argv: list[str]) -> int:
    """Runs the benchmark; prints a table and writes --json."""
    arguments = make_parser().parse_args(argv)
    write_results(arguments, list(measure_all(arguments)))
    return EXIT_OK


def write_results(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes the rows, facts about the machine and the options to --json, if it is set."""
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_average": os.getloadavg()[0],
    }
    options = vars(arguments) | {"data_dir": without_secrets(arguments.data_dir or "")}
    command_line.write_json(arguments.json, {**options, "machine": machine, "rows": rows})


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser for the options of the benchmark."""
    parser = command_line.Parser("bench input", (__doc__ or "").split("\n")[0], epilog=_EPILOG)
    parser.add_argument(
        "--source",
        metavar="NAME",
        help="dataset, as in training (default: generated photographs)",
    )
    parser.add_argument("--data_dir", metavar="DIR", help="directory or URL of the dataset")
    parser.add_argument(
        "--data_cache_dir",
        metavar="DIR",
        help="directory for copies of the files, if --data_dir is a URL",
    )
    parser.add_argument(
        "--augmentation",
        default="inception",
        choices=AUGMENTATIONS,
        help="augmentation of the images (default: %(default)s)",
    )
    parser.add_argument(
        "--image_size",
        type=positive_int,
        default=224,
        help="height and width of an image in pixels (default: %(default)s)",
    )
    parser.add_argument(
        "--batch", type=positive_int, default=64, help="images per batch (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=positive_int,
        default=os.cpu_count() or 1,
        help="threads that decode (default: the number of processors, %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=command_line.positive_float,
        default=10,
        help="seconds of each measurement (default: %(default)s)",
    )
    command_line.add_json_argument(parser)
    return parser


def measure_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures this package's pipelines; prints and yields a row for each."""
    if arguments.source:
        _check_source(arguments)
    print(
        f"{'':34}{'images/s':>10}{'per core':>10}{'CPU ms':>8}{'MB/s':>8}{'reads/s':>9}{'wait':>7}"
    )
    if arguments.source:
        row = measure_pipeline(arguments.source, arguments.source, arguments.data_dir, arguments)
        print_row(row)
        yield row
        return
    folder = str(photographs.photograph_folder())
    small_shards = str(photographs.photograph_shards(256))
    shards = str(photographs.photograph_shards(None))
    for title, dataset, directory in (
        ("files", "folder", folder),
        ("shards", "tfrecord", shards),
        ("shards, shorter side 256", "tfrecord", small_shards),
    ):
        row = measure_pipeline(title, dataset, directory, arguments)
        print_row(row)
        yield row


def _check_source(arguments: argparse.Namespace) -> None:
    """Raises UserError for a dataset that cannot be read, before the table begins."""
    request = datasets.DatasetRequest(
        arguments.source, arguments.data_dir, cache_dir=arguments.data_cache_dir
    )
    try:
        request.probe()
    except UserError as error:
        # Only benchmarks call the dataset --source.
        raise UserError(str(error).replace("--dataset=", "--source=", 1)) from None


def print_row(row: dict[str, Any]) -> None:
    """Prints a row of the table."""
    if "error" in row:
        print(f"{row['name']:34}{row['error']}", flush=True)
        return
    optional = [
        f"{row.get(key, float('nan')) * factor:.{digits}f}"
        for key, factor, digits in _OPTIONAL_COLUMNS
    ]
    print(
        f"{row['name']:34}{row['images_per_second']:10.0f}{row['images_per_second_per_core']:10.0f}"
        f"{row['cpu_ms_per_image']:8.2f}{optional[0]:>8}{optional[1]:>9}{optional[2]:>6}%",
        flush=True,
    )


def measure_pipeline(
    title: str,
    dataset: str,
    data_dir: str | None,
    arguments: argparse.Namespace,
) -> dict[str, Any]:
    """Measures this package's pipeline at full speed, and then with a simulated trainer.

    Args:
      title: Name of the row.
      dataset: --dataset.
      data_dir: --data_dir.
      arguments: The parsed options of the benchmark.

    Returns:
      A row of the table.
    """
    source = datasets.open_source(dataset, data_dir, cache_dir=arguments.data_cache_dir)
    _, elements = _start_pipeline(source, arguments)
    bytes_before = source.reads.bytes_read
    operations_before = source.reads.operations
    cpu_start = time.process_time()
    start = time.perf_counter()
    images = 0
    while (seconds := time.perf_counter() - start) < arguments.seconds:
        next(elements)
        images += arguments.batch
    cpu_seconds = time.process_time() - cpu_start
    row = make_row(title, images, seconds, cpu_seconds, arguments.threads)
    trainer_rate = _TRAINER_SPEED * images / seconds
    return row | {
        "bytes_per_second": (source.reads.bytes_read - bytes_before) / seconds,
        "operations_per_second": (source.reads.operations - operations_before) / seconds,
        "wait_share": _wait_fraction(source, arguments, trainer_rate),
    }


def _start_pipeline(source: Source, arguments: argparse.Namespace) -> Any:
    """Returns the batches of this package's pipeline, and an iterator after some of them."""
    import_tensorflow()
    from hybrid_imagenet.data import pipeline
    from hybrid_imagenet.order.sampling import Cursor

    shuffle_window = 0
    if arguments.data_cache_dir:
        shuffle_window = datasets.source_type(arguments.source).url_shuffle_window or 0
    batches = pipeline.training_batches(
        source,
        pipeline.example_order(source, shuffle_window),
        Cursor(),
        (arguments.batch, 1),
        epochs=1000,
        image_size=arguments.image_size,
        augmentation=arguments.augmentation,
        options=pipeline.HostOptions(threads=arguments.threads),
    )
    elements = iter(batches)
    for _ in range(_WARMUP_BATCHES):
        next(elements)
    return batches, elements


def _wait_fraction(source: Source, arguments: argparse.Namespace, rate: float) -> float:
    """Returns the fraction of the time that a simulated trainer waits for input.

    The trainer computes `rate` images per second on another device, so it does not use the CPU.
    """
    batches, elements = _start_pipeline(source, arguments)
    wait_seconds_before = batches.wait_seconds
    start = time.perf_counter()
    while time.perf_counter() - start < arguments.seconds / 2:
        next(elements)
        time.sleep(arguments.batch / rate)
    return (batches.wait_seconds - wait_seconds_before) / (time.perf_counter() - start)


def make_row(
    name: str, images: int, seconds: float, cpu_seconds: float, threads: int
) -> dict[str, Any]:
    """Returns the row of one pipeline.

    Args:
      name: Name of the row.
      images: Number of images.
      seconds: Duration of the measurement.
      cpu_seconds: CPU time of the process.
      threads: Number of decoding threads.
    """
    cores = min(threads, os.cpu_count() or 1)
    return {
        "name": name,
        "images_per_second": images / seconds,
        "images_per_second_per_core": images / seconds / cores,
        "cpu_ms_per_image": 1000 * cpu_seconds / images,
    }
