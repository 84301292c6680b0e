"""`hybrid-imagenet plan`: predicts training on a cluster and recommends how to
exchange gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from hybrid_imagenet.comm.cost_model import Link, Topology
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.config.help import entries
from hybrid_imagenet.errors import counted
from hybrid_imagenet.options import SPELLING
from hybrid_imagenet.runlog.summary import duration
from hybrid_imagenet.tools import command_line
from hybrid_imagenet.tools.plan import planner_flags
from hybrid_imagenet.tools.plan.prediction import (
    MARGIN,
    MIB,
    Job,
    Prediction,
    Way,
    best,
    is_composed,
    recommend,
    ways,
)

_USAGE = """usage: hybrid-imagenet plan [--name=value ...]

Predicts step time, scaling efficiency and training time on a cluster, and recommends how to
exchange gradients.
"""
_FOOTNOTES = (
    (
        "*: the planned size. comm: all communication of a step; exposed: what backpropagation does"
        " not hide of it."
    ),
    (
        "eff.: speed of a GPU here, of its speed alone. exchange: algorithm and size of a bucket of"
        " gradients."
    ),
)
_COMPOSED = (
    "Horovod composes it of operations among sets of ranks, which it negotiates again at each step."
    " The model leaves that cost out: measure it with hybrid-imagenet bench allreduce."
)
_JPEG_BYTES = 115e3  # ILSVRC2012_img_train.tar: 147,897,477,120 bytes for 1,281,167 images
_DECODED = 935.0  # images/s that a core decodes to 224 pixels: docs/input.md
_REFERENCE = "to 75.9 %: epochs of MLPerf's reference at the batch; a dash where it has none."


@command_line.command
def main(arguments: Sequence[str]) -> None:
    """Runs the planner."""
    helps = {"-h", "--help"} & set(arguments)
    print(
        "\n".join(
            [_USAGE, *entries(planner_flags.Plan), "", SPELLING]
            if helps
            else lines(planner_flags.parse(arguments))
        )
    )


def lines(plan: planner_flags.Plan) -> list[str]:
    """The plan as text: one GPU, a row for each size of the cluster, and the recommended exchange.

    Raises:
      UserError: for values that do not go together.
    """
    cluster, alone, job = planner_flags.resolve(plan)
    rows = []
    asked_for_composed = False
    for hosts in _host_counts(
        cluster.hosts, cluster.local_size, plan.max_gpus, job.images_per_epoch // job.batch
    ):
        topology = cluster.topology(hosts)
        if plan.allreduce == "auto":
            rows.append(recommend(job, topology))
            continue
        rows.append(best(job, topology, ways(topology, [plan.allreduce])))
        if topology.ranks > 1 and is_composed(rows[-1].way, topology):
            asked_for_composed = True
    if plan.model != "resnet50":  # whose epochs the reference counts
        rows = [dataclasses.replace(row, target_seconds=None) for row in rows]
    here = next(row for row in rows if row.gpus == cluster.hosts * cluster.local_size)
    found = [
        (
            f"{plan.model}, {counted(cluster.hosts, 'host')} x {cluster.local_size}"
            f" {alone.title or 'GPUs'}, batch {alone.batch} per GPU,"
            f" {alone.batch / alone.seconds:.0f} images/s on one GPU ({alone.source}); link"
            f" {_link(cluster.between)}, inside {_link(cluster.inside)}"
        ),
    ]
    if alone.choice:
        found.append(alone.choice)
    if asked_for_composed:
        found.append(f"{plan.allreduce}: {_COMPOSED}")
    if plan.allreduce != "auto" and ALGORITHMS[plan.allreduce].cost is None:
        found.append(
            f"no cost formula is known for {plan.allreduce}: it is taken to cost what the ring does"
        )
    found += [
        "",
        (
            f"{'GPUs':>6} {'batch':>8} {'step ms':>8} {'comm ms':>8} {'exposed':>8} {'eff.':>7}"
            f" {'images/s':>11} {f'{plan.epochs} epochs':>13} {'to 75.9 %':>13}  exchange"
        ),
    ]
    found += [_row(row, "*" if row is here else " ") for row in rows]
    found += ["", *_FOOTNOTES, _REFERENCE]
    if here.gpus > 1:
        topology = cluster.topology(cluster.hosts)
        advice = recommend(job, topology)
        gain = (
            f"(efficiency {100 * advice.efficiency:.1f} %, {1e3 * advice.exposed_seconds:.2f} ms"
            " exposed per step)"
        )
        found += ["", f"recommended for {here.gpus} GPUs: {flags(advice.way)} {gain}"]
        longer = 100 * (here.step_seconds / advice.step_seconds - 1)
        if here.way != advice.way and longer >= 0.1:
            found.append(f"a step as asked for ({describe(here.way)}) takes {longer:.1f} % longer")
        found += _composed_instead(job, topology, advice)
    each = here.images_per_second / cluster.hosts
    found.append(
        f"input of a host: {each:,.0f} images/s, which are {1e-9 * _JPEG_BYTES * each:.2g} GB/s of"
        f" ImageNet's files and some {math.ceil(each / _DECODED)} CPU cores; measure yours with"
        " hybrid-imagenet bench input"
    )
    if not any(row.target_seconds for row in rows):
        found.append("no reference convergence is known for these batches")
    return found


def _composed_instead(job: Job, topology: Topology, advice: Prediction) -> list[str]:
    """Returns a line on the fastest way to exchange that is composed, if it would be clearly faster
    than the advice.
    """
    offered = [name for name, known in ALGORITHMS.items() if known.cost is not None]
    fastest = best(job, topology, ways(topology, offered))
    if fastest.step_seconds * (1 + MARGIN) >= advice.step_seconds or not is_composed(
        fastest.way, topology
    ):
        return []
    return [
        f"{flags(fastest.way)} has a predicted efficiency of {100 * fastest.efficiency:.1f} %, but"
        f" {_COMPOSED}"
    ]


def _host_counts(hosts: int, local_size: int, max_gpus: int, most: int) -> list[int]:
    """Hosts by powers of two up to `max_gpus` GPUs and `most` that an epoch is enough for, with the
    planned number.
    """
    counts, count = {hosts}, 1
    while count * local_size <= min(max(max_gpus, hosts * local_size), most):
        counts.add(count)
        count *= 2
    return sorted(counts)


def _row(row: Prediction, mark: str) -> str:
    return (
        f"{row.gpus:5}{mark} {row.global_batch:8} {1e3 * row.step_seconds:8.1f}"
        f" {1e3 * row.communication_seconds:8.1f} {1e3 * row.exposed_seconds:8.2f}"
        f" {100 * row.efficiency:6.1f}% {row.images_per_second:11,.0f}"
        f" {duration(row.training_seconds):>13} {duration(row.target_seconds):>13} "
        f" {describe(row.way) if row.gpus > 1 else '-'}"
    )


def describe(way: Way) -> str:
    """Describes a way of exchange in a few words."""
    grid = f" {way.grid}" if way.grid else ""
    return f"{way.algorithm}{grid}, {way.fusion_bytes / MIB:g} MiB"


def flags(way: Way) -> str:
    """A way of exchange as flags of the training program."""
    grid = f" --torus_grid={way.grid}" if way.grid else ""
    return f"--allreduce={way.algorithm}{grid} --fusion_threshold_mb={way.fusion_bytes / MIB:g}"


def _link(link: Link) -> str:
    return f"{1e-9 / link.seconds_per_byte:.3g} GB/s and {1e6 * link.latency:.3g} us a hop"
