"""`hybrid-imagenet plan`: predicts training on a cluster and recommends how to exchange gradients."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Sequence

from hybrid_imagenet.analysis.cost_model import Link
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.config.help import entries
from hybrid_imagenet.errors import EXIT_OK, UserError
from hybrid_imagenet.runlog.summary import duration
from hybrid_imagenet.tools.plan import settings
from hybrid_imagenet.tools.plan.clusters import own_speed
from hybrid_imagenet.tools.plan.predict import (
    FUSION_CHOICES_MB,
    MIB,
    Prediction,
    Way,
    best,
    published_grid,
    statistics_exchange,
    ways,
)

_USAGE = """usage: hybrid-imagenet plan [--name=value ...]

Predicts step time, scaling efficiency and training time on a cluster, and recommends how to exchange gradients.
"""


def help_text() -> str:
    """All flags with their defaults."""
    return "\n".join([_USAGE, *entries(settings.Plan)])


def main(arguments: Sequence[str]) -> int:
    """Runs the planner; returns the exit code."""
    if {"-h", "--help"} & set(arguments):
        print(help_text())
        return EXIT_OK
    try:
        return _run(settings.parse(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(plan: settings.Plan) -> int:
    setting = settings.resolve(plan)
    hosts = setting.cluster.hosts
    rows = [_row(setting, count) for count in host_counts(hosts, setting.cluster.local_size, plan.max_gpus)]
    here = _row(setting, hosts)
    advice = _advice(setting, hosts)
    print("\n".join(_lines(plan, setting, rows, here, advice)))
    if plan.json:
        _write(plan.json, setting, rows, here, advice)
    return EXIT_OK


def host_counts(hosts: int, local_size: int, max_gpus: int) -> list[int]:
    """Hosts by powers of two up to `max_gpus` GPUs, with the planned number among them."""
    counts, count = {hosts}, 1
    while count * local_size <= max(max_gpus, hosts * local_size):
        counts.add(count)
        count *= 2
    return sorted(counts)


def _row(setting: settings.Settings, hosts: int) -> Prediction:
    """The prediction for a number of hosts, with what the plan leaves open set to the best."""
    topology = setting.cluster.topology(hosts)
    sizes = _fusion(setting)
    if setting.algorithm == "auto":
        return best(setting.job, topology, _all(setting, hosts))
    planned = hosts == setting.cluster.hosts
    grid = setting.grid if planned else None
    if setting.algorithm == "torus" and grid is None:
        grid = published_grid(topology.ranks)
    try:
        return best(setting.job, topology, [setting.way(setting.algorithm, grid, size) for size in sizes])
    except ValueError as error:
        raise UserError(f"--allreduce={setting.algorithm}: {error}") from None


def _all(setting: settings.Settings, hosts: int) -> list[Way]:
    offered = [name for name, known in ALGORITHMS.items() if known.cost is not None]
    return ways(setting.cluster.topology(hosts), offered, _fusion(setting))


def _advice(setting: settings.Settings, hosts: int) -> Prediction:
    return best(setting.job, setting.cluster.topology(hosts), _all(setting, hosts))


def _fusion(setting: settings.Settings) -> list[float]:
    return [size * MIB for size in FUSION_CHOICES_MB] if setting.fusion_bytes is None else [setting.fusion_bytes]


def _lines(
    plan: settings.Plan, setting: settings.Settings, rows: list[Prediction], here: Prediction, advice: Prediction
) -> list[str]:
    cluster, alone = setting.cluster, setting.alone
    lines = [
        f"{plan.model}, {cluster.hosts} hosts x {cluster.local_size} {alone.title or 'GPUs'}, "
        f"batch {alone.batch} per GPU, {alone.batch / alone.seconds:.0f} images/s on one GPU ({alone.source}); "
        f"link {_link(cluster.between)}, inside {_link(cluster.inside)}",
    ]
    own = own_speed(cluster.gpu, "fp16")
    if own is not None and plan.speed == "published" and plan.images_per_second is None:
        reached = alone.batch / own.seconds(alone.batch)
        lines.append(f"this program has reached {reached:.0f} images/s at that batch: --speed=own plans with it")
    if setting.fit is not None:
        fit = setting.fit
        lines.append(
            f"fitted to {fit.points} measurements: {_link(fit.link)}, relative error {100 * fit.median_error:.0f} % in "
            f"the median, {100 * fit.largest_error:.0f} % at most"
        )
    lines += _beyond_gradients(setting)
    if setting.algorithm != "auto" and ALGORITHMS[setting.algorithm].cost is None:
        lines.append(f"no cost formula is known for {setting.algorithm}: it is taken to cost what the ring does")
    target = "target" if plan.epochs_to_target is not None else "to 75.9 %"
    lines += ["", f"{'GPUs':>6} {'batch':>8} {'step ms':>8} {'comm ms':>8} {'exposed':>8} {'eff.':>7} {'images/s':>11} "
              f"{f'{plan.epochs} epochs':>13} {target:>13}  exchange"]  # fmt: skip
    for row in rows:
        mark = "*" if row.gpus == here.gpus else " "
        lines.append(
            f"{row.gpus:5}{mark} {row.global_batch:8} {1e3 * row.step_seconds:8.1f} "
            f"{1e3 * row.communication_seconds:8.1f} {1e3 * row.exposed_seconds:8.2f} {100 * row.efficiency:6.1f}% "
            f"{row.images_per_second:11,.0f} {duration(row.training_seconds):>13} {duration(row.target_seconds):>13}  "
            f"{describe(row.way) if row.gpus > 1 else '-'}"
        )
    lines += ["", *_FOOTNOTES, *([] if plan.epochs_to_target is not None else [_REFERENCE])]
    if here.gpus > 1:
        gain = f"(efficiency {100 * advice.efficiency:.1f} %, {1e3 * advice.exposed_seconds:.2f} ms exposed per step)"
        lines += ["", f"recommended for {here.gpus} GPUs: {flags(advice.way)} {gain}"]
        longer = 100 * (here.step_seconds / advice.step_seconds - 1)
        if here.way != advice.way and longer >= 0.1:
            lines.append(f"a step as asked for ({describe(here.way)}) takes {longer:.1f} % longer")
    if not any(row.target_seconds for row in rows):
        lines.append("no reference convergence is known for these batches; give --epochs_to_target")
    return lines


def _beyond_gradients(setting: settings.Settings) -> list[str]:
    """What a step exchanges beside gradients: statistics of normalization."""
    found = statistics_exchange(setting.job, setting.cluster.hosts * setting.cluster.local_size)
    if not found.exchanges:
        return []
    return [
        f"normalization over {found.group} GPUs: {found.exchanges} all-reduces of {found.bytes / 2**10:.0f} KiB in "
        f"all, {1e3 * found.seconds:.2f} ms of each step"
    ]


_FOOTNOTES = (
    "*: the planned size. comm: all communication of a step; exposed: what backpropagation does not hide of it.",
    "eff.: speed of a GPU here, of its speed alone. exchange: algorithm and size of a bucket of gradients.",
)
_REFERENCE = "to 75.9 %: epochs of MLPerf's reference at the batch; a dash where it has none."


def describe(way: Way) -> str:
    """Describes a way of exchange in a few words."""
    grid = f" {way.grid}" if way.grid else ""
    return f"{way.algorithm}{grid}, {way.fusion_bytes / MIB:g} MiB"


def flags(way: Way) -> str:
    """A way of exchange as flags of the training program."""
    grid = f" --torus_grid={way.grid}" if way.grid else ""
    return f"--allreduce={way.algorithm}{grid} --fusion_threshold_mb={way.fusion_bytes / MIB:g}"


def _link(link: Link) -> str:
    bandwidth = f"{1e-9 / link.seconds_per_byte:.3g} GB/s" if link.seconds_per_byte else "unlimited"
    return f"{bandwidth} and {1e6 * link.latency:.3g} us a hop"


def _write(path: str, setting: settings.Settings, rows: list[Prediction], here: Prediction, advice: Prediction) -> None:
    content: dict[str, object] = {
        "rows": [_json(row) for row in rows],
        "planned": _json(here),
        "recommended": _json(advice),
    }
    content["one_gpu"] = vars(setting.alone)
    try:
        pathlib.Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json={path}: {error.strerror}") from None


def _json(row: Prediction) -> dict[str, object]:
    way = row.way
    values = {name: value for name, value in vars(row).items() if name != "way"}
    grid = str(way.grid) if way.grid else None
    return values | {"algorithm": way.algorithm, "torus_grid": grid, "fusion_bytes": way.fusion_bytes}
