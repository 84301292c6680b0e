"""Measures input: images per second and core, CPU per image, bytes and operations read, and the wait of a trainer.

    hybrid-imagenet bench input --json=input.json
    hybrid-imagenet bench input --source=tfrecord --data_dir=/data/shards

Without --source it makes 500x375 JPEGs of about 110 kB from scikit-learn's sample photographs, and reads the files and
prepared shards of two sizes. From a checkout, `python -m benchmarks input` also runs other libraries' pipelines, each
in a process of its own, on the same files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrid_imagenet import data
from hybrid_imagenet.benchmarks import _photographs
from hybrid_imagenet.comm.quiet import import_tensorflow
from hybrid_imagenet.errors import EXIT_OK, UserError
from hybrid_imagenet.tools import command_line

_WARM_UP = 3  # batches


def main(argv: list[str], peers: Mapping[str, Path] | None = None) -> int:
    """Runs the benchmark; prints a table and writes --json.

    Args:
      argv: the command line.
      peers: the scripts of other libraries' pipelines, by name.
    """
    arguments = _parse(argv, peers or {})
    rows = list(_measure_all(arguments, peers or {}))
    if arguments.json:
        report = {"machine": _machine(), "threads": arguments.threads, "batch": arguments.batch, "rows": rows}
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")
    return EXIT_OK


def _parse(argv: list[str], peers: Mapping[str, Path]) -> argparse.Namespace:
    parser = command_line.Parser("bench input", (__doc__ or "").split("\n")[0])
    parser.add_argument("--source", help="a data set as --dataset takes it; default: made photographs")
    parser.add_argument("--data_dir", help="where the source lies")
    parser.add_argument("--data_cache_dir", help="for copies of the files of a URL")
    parser.add_argument("--augmentation", default="inception", help="(%(default)s)")
    parser.add_argument("--image_size", type=int, default=224, help="pixels (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="images (%(default)s)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="decoding threads (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10, help="length of each measurement (%(default)s)")
    parser.set_defaults(peers="", dali_python=sys.executable)
    if peers:
        parser.add_argument("--peers", default=",".join(peers), help="other libraries to run, from %(default)s")
        parser.add_argument("--dali_python", help="a Python that has nvidia-dali (default: this one)")
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args(argv)


def _measure_all(arguments: argparse.Namespace, peers: Mapping[str, Path]) -> Iterator[dict[str, Any]]:
    print(f"{'':34}{'images/s':>10}{'per core':>10}{'CPU ms':>8}{'MB/s':>8}{'reads/s':>9}{'wait':>7}")
    if arguments.source:
        yield _shown(_ours(arguments.source, arguments.source, arguments.data_dir, arguments))
        return
    photographs = _photographs.folder()
    reduced = _photographs.prepared(256)
    yield _shown(_ours("files", "folder", str(photographs), arguments))
    yield _shown(_ours("shards", "tfrecord", str(_photographs.prepared(None)), arguments))
    yield _shown(_ours("shards, shorter side 256", "tfrecord", str(reduced), arguments))
    yield _shown(_ours("shards, --decoder=dali", "tfrecord", str(_photographs.prepared(None)), arguments, "dali"))
    for peer in filter(None, arguments.peers.split(",")):
        if peer not in peers:
            raise UserError(f"--peers={peer}: choose from {','.join(peers)}")
        yield _shown(_peer(peer, peers[peer], photographs, arguments))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    if "error" in row:
        print(f"{row['name']:34}{row['error']}", flush=True)
        return row
    optional = [f"{row.get(key, float('nan')) * scale:.{digits}f}" for key, scale, digits in _OPTIONAL]
    print(
        f"{row['name']:34}{row['images_per_second']:10.0f}{row['images_per_second_per_core']:10.0f}"
        f"{row['cpu_ms_per_image']:8.2f}{optional[0]:>8}{optional[1]:>9}{optional[2]:>6}%",
        flush=True,
    )
    return row


_OPTIONAL = (("bytes_per_second", 1e-6, 1), ("operations_per_second", 1, 0), ("wait_share", 100, 1))


def _ours(
    title: str, name: str, data_dir: str | None, arguments: argparse.Namespace, decoder: str = "tensorflow"
) -> dict[str, Any]:
    """Measures this package's pipeline at full speed, then under a trainer that takes 80 % of that."""
    if decoder == "dali":
        from hybrid_imagenet.data import dali

        try:
            dali.check(None)
        except UserError as error:
            return {"name": f"hybrid_imagenet: {title}", "error": f"did not run: {error}"}
    source = data.open_source(name, data_dir, cache_dir=arguments.data_cache_dir)
    batches = _endless(source, arguments, decoder)
    elements = iter(batches)
    for _ in range(_WARM_UP):
        next(elements)
    before, cpu, start = source.io_statistics(), time.process_time(), time.perf_counter()
    images = 0
    while (seconds := time.perf_counter() - start) < arguments.seconds:
        next(elements)
        images += arguments.batch
    read = source.io_statistics().since(before)
    row = _row(f"hybrid_imagenet: {title}", images, seconds, time.process_time() - cpu, arguments.threads)
    return row | {
        "bytes_per_second": read.bytes_read / seconds,
        "operations_per_second": read.operations / seconds,
        "wait_share": _wait_share(source, arguments, decoder, 0.8 * images / seconds),
    }


def _endless(source: data.Source, arguments: argparse.Namespace, decoder: str) -> Any:
    import_tensorflow()
    from hybrid_imagenet.data import pipeline, registry
    from hybrid_imagenet.numerics.sampling import Cursor

    return pipeline.training(
        source,
        pipeline.order_of(source, (arguments.data_cache_dir and registry.of(arguments.source).url_window) or 0),
        Cursor(),
        (arguments.batch, 1),
        epochs=1000,
        image_size=arguments.image_size,
        augmentation=arguments.augmentation,
        options=pipeline.HostOptions(threads=arguments.threads, decoder=decoder),
    )


def _wait_share(source: data.Source, arguments: argparse.Namespace, decoder: str, rate: float) -> float:
    """The share of time that a trainer waits which computes `rate` images per second, on a device of its own."""
    batches = _endless(source, arguments, decoder)
    elements = iter(batches)
    for _ in range(_WARM_UP):
        next(elements)
    waited, start = batches.wait_seconds, time.perf_counter()
    while time.perf_counter() - start < arguments.seconds / 2:
        next(elements)
        time.sleep(arguments.batch / rate)
    return (batches.wait_seconds - waited) / (time.perf_counter() - start)


def _row(name: str, images: int, seconds: float, cpu: float, threads: int) -> dict[str, Any]:
    cores = min(threads, os.cpu_count() or 1)
    return {
        "name": name,
        "images_per_second": images / seconds,
        "images_per_second_per_core": images / seconds / cores,
        "cpu_ms_per_image": 1000 * cpu / images,
    }


def _peer(name: str, script: Path, photographs: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs one peer's script, which prints {"images", "seconds", "cpu_seconds"} as its last line."""
    python = arguments.dali_python if name == "dali" else sys.executable
    shard_directory = str(_photographs.prepared(None))
    values = [photographs / "train", shard_directory, arguments.batch, arguments.threads, arguments.seconds]
    command = [python, str(script), *map(str, values), str(arguments.image_size)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return {"name": name, "error": f"did not run: {reason[:150]}"}
    result = json.loads(done.stdout.strip().splitlines()[-1])
    return _row(name, result["images"], result["seconds"], result["cpu_seconds"], arguments.threads)


def _machine() -> dict[str, Any]:
    return {"cores": os.cpu_count(), "platform": platform.platform(), "load_average": os.getloadavg()[0]}
