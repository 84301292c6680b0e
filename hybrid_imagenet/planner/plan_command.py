"""Implements `hybrid-imagenet plan`, which predicts training times on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybrid_imagenet.analysis import published
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.config.help import entries, filled, width
from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.options import SPELLING
from hybrid_imagenet.planner import planner_flags
from hybrid_imagenet.planner.clusters import ClusterModel
from hybrid_imagenet.planner.cost_model import COSTS, Link, Topology
from hybrid_imagenet.planner.planner_flags import PlannerFlags, SingleGpuSpeed
from hybrid_imagenet.planner.prediction import (
    MIB,
    MIN_GAIN_OVER_RING,
    ExchangeStrategy,
    Prediction,
    TrainingJob,
    exchange_strategies,
    fastest,
    is_composed,
    recommend,
)
from hybrid_imagenet.runlog.summary import format_duration

_DESCRIPTION = (
    "Predicts step time, scaling efficiency and training time on a cluster, and recommends how to"
    " exchange gradients. Use it before you buy, rent or reserve GPUs."
)
_EXAMPLES = """\
Examples:
  hybrid-imagenet plan --cluster=h100 --hosts=4
  hybrid-imagenet plan --cluster=a100 --link=25gbit --images_per_second=2700 --per_gpu_batch=256
"""
_FOOTNOTES = (
    "*: the planned size. comm: all communication of a step; exposed: the part that backpropagation"
    " does not hide.",
    "eff.: speed of a GPU here, relative to its speed alone. exchange: all-reduce algorithm and"
    " bucket size.",
    "to 75.9 %: epochs of MLPerf's reference at the batch; a dash if it has none.",
)
_COMPOSED_NOTE = (
    "Horovod composes it of operations on several sets of ranks, which it negotiates again at each"
    " step. The prediction does not include that cost. Measure it with hybrid-imagenet bench"
    " allreduce."
)
# ILSVRC2012_img_train.tar has 147,897,477,120 bytes for 1,281,167 images.
_JPEG_BYTES_PER_IMAGE = 115e3
# A request for another strategy than the recommended one is only mentioned if it costs this much.
_MIN_MENTIONED_SLOWDOWN_PERCENT = 0.1


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the planner."""
    if {"-h", "--help"} & set(arguments):
        columns = width()
        description = filled(_DESCRIPTION, columns)
        print("usage: hybrid-imagenet plan [--name=value ...]\n")
        print("\n".join([description, "", _EXAMPLES, "options:", *entries(PlannerFlags), ""]))
        print(filled(SPELLING, columns))
        return
    print("\n".join(plan_lines(planner_flags.parse(arguments))))


def plan_lines(flags: PlannerFlags) -> list[str]:
    """Returns the plan as lines of text.

    It has the speed of one GPU, a table by number of GPUs, and the recommended exchange.

    Raises:
      UserError: If flags contradict each other, or no speed is known.
    """
    cluster, gpu_speed, job = planner_flags.resolve(flags)
    rows = _predictions(flags, cluster, job)
    planned_gpus = cluster.hosts * cluster.local_size
    planned_row = next(row for row in rows if row.gpus == planned_gpus)

    lines = [_title(flags, cluster, gpu_speed)]
    if gpu_speed.note:
        lines.append(gpu_speed.note)
    lines += _notes_on_algorithm(flags, cluster, rows)
    lines.append("")
    lines += _table(rows, planned_row, flags.epochs)
    lines += ["", *_FOOTNOTES]
    if planned_gpus > 1:
        lines.append("")
        lines += _recommendation(job, cluster.topology(cluster.hosts), planned_row)
    host_images_per_second = planned_row.images_per_second / cluster.hosts
    lines.append(_input_line(host_images_per_second, planned_gpus // cluster.hosts))
    if not any(row.target_seconds for row in rows):
        lines.append("no reference convergence is known for these batches")
    return lines


def _predictions(flags: PlannerFlags, cluster: ClusterModel, job: TrainingJob) -> list[Prediction]:
    """Predicts the job on increasing numbers of hosts, among them the planned number."""
    # With more GPUs, a step would take more images than an epoch has.
    max_gpus_by_epoch = job.images_per_epoch // job.per_gpu_batch
    rows = []
    for hosts in _host_counts(cluster.hosts, cluster.local_size, flags.max_gpus, max_gpus_by_epoch):
        topology = cluster.topology(hosts)
        if flags.allreduce == "auto":
            row = recommend(job, topology)
        else:
            row = fastest(job, topology, exchange_strategies(topology, [flags.allreduce]))
        if flags.model != "resnet50":
            # MLPerf's reference counts epochs of ResNet-50 only.
            row = dataclasses.replace(row, target_seconds=None)
        rows.append(row)
    return rows


def _host_counts(
    planned_hosts: int, local_size: int, max_gpus: int, max_gpus_by_epoch: int
) -> list[int]:
    """Returns the numbers of hosts in the table: powers of two and the planned one.

    Args:
      planned_hosts: Is always in the table.
      local_size: GPUs per host.
      max_gpus: Largest number of GPUs; a larger planned number replaces it.
      max_gpus_by_epoch: Number of GPUs whose global batch is a whole epoch.
    """
    limit = min(max(max_gpus, planned_hosts * local_size), max_gpus_by_epoch)
    counts = {planned_hosts}
    hosts = 1
    while hosts * local_size <= limit:
        counts.add(hosts)
        hosts *= 2
    return sorted(counts)


def _title(flags: PlannerFlags, cluster: ClusterModel, gpu_speed: SingleGpuSpeed) -> str:
    images_per_second = gpu_speed.per_gpu_batch / gpu_speed.step_seconds
    return (
        f"{flags.model}, {pluralize(cluster.hosts, 'host')} x {cluster.local_size}"
        f" {gpu_speed.title or 'GPUs'}, batch {gpu_speed.per_gpu_batch} per GPU,"
        f" {images_per_second:.0f} images/s on one GPU ({gpu_speed.source}); link"
        f" {_link_text(cluster.between)}, inside {_link_text(cluster.inside)}"
    )


def _notes_on_algorithm(
    flags: PlannerFlags, cluster: ClusterModel, rows: Sequence[Prediction]
) -> list[str]:
    """Returns what the prediction does not know about the algorithm of --allreduce."""
    if flags.allreduce == "auto":
        return []
    notes = []
    composed = any(
        row.gpus > 1 and is_composed(row.strategy, cluster.topology(row.gpus // cluster.local_size))
        for row in rows
    )
    if composed:
        notes.append(f"{flags.allreduce}: {_COMPOSED_NOTE}")
    if flags.allreduce not in COSTS:
        notes.append(
            f"{flags.allreduce}: it has no cost formula, so the prediction uses the ring's"
        )
    return notes


def _table(rows: Sequence[Prediction], planned_row: Prediction, epochs: int) -> list[str]:
    header = (
        f"{'GPUs':>6} {'batch':>8} {'step ms':>8} {'comm ms':>8} {'exposed':>8} {'eff.':>7}"
        f" {'images/s':>11} {f'{epochs} epochs':>13} {'to 75.9 %':>13}  exchange"
    )
    return [header, *(_table_row(row, is_planned=row is planned_row) for row in rows)]


def _table_row(row: Prediction, *, is_planned: bool) -> str:
    mark = "*" if is_planned else " "
    strategy = describe_strategy(row.strategy) if row.gpus > 1 else "-"
    return (
        f"{row.gpus:5}{mark} {row.global_batch:8} {1e3 * row.step_seconds:8.1f}"
        f" {1e3 * row.communication_seconds:8.1f} {1e3 * row.exposed_seconds:8.2f}"
        f" {100 * row.efficiency:6.1f}% {row.images_per_second:11,.0f}"
        f" {format_duration(row.training_seconds):>13} {format_duration(row.target_seconds):>13} "
        f" {strategy}"
    )


def _recommendation(job: TrainingJob, topology: Topology, planned_row: Prediction) -> list[str]:
    """Returns the recommended flags, and how they compare with the requested ones."""
    recommended = recommend(job, topology)
    lines = [
        f"recommended for {planned_row.gpus} GPUs: {strategy_flags(recommended.strategy)}"
        f" (efficiency {100 * recommended.efficiency:.1f} %,"
        f" {1e3 * recommended.exposed_seconds:.2f} ms exposed per step)"
    ]
    slowdown_percent = 100 * (planned_row.step_seconds / recommended.step_seconds - 1)
    if (
        planned_row.strategy != recommended.strategy
        and slowdown_percent >= _MIN_MENTIONED_SLOWDOWN_PERCENT
    ):
        lines.append(
            f"a step with the requested exchange ({describe_strategy(planned_row.strategy)}) takes"
            f" {slowdown_percent:.1f} % longer"
        )
    lines += _faster_composed_strategy(job, topology, recommended)
    return lines


def _faster_composed_strategy(
    job: TrainingJob, topology: Topology, recommended: Prediction
) -> list[str]:
    """Returns a line on a composed strategy that is clearly faster, if any."""
    best = fastest(job, topology, exchange_strategies(topology, tuple(COSTS)))
    is_clearly_faster = best.step_seconds * (1 + MIN_GAIN_OVER_RING) < recommended.step_seconds
    if not is_clearly_faster or not is_composed(best.strategy, topology):
        return []
    return [
        f"{strategy_flags(best.strategy)} has a predicted efficiency of"
        f" {100 * best.efficiency:.1f} %, but {_COMPOSED_NOTE}"
    ]


def _input_line(images_per_second: float, gpus: int) -> str:
    """Returns the input that a host needs, in bytes and in cores that decode.

    Args:
      images_per_second: Speed of all GPUs of the host.
      gpus: Number of GPUs of the host.
    """
    gigabytes_per_second = 1e-9 * _JPEG_BYTES_PER_IMAGE * images_per_second
    cores = published.decoding_cores(images_per_second)
    resized = published.decoding_cores(images_per_second, resized=True)
    return (
        f"input of a host: {images_per_second:,.0f} images/s, which need"
        f" {gigabytes_per_second:.2g} GB/s of ImageNet's files and about"
        f" {pluralize(cores, 'CPU core')}, {cores / gpus:.2g} per GPU; {resized} with shards of"
        " --resize=256; measure yours with hybrid-imagenet bench input"
    )


def describe_strategy(strategy: ExchangeStrategy) -> str:
    """Describes an exchange strategy in a few words, for example `torus 4x6, 16 MiB`."""
    grid = f" {strategy.grid}" if strategy.grid else ""
    return f"{strategy.algorithm}{grid}, {strategy.fusion_bytes / MIB:g} MiB"


def strategy_flags(strategy: ExchangeStrategy) -> str:
    """Returns the flags of the training program that choose an exchange strategy."""
    grid = f" --torus_grid={strategy.grid}" if strategy.grid else ""
    fusion_mb = f"{strategy.fusion_bytes / MIB:g}"
    return f"--allreduce={strategy.algorithm}{grid} --fusion_threshold_mb={fusion_mb}"


def _link_text(link: Link) -> str:
    gigabytes_per_second = 1e-9 / link.seconds_per_byte
    latency_microseconds = 1e6 * link.latency
    return f"{gigabytes_per_second:.3g} GB/s and {latency_microseconds:.3g} us a hop"
