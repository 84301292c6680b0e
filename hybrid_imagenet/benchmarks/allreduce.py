"""Measures time and bus bandwidth of the all-reduce algorithms by size, beside MPI_Allreduce of the
same bytes.

    hybrid-imagenet run -np 2 --module=hybrid_imagenet.benchmarks -- allreduce --sizes=1M,64M
    --algorithms=ring,torus

A size is the size of a gradient in FP32. With a compression, the time includes the casts from FP32
and back, and fewer bytes travel. As in nccl-tests, bandwidth counts the bytes that travel: busbw =
bytes / time * 2 (p - 1) / p for p ranks, which is what each link carries in the best case. Times
are medians, on the slowest rank; at each size the candidates take turns, so that what else the
machine does strikes all alike. The best time tells what is left of it. On GPU hosts training leaves
a torus with one row for each host to Horovod, which `bench scaling` times.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import time
import typing
from collections.abc import Callable, Mapping, Sequence

from hybrid_imagenet import comm
from hybrid_imagenet.comm import cost_model
from hybrid_imagenet.comm.settings import ALGORITHMS, COMPRESSIONS, ENGINES
from hybrid_imagenet.errors import UserError, import_optional, pluralize
from hybrid_imagenet.tools import command_line

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator
    from hybrid_imagenet.comm.connected import ConnectedRanks

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
Run = Callable[[], object]
Key = tuple[str, str, str]  # engine, algorithm, compression


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; rank 0 prints the table and writes the JSON."""
    options = _parse(argv)
    engines = _start(options)
    communicator = next(iter(engines.values()))
    if communicator.size == 1:
        raise UserError(
            "allreduce needs at least two ranks: start it as hybrid-imagenet run -np 2 "
            "--module=hybrid_imagenet.benchmarks -- allreduce"
        )
    rows = measure(engines, options)
    if communicator.rank == 0:
        print(table(rows, communicator))
        command_line.write_json(options.json, rows)
    for ranks in engines.values():
        ranks.shutdown()
    return 0


def _start(options: argparse.Namespace) -> dict[str, ConnectedRanks]:
    """Connects the ranks by each engine; TensorFlow's first, since it must know them before it does
    anything else.
    """
    started = {}
    for engine in sorted(options.engines, key=lambda name: name != "tensorflow"):
        reductions = [
            _settings(options, name, "none") for name in options.algorithms if name != "mpi"
        ]
        started[engine] = typing.cast(
            "ConnectedRanks",
            comm.start(comm.CommunicationSettings(engine=engine), others=reductions),
        )
    return started


def measure(
    engines: Mapping[str, ConnectedRanks], options: argparse.Namespace
) -> list[dict[str, object]]:
    """A row for each engine, algorithm, compression and size.

    Raises:
      UserError: if an algorithm does not fit the ranks.
    """
    rows = []
    communicator = next(iter(engines.values()))
    for size in options.sizes:
        runs: dict[Key, tuple[Run, int]] = {}
        for algorithm in options.algorithms:
            for compression in options.compression:
                if algorithm == "mpi":
                    if compression == options.compression[0]:
                        runs["", "mpi", "none"] = _plain_mpi(size), size
                elif compression != "bf16" or algorithm == "ring":
                    for engine, ranks in engines.items():
                        runs[engine, algorithm, compression] = _ours(
                            ranks, options, algorithm, compression, size
                        )
        seconds = _medians(
            communicator, {key: run for key, (run, _) in runs.items()}, options.seconds
        )
        for (engine, algorithm, compression), (_, wire_bytes) in runs.items():
            median, best = seconds[engine, algorithm, compression]
            row = _row(communicator.size, algorithm, compression, size, wire_bytes, median)
            rows.append({"engine": engine} | row | {"best_seconds": best})
    return rows


def _row(
    ranks: int, algorithm: str, compression: str, size: int, wire_bytes: int, t: float
) -> dict[str, object]:
    return {
        "algorithm": algorithm,
        "compression": compression,
        "bytes": size,
        "wire_bytes": wire_bytes,
        "ranks": ranks,
        "seconds": t,
        "algbw_gb_s": wire_bytes / t / 1e9,
        "busbw_gb_s": cost_model.bus_bandwidth(wire_bytes, t, ranks) / 1e9,
    }


def _settings(
    options: argparse.Namespace, algorithm: str, compression: str
) -> comm.CommunicationSettings:
    own = dataclasses.asdict(ALGORITHMS[algorithm].options())
    own |= {name: options.torus_grid for name in own if name == "torus_grid"}
    return comm.CommunicationSettings(allreduce=algorithm, compression=compression, options=own)


def _ours(
    communicator: ConnectedRanks,
    options: argparse.Namespace,
    algorithm: str,
    compression: str,
    size: int,
) -> tuple[Run, int]:
    """A function that reduces `size` bytes of FP32, and the bytes that travel."""
    import tensorflow as tf

    from hybrid_imagenet.comm.communicator import pack_for_allreduce
    from hybrid_imagenet.comm.fusion import WIRE_BYTES, Bucket

    settings = _settings(options, algorithm, compression)
    wire = settings.wire_dtype
    elements = size // 4
    wire_bytes = elements * WIRE_BYTES[wire]
    chosen = communicator.make_selector(settings).algorithm_for(Bucket((0,), wire, wire_bytes))

    @tf.function(autograph=False)
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        return chosen.allreduce(
            pack_for_allreduce([tensor], 1, wire), f"benchmark_{algorithm}_{wire}_{size}"
        )[0]

    tensor = tf.ones([elements])
    traced = reduce.get_concrete_function(tensor)
    return lambda: traced(tensor).numpy(), wire_bytes


def _plain_mpi(size: int) -> Run:
    """MPI_Allreduce of `size` bytes of FP32 between buffers that are made once."""
    import numpy as np

    mpi = import_optional(
        "mpi4py.MPI", "--algorithms=mpi needs mpi4py: install it, or leave mpi out of --algorithms"
    )
    sent = np.ones(max(size // 4, 1), np.float32)
    received = np.empty_like(sent)
    return lambda: mpi.COMM_WORLD.Allreduce(sent, received, mpi.SUM)


def _medians(
    communicator: Communicator, runs: dict[Key, Run], budget: float
) -> dict[Key, tuple[float, float]]:
    """Median and least seconds of each function, on the slowest rank; two calls of each do not
    count.
    """
    samples: dict[Key, list[float]] = {key: [] for key in runs}
    repeats, done = 5, -2
    while done < repeats:
        round_start = time.perf_counter()
        for key, run in runs.items():
            communicator.barrier()
            start = time.perf_counter()
            run()
            samples[key].append(time.perf_counter() - start)
        if done == -1:
            affordable = budget / (time.perf_counter() - round_start)
            repeats = communicator.broadcast_object(int(min(max(affordable, 5), 200)))
        done += 1
    mine = [[statistics.median(samples[key][2:]), min(samples[key][2:])] for key in runs]
    everyone = communicator.allgather_object(mine)
    return {
        key: tuple(max(rank[i][j] for rank in everyone) for j in range(2))
        for i, key in enumerate(runs)
    }


def table(rows: Sequence[dict[str, typing.Any]], communicator: Communicator) -> str:
    """The rows as text."""
    head = ("bytes", "engine", "algorithm", "wire", "ms", "best ms", "algbw GB/s", "busbw GB/s")
    widths = (12, 10, 13, 5, 10, 10, 11, 11)
    cells = [
        (
            row["bytes"],
            row["engine"],
            row["algorithm"],
            row["compression"],
            *(f"{x:.3f}" for x in (1000 * row["seconds"], 1000 * row["best_seconds"])),
            *(f"{row[key]:.3f}" for key in ("algbw_gb_s", "busbw_gb_s")),
        )
        for row in rows
    ]
    hosts = len(set(communicator.hosts))
    lines = [f"{pluralize(communicator.size, 'rank')} on {pluralize(hosts, 'host')}"]
    lines += [
        " ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True))
        for line in (head, *cells)
    ]
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("bench allreduce", (__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--sizes", default="4K,64K,1M,16M,64M", help="bytes of FP32 gradients, with K, M or G"
    )
    parser.add_argument("--algorithms", default="mpi,ring", help=f"of mpi, {', '.join(ALGORITHMS)}")
    parser.add_argument("--compression", default="none,fp16", help=f"of {', '.join(COMPRESSIONS)}")
    parser.add_argument(
        "--engines", default="horovod", help=f"of {', '.join(ENGINES)}, which take turns"
    )
    parser.add_argument("--torus_grid", help="rows x columns, VxH")
    parser.add_argument("--seconds", type=float, default=5.0, help="time to spend on each size")
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args(argv)
    options.sizes = [parse_size(text) for text in options.sizes.split(",") if text]
    lists = (
        ("algorithms", ("mpi", *ALGORITHMS)),
        ("compression", COMPRESSIONS),
        ("engines", ENGINES),
    )
    for name, known in lists:
        given = [text.strip() for text in getattr(options, name).split(",") if text.strip()]
        for text in given:
            if text not in known:
                raise UserError(f"--{name}={text}: choose from {', '.join(known)}")
        setattr(options, name, given)
    if not (options.sizes and options.algorithms and options.compression and options.engines):
        raise UserError(
            "--sizes, --algorithms, --compression and --engines each need at least one value"
        )
    return options


def parse_size(text: str) -> int:
    """Bytes of a size such as 64K, 1M, 64MB or 4096; K, M and G are powers of 1024.

    Raises:
      UserError: for anything else, or less than 4 bytes.
    """
    match = re.fullmatch(r"(\d+)\s*([kmg]?)i?b?", text.strip().lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < 4:
        raise UserError(f"--sizes={text}: give bytes as in 64K, 1M or 4096, at least 4")
    return size
