"""Measures input: images per second and core, CPU per image, bytes and operations read, and the
wait of a trainer.

    hybrid-imagenet bench input --json=input.json
    hybrid-imagenet bench input --source=tfrecord --data_dir=/data/shards

Without --source it makes 500x375 JPEGs of about 110 kB from scikit-learn's sample photographs, and
reads the files and prepared shards of two sizes.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Iterator
from typing import Any

from hybrid_imagenet import data
from hybrid_imagenet.benchmarks import _photographs
from hybrid_imagenet.comm.quiet import import_tensorflow
from hybrid_imagenet.data.augmentations import AUGMENTATIONS
from hybrid_imagenet.errors import EXIT_OK, UserError, without_secrets
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.command_line import positive_int

_WARM_UP = 3  # batches


def main(argv: list[str]) -> int:
    """Runs the benchmark; prints a table and writes --json."""
    arguments = parser().parse_args(argv)
    write(arguments, list(measure_all(arguments)))
    return EXIT_OK


def write(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Writes rows, the machine and the options to --json, if that is given."""
    machine = {
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "load_average": os.getloadavg()[0],
    }
    options = vars(arguments) | {"data_dir": without_secrets(arguments.data_dir or "")}
    command_line.write_json(arguments.json, {**options, "machine": machine, "rows": rows})


def parser() -> argparse.ArgumentParser:
    """The options of the benchmark."""
    found = command_line.Parser("bench input", (__doc__ or "").split("\n")[0])
    found.add_argument("--source", help="dataset, as in training (default: generated photographs)")
    found.add_argument("--data_dir", help="where the source lies")
    found.add_argument("--data_cache_dir", help="for copies of the files of a URL")
    found.add_argument(
        "--augmentation", default="inception", choices=AUGMENTATIONS, help="(%(default)s)"
    )
    found.add_argument("--image_size", type=positive_int, default=224, help="pixels (%(default)s)")
    found.add_argument("--batch", type=positive_int, default=64, help="images (%(default)s)")
    found.add_argument(
        "--threads",
        type=positive_int,
        default=os.cpu_count() or 1,
        help="decoding threads (%(default)s)",
    )
    found.add_argument(
        "--seconds",
        type=command_line.positive_float,
        default=10,
        help="length of each measurement (%(default)s)",
    )
    found.add_argument("--json", help="file for the results")
    return found


def measure_all(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measures this package's pipelines; prints and yields a row for each."""
    print(
        f"{'':34}{'images/s':>10}{'per core':>10}{'CPU ms':>8}{'MB/s':>8}{'reads/s':>9}{'wait':>7}"
    )
    if arguments.source:
        yield shown(_ours(arguments.source, arguments.source, arguments.data_dir, arguments))
        return
    photographs = _photographs.photograph_folder()
    reduced = _photographs.photograph_shards(256)
    yield shown(_ours("files", "folder", str(photographs), arguments))
    yield shown(_ours("shards", "tfrecord", str(_photographs.photograph_shards(None)), arguments))
    yield shown(_ours("shards, shorter side 256", "tfrecord", str(reduced), arguments))
    yield shown(
        _ours(
            "shards, --decoder=dali",
            "tfrecord",
            str(_photographs.photograph_shards(None)),
            arguments,
            "dali",
        )
    )


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Prints a row of the table, and returns it."""
    if "error" in row:
        print(f"{row['name']:34}{row['error']}", flush=True)
        return row
    optional = [
        f"{row.get(key, float('nan')) * scale:.{digits}f}" for key, scale, digits in _OPTIONAL
    ]
    print(
        f"{row['name']:34}{row['images_per_second']:10.0f}{row['images_per_second_per_core']:10.0f}"
        f"{row['cpu_ms_per_image']:8.2f}{optional[0]:>8}{optional[1]:>9}{optional[2]:>6}%",
        flush=True,
    )
    return row


_OPTIONAL = (("bytes_per_second", 1e-6, 1), ("operations_per_second", 1, 0), ("wait_share", 100, 1))


def _ours(
    title: str,
    name: str,
    data_dir: str | None,
    arguments: argparse.Namespace,
    decoder: str = "tensorflow",
) -> dict[str, Any]:
    """Measures this package's pipeline at full speed, then under a trainer that takes 80 % of
    that.
    """
    if decoder == "dali":
        from hybrid_imagenet.data import dali

        try:
            dali.check_installation(None)
        except UserError as error:
            return {"name": title, "error": f"did not run: {error}"}
    source = data.open_source(name, data_dir, cache_dir=arguments.data_cache_dir)
    _, elements = _endless(source, arguments, decoder)
    before = source.reads.bytes_read, source.reads.operations
    cpu, start = time.process_time(), time.perf_counter()
    images = 0
    while (seconds := time.perf_counter() - start) < arguments.seconds:
        next(elements)
        images += arguments.batch
    row = row_of(title, images, seconds, time.process_time() - cpu, arguments.threads)
    return row | {
        "bytes_per_second": (source.reads.bytes_read - before[0]) / seconds,
        "operations_per_second": (source.reads.operations - before[1]) / seconds,
        "wait_share": _wait_share(source, arguments, decoder, 0.8 * images / seconds),
    }


def _endless(source: data.Source, arguments: argparse.Namespace, decoder: str) -> Any:
    import_tensorflow()
    from hybrid_imagenet.data import datasets, pipeline
    from hybrid_imagenet.order.sampling import Cursor

    batches = pipeline.training_batches(
        source,
        pipeline.example_order(
            source,
            (arguments.data_cache_dir and datasets.source_type(arguments.source).url_shuffle_window)
            or 0,
        ),
        Cursor(),
        (arguments.batch, 1),
        epochs=1000,
        image_size=arguments.image_size,
        augmentation=arguments.augmentation,
        options=pipeline.HostOptions(threads=arguments.threads, decoder=decoder),
    )
    elements = iter(batches)
    for _ in range(_WARM_UP):
        next(elements)
    return batches, elements


def _wait_share(
    source: data.Source, arguments: argparse.Namespace, decoder: str, rate: float
) -> float:
    """The share of time that a trainer waits which computes `rate` images per second, on a device
    of its own.
    """
    batches, elements = _endless(source, arguments, decoder)
    waited, start = batches.wait_seconds, time.perf_counter()
    while time.perf_counter() - start < arguments.seconds / 2:
        next(elements)
        time.sleep(arguments.batch / rate)
    return (batches.wait_seconds - waited) / (time.perf_counter() - start)


def row_of(name: str, images: int, seconds: float, cpu: float, threads: int) -> dict[str, Any]:
    """The figures of one pipeline."""
    cores = min(threads, os.cpu_count() or 1)
    return {
        "name": name,
        "images_per_second": images / seconds,
        "images_per_second_per_core": images / seconds / cores,
        "cpu_ms_per_image": 1000 * cpu / images,
    }
