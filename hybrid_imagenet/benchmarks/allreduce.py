r"""Measures time and bus bandwidth of the all-reduce algorithms by size.

    hybrid-imagenet run -np 2 --module=hybrid_imagenet.benchmarks -- allreduce --sizes=1M,64M \
        --algorithms=ring,torus

MPI_Allreduce of the same bytes is measured for comparison. A size is the size of a gradient in
FP32. With a compression, the time includes the casts from FP32 and back, and fewer bytes are sent.
As in nccl-tests, bandwidth counts the bytes that are sent: busbw = bytes / time * 2 (p - 1) / p for
p ranks. In the best case each link has this bandwidth.

Times are medians, on the slowest rank. At each size the candidates take turns, so that other
activity on the machine affects all of them in the same way. The best time shows how fast a
candidate is without such activity. On GPU hosts, training lets Horovod run a torus with one row for
each host, which `bench scaling` times.
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
from hybrid_imagenet.comm.settings import ALGORITHMS, ENGINES, WIRE_DTYPES, GridOptions
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.commands.command_line import parse_names
from hybrid_imagenet.errors import UserError, import_optional, pluralize

if typing.TYPE_CHECKING:
    from hybrid_imagenet.comm.communicator import Communicator
    from hybrid_imagenet.comm.connected import ConnectedRanks

_EPILOG = """\
Examples:
Compare two algorithms on four ranks:
  hybrid-imagenet run -np 4 --module=hybrid_imagenet.benchmarks -- allreduce \\
      --algorithms=ring,torus
Measure two sizes without compression:
  hybrid-imagenet run -np 2 --module=hybrid_imagenet.benchmarks -- allreduce \\
      --sizes=1M,64M --compression=none"""

_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
# A size is at least one value in FP32.
_MIN_BYTES = 4
# The first calls of each candidate do not count. The last of them shows how many calls fit into
# --seconds.
_WARMUP_REPEATS = 2
_MIN_REPEATS = 5
_MAX_REPEATS = 200
AllReduceCall = Callable[[], object]
# Engine, algorithm and compression.
Candidate = tuple[str, str, str]


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; rank 0 prints the table and writes the JSON."""
    options = _parse(argv)
    engines = _start(options)
    communicator = next(iter(engines.values()))
    if communicator.size == 1:
        raise UserError(
            "allreduce needs at least two ranks. Start it as hybrid-imagenet run -np 2 "
            "--module=hybrid_imagenet.benchmarks -- allreduce"
        )
    rows = measure(engines, options)
    if communicator.rank == 0:
        print(format_table(rows, communicator))
        command_line.write_json(options.json, rows)
    for engine_communicator in engines.values():
        engine_communicator.shutdown()
    return 0


def _start(options: argparse.Namespace) -> dict[str, ConnectedRanks]:
    """Connects the ranks with each engine.

    TensorFlow's engine is the first, because TensorFlow must know the ranks before it does anything
    else.
    """
    communicators = {}
    for engine in sorted(options.engines, key=lambda name: name != "tensorflow"):
        reductions = [_settings(options, name) for name in options.algorithms if name != "mpi"]
        communicators[engine] = typing.cast(
            "ConnectedRanks",
            comm.start(comm.CommunicationSettings(engine=engine), additional_settings=reductions),
        )
    return communicators


def measure(
    engines: Mapping[str, ConnectedRanks], options: argparse.Namespace
) -> list[dict[str, object]]:
    """Measures each engine, algorithm, compression and size.

    Args:
      engines: The communicator of each engine.
      options: The parsed options of the benchmark.

    Returns:
      The rows of the table.

    Raises:
      UserError: If an algorithm does not support this number of ranks.
    """
    rows = []
    communicator = next(iter(engines.values()))
    for size in options.sizes:
        calls, wire_bytes = _candidates(engines, options, size)
        seconds = _measure_calls(communicator, calls, options.seconds)
        for candidate in calls:
            engine, algorithm, compression = candidate
            median, best = seconds[candidate]
            row = _row(
                communicator.size, algorithm, compression, size, wire_bytes[candidate], median
            )
            rows.append({"engine": engine} | row | {"best_seconds": best})
    return rows


def _candidates(
    engines: Mapping[str, ConnectedRanks], options: argparse.Namespace, size: int
) -> tuple[dict[Candidate, AllReduceCall], dict[Candidate, int]]:
    """Returns the function that each candidate calls, and the bytes that it sends.

    MPI is measured once, without compression. BF16 is only measured with the ring.
    """
    calls: dict[Candidate, AllReduceCall] = {}
    wire_bytes: dict[Candidate, int] = {}
    for algorithm in options.algorithms:
        if algorithm == "mpi":
            candidate = ("", "mpi", "none")
            calls[candidate] = _mpi_call(size)
            wire_bytes[candidate] = size
            continue
        for compression in options.compression:
            if compression == "bf16" and algorithm != "ring":
                continue
            for engine, communicator in engines.items():
                candidate = (engine, algorithm, compression)
                calls[candidate], wire_bytes[candidate] = _algorithm_call(
                    communicator, options, algorithm, compression, size
                )
    return calls, wire_bytes


def _row(
    ranks: int, algorithm: str, compression: str, size: int, wire_bytes: int, seconds: float
) -> dict[str, object]:
    algorithm_bandwidth = wire_bytes / seconds
    # As nccl-tests define it: the load of each link of a ring.
    bus_bandwidth = algorithm_bandwidth * 2 * (ranks - 1) / ranks
    return {
        "algorithm": algorithm,
        "compression": compression,
        "bytes": size,
        "wire_bytes": wire_bytes,
        "ranks": ranks,
        "seconds": seconds,
        "algbw_gb_s": algorithm_bandwidth / 1e9,
        "busbw_gb_s": bus_bandwidth / 1e9,
    }


def _settings(options: argparse.Namespace, algorithm: str) -> comm.CommunicationSettings:
    algorithm_options = ALGORITHMS[algorithm].options()
    if isinstance(algorithm_options, GridOptions):
        algorithm_options = dataclasses.replace(algorithm_options, torus_grid=options.torus_grid)
    return comm.CommunicationSettings(allreduce=algorithm, options=algorithm_options)


def _algorithm_call(
    communicator: ConnectedRanks,
    options: argparse.Namespace,
    algorithm: str,
    compression: str,
    size: int,
) -> tuple[AllReduceCall, int]:
    """Returns a function that reduces `size` bytes of FP32, and the bytes that it sends."""
    import tensorflow as tf

    from hybrid_imagenet.comm.fusion import WIRE_BYTES, Bucket
    from hybrid_imagenet.optimizers.reducer import pack_for_allreduce

    wire_dtype = WIRE_DTYPES[compression]
    elements = size // 4
    wire_bytes = elements * WIRE_BYTES[wire_dtype]
    bucket = Bucket((0,), wire_dtype, wire_bytes)
    selected = communicator.make_selector(_settings(options, algorithm)).algorithm_for(bucket)

    @tf.function(autograph=False)
    def reduce(tensor: tf.Tensor) -> tf.Tensor:
        packed = pack_for_allreduce([tensor], 1, wire_dtype)
        return selected.allreduce(packed, f"benchmark_{algorithm}_{wire_dtype}_{size}")[0]

    tensor = tf.ones([elements])
    traced = reduce.get_concrete_function(tensor)
    return lambda: traced(tensor).numpy(), wire_bytes


def _mpi_call(size: int) -> AllReduceCall:
    """Returns a function that calls MPI_Allreduce on `size` bytes of FP32, in fixed buffers."""
    import numpy as np

    mpi = import_optional(
        "mpi4py.MPI", "--algorithms=mpi needs mpi4py. Install it, or remove mpi from --algorithms."
    )
    sent = np.ones(max(size // 4, 1), np.float32)
    received = np.empty_like(sent)
    return lambda: mpi.COMM_WORLD.Allreduce(sent, received, mpi.SUM)


def _measure_calls(
    communicator: Communicator, calls: Mapping[Candidate, AllReduceCall], budget_seconds: float
) -> dict[Candidate, tuple[float, float]]:
    """Times the candidates in turns.

    Args:
      communicator: Communicator of all ranks; every rank calls this.
      calls: The function of each candidate.
      budget_seconds: Time for all calls. Each function is called at least 5 times.

    Returns:
      Median and minimum seconds of each candidate, on the slowest rank.
    """
    samples: dict[Candidate, list[float]] = {candidate: [] for candidate in calls}
    repeats = _MIN_REPEATS
    repeat = -_WARMUP_REPEATS
    while repeat < repeats:
        round_start = time.perf_counter()
        for candidate, call in calls.items():
            communicator.barrier()
            start = time.perf_counter()
            call()
            samples[candidate].append(time.perf_counter() - start)
        is_last_warmup = repeat == -1
        if is_last_warmup:
            affordable = budget_seconds / (time.perf_counter() - round_start)
            repeats = int(min(max(affordable, _MIN_REPEATS), _MAX_REPEATS))
            # All ranks must make the same number of calls.
            repeats = communicator.broadcast_object(repeats)
        repeat += 1
    counted_samples = [samples[candidate][_WARMUP_REPEATS:] for candidate in calls]
    local = [[statistics.median(seconds), min(seconds)] for seconds in counted_samples]
    by_rank = communicator.allgather_object(local)
    results = {}
    for index, candidate in enumerate(calls):
        median = max(rank[index][0] for rank in by_rank)
        best = max(rank[index][1] for rank in by_rank)
        results[candidate] = (median, best)
    return results


def format_table(rows: Sequence[dict[str, typing.Any]], communicator: Communicator) -> str:
    """Formats the rows as a table."""
    columns = ("bytes", "engine", "algorithm", "wire", "ms", "best ms", "algbw GB/s", "busbw GB/s")
    widths = (12, 10, 13, 5, 10, 10, 11, 11)
    cells = [
        (
            row["bytes"],
            row["engine"],
            row["algorithm"],
            row["compression"],
            f"{1000 * row['seconds']:.3f}",
            f"{1000 * row['best_seconds']:.3f}",
            f"{row['algbw_gb_s']:.3f}",
            f"{row['busbw_gb_s']:.3f}",
        )
        for row in rows
    ]
    hosts = len(set(communicator.hosts))
    lines = [f"{pluralize(communicator.size, 'rank')} on {pluralize(hosts, 'host')}"]
    for line in (columns, *cells):
        padded = [f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)]
        lines.append(" ".join(padded))
    return "\n".join(lines)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("bench allreduce", (__doc__ or "").split("\n")[0], epilog=_EPILOG)
    parser.add_argument(
        "--sizes",
        default="4K,64K,1M,16M,64M",
        metavar="BYTES,...",
        help="bytes of FP32 gradients, with K, M or G (default: %(default)s)",
    )
    parser.add_argument(
        "--algorithms",
        default="mpi,ring",
        metavar="NAME,...",
        help=f"algorithms, out of mpi, {', '.join(ALGORITHMS)} (default: %(default)s)",
    )
    parser.add_argument(
        "--compression",
        default="none,fp16",
        metavar="NAME,...",
        help=f"compressions, out of {', '.join(WIRE_DTYPES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--engines",
        default="horovod",
        metavar="NAME,...",
        help=(f"engines, which take turns, out of {', '.join(ENGINES)} (default: %(default)s)"),
    )
    parser.add_argument(
        "--torus_grid", metavar="VxH", help="rows x columns of the torus (default: chosen)"
    )
    parser.add_argument(
        "--seconds",
        type=command_line.positive_float,
        default=5.0,
        help="seconds to spend on each size (default: %(default)g)",
    )
    command_line.add_json_argument(parser)
    options = parser.parse_args(argv)
    options.sizes = [parse_size(text) for text in options.sizes.split(",") if text]
    options.algorithms = parse_names("--algorithms", options.algorithms, ("mpi", *ALGORITHMS))
    options.compression = parse_names("--compression", options.compression, WIRE_DTYPES)
    options.engines = parse_names("--engines", options.engines, ENGINES)
    if not (options.sizes and options.algorithms and options.compression and options.engines):
        raise UserError(
            "--sizes, --algorithms, --compression and --engines each need at least one value."
        )
    return options


def parse_size(text: str) -> int:
    """Parses a size in bytes such as 64K, 1M, 64MB or 4096; K, M and G are powers of 1024.

    Raises:
      UserError: If it is not a size, or less than 4 bytes.
    """
    match = re.fullmatch(r"(\d+)\s*([kmg]?)i?b?", text.strip().lower())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < _MIN_BYTES:
        raise UserError(
            f"--sizes={text} is not valid. Use at least {_MIN_BYTES} bytes, as in 64K, 1M or 4096."
        )
    return size
