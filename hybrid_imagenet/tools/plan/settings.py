"""Reads the planner's flags and completes them from the described cluster."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from hybrid_imagenet.analysis.cost_model import Fit, fit_ring
from hybrid_imagenet.analysis.criteria import IMAGENET_TRAIN_IMAGES
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics.torus import Grid, parse_grid
from hybrid_imagenet.options import option, options_of, parse_arguments, parse_value
from hybrid_imagenet.tools.plan.clusters import CLUSTERS, INSIDE, LINKS, Cluster, own_speed, parse_link
from hybrid_imagenet.tools.plan.layers import MODELS, layers_of
from hybrid_imagenet.tools.plan.predict import MIB, Job, Way

_WIRE = {"none": 4, "fp16": 2, "bf16": 2}  # bytes of a gradient element


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cluster and the training to plan. Flags left out come from --cluster."""

    cluster: str = option("h1", "Described cluster; other flags change parts of it.", choices=tuple(CLUSTERS))
    hosts: int | None = option(None, "Hosts.", minimum=1, maximum=1_000_000)
    gpus_per_host: int | None = option(None, "GPUs per host.", minimum=1, maximum=1024)
    allreduce: str = option("auto", "All-reduce; auto takes the fastest.", choices=tuple(ALGORITHMS))
    torus_grid: str | None = option(None, "Rows x columns of GPUs for --allreduce=torus, as VxH.")
    size_switch_kb: int = option(
        256, "With --allreduce=size_switched, smaller buckets go by masters.", unit="KiB", minimum=0
    )
    fusion_threshold_mb: float | None = option(
        None, "Send a bucket of gradients once it holds this much; default the best.", unit="MiB", minimum=0
    )
    model: str = option("resnet50", "Network.", choices=MODELS)
    per_gpu_batch: int | None = option(None, "Images per GPU and step.", minimum=1, maximum=1_000_000)
    precision: str | None = option(None, "Arithmetic on the GPU.", choices=("fp16", "bf16", "fp32"))
    compression: str = option("fp16", "Type in which gradients are sent.", choices=tuple(_WIRE))
    speed: str = option(
        "published",
        "Speed of one GPU: published, the cluster's; own, what this program has reached on that GPU; or FILE, the "
        "report.json of `bench gpu` on yours.",
    )
    images_per_second: float | None = option(
        None, "Speed of one GPU alone at --per_gpu_batch, in place of --speed.", minimum=1e-3
    )
    link: str | None = option(None, f"Link of a host: {', '.join(LINKS)}, or such as 25gbit or 3.1GB/s:20us.")
    inside: str | None = option(None, f"Link inside a host: {', '.join(INSIDE)}, or such as 20GB/s:5us.")
    calibrate: str | None = option(
        None, "JSON of `benchmarks allreduce`, whose ring gives the link (of a host, or inside the only host)."
    )
    sync_batch_norm: bool = option(False, "Batch normalization over all GPUs in every step.")
    bn_group: int = option(1, "Batch normalization over this many neighbouring GPUs.", unit="GPUs", minimum=1)
    jitter: float | None = option(None, "Relative wait for the slowest rank.", minimum=0, maximum=10)
    epochs: int = option(90, "Passes over ImageNet.", minimum=1)
    epochs_to_target: float | None = option(
        None, "Epochs to the accuracy wanted; default MLPerf's reference to 75.9 % at the batch.", minimum=0
    )
    max_gpus: int = option(4096, "Largest number of GPUs in the table.", minimum=1, maximum=10_000_000)
    json: str | None = option(None, "Also write the predictions to this file.")


def parse(arguments: Sequence[str]) -> Plan:
    """Reads the command line.

    Raises:
      UserError: one line that names the flag, its value and the remedy.
    """
    options = options_of(Plan)
    texts = parse_arguments(arguments, options)
    return Plan(**{name: parse_value(name, text, options[name]) for name, text in texts.items()})


@dataclasses.dataclass(frozen=True)
class OneGpu:
    """One GPU alone: its name (empty if not known), images per step, seconds of a step, and who measured them."""

    title: str
    batch: int
    seconds: float
    source: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """The plan worked out: the cluster with all overrides, the job, and what is left open (None) in the way."""

    cluster: Cluster
    job: Job
    algorithm: str
    grid: Grid | None
    threshold: float
    fusion_bytes: float | None
    fit: Fit | None
    alone: OneGpu

    def way(self, algorithm: str, grid: Grid | None, fusion_bytes: float) -> Way:
        """A way of exchange with this plan's threshold."""
        return Way(algorithm, grid, self.threshold, fusion_bytes)


def resolve(plan: Plan) -> Settings:
    """Completes a plan from its cluster and checks it.

    Raises:
      UserError: for values that do not go together.
    """
    cluster = CLUSTERS[plan.cluster]
    hosts = plan.hosts or cluster.hosts
    local_size = plan.gpus_per_host or cluster.local_size
    fit = read_calibration(plan.calibrate, plan.compression) if plan.calibrate else None
    inside = parse_link("inside", plan.inside) if plan.inside else cluster.inside
    between = parse_link("link", plan.link) if plan.link else cluster.between
    if fit is not None:
        inside, between = (fit.link, between) if hosts == 1 else (inside, fit.link)
    changes: dict[str, Any] = {"hosts": hosts, "local_size": local_size, "inside": inside, "between": between}
    changes |= {"jitter": cluster.jitter if plan.jitter is None else plan.jitter}
    cluster = dataclasses.replace(cluster, **changes)
    alone = _one_gpu(plan, cluster)
    _check_groups(plan, hosts * local_size)
    return Settings(
        cluster=cluster,
        job=_job(plan, cluster, alone),
        alone=alone,
        algorithm=plan.allreduce,
        grid=_grid(plan, hosts * local_size),
        threshold=plan.size_switch_kb * 1024,
        fusion_bytes=None if plan.fusion_threshold_mb is None else plan.fusion_threshold_mb * MIB,
        fit=fit,
    )


def _check_groups(plan: Plan, gpus: int) -> None:
    if plan.bn_group > 1 and plan.sync_batch_norm:
        raise UserError(f"--bn_group={plan.bn_group} does not go with --sync_batch_norm, which is one group: omit one")
    if gpus % plan.bn_group:
        raise UserError(f"--bn_group={plan.bn_group}: {gpus} GPUs do not make whole groups; give a divisor of {gpus}")


def _grid(plan: Plan, ranks: int) -> Grid | None:
    if plan.torus_grid is None:
        return None
    try:
        return parse_grid(plan.torus_grid, ranks)
    except ValueError as error:
        raise UserError(f"--torus_grid={plan.torus_grid}: {error}") from None


def _job(plan: Plan, cluster: Cluster, alone: OneGpu) -> Job:
    return Job(
        layers=layers_of(plan.model),
        compute_seconds=alone.seconds,
        batch=alone.batch,
        element_bytes=_WIRE[plan.compression],
        jitter=cluster.jitter,
        images_per_epoch=IMAGENET_TRAIN_IMAGES,
        epochs=plan.epochs,
        epochs_to_target=plan.epochs_to_target,
        sync_batch_norm=plan.sync_batch_norm,
        bn_group=plan.bn_group,
    )


def _one_gpu(plan: Plan, cluster: Cluster) -> OneGpu:
    batch = plan.per_gpu_batch or cluster.batch
    if plan.images_per_second is not None:
        return OneGpu("", batch, batch / plan.images_per_second, "given")
    if plan.speed not in ("published", "own"):
        return read_report(plan.speed, plan.model, plan.per_gpu_batch)
    precision = plan.precision or next(iter(cluster.speeds))
    speed = cluster.speeds.get(precision) if plan.speed == "published" else own_speed(cluster.gpu, precision)
    if speed is None:
        flag = f"precision={precision}" if plan.speed == "published" else "speed=own"
        raise UserError(
            f"--{flag}: none is known for {cluster.gpu_title} in {precision}; give --images_per_second, or "
            "--speed=FILE with the report.json of hybrid-imagenet bench gpu"
        )
    # Other networks are taken to run at ResNet-50's operations per second.
    operations = {name: sum(layer.operations for layer in layers_of(name)) for name in (plan.model, "resnet50")}
    scale = operations[plan.model] / operations["resnet50"]
    return OneGpu(cluster.gpu_title, batch, speed.seconds(batch) * scale, speed.source)


def read_report(path: str, model: str, batch: int | None) -> OneGpu:
    """Reads the speed of one GPU from the report.json that `bench gpu` writes.

    Args:
      path: of the file.
      model: the network that is planned.
      batch: images per GPU that are planned; None for those of the report.

    Raises:
      UserError: if the file cannot be read, or is of another network or batch.
    """
    try:
        with open(path, encoding="utf-8") as file:
            row = json.load(file)["rungs"]["one GPU"]
        found = OneGpu(str(row["gpu"] or ""), int(row["batch_per_rank"]), float(row["step_seconds"]), path)
        measured = str(row["model"])
    except OSError as error:
        raise UserError(
            f"--speed={path}: {error.strerror}; choose published, own, or the report.json of hybrid-imagenet bench gpu"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--speed={path}: not a report of hybrid-imagenet bench gpu ({error})") from None
    if measured != model or batch not in (None, found.batch):
        asked = f"--model={model}" + (f" --per_gpu_batch={batch}" if batch else "")
        raise UserError(
            f"--speed={path}: measured {measured} at batch {found.batch}, planned are {asked}; measure those with "
            f"hybrid-imagenet bench gpu -- {asked}"
        )
    return found


def read_calibration(path: str, compression: str) -> Fit:
    """Fits a ring to the rows of a benchmark's JSON: a list of rows, or an object with the list under `rows`.

    Rows have `algorithm`, `compression`, `bytes` (in FP32), `seconds`, and `ranks` (or the object has). Rows with the
    wanted compression are used if there are any, else those without compression.

    Raises:
      UserError: if the file cannot be read, or does not hold ring measurements of two sizes on two ranks.
    """
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        header = content if isinstance(content, dict) else {}
        rows = [row for row in (header.get("rows", []) if header else content) if row["algorithm"] == "ring"]
        chosen = [row for row in rows if row.get("compression", "none") == compression]
        chosen = chosen or [row for row in rows if row.get("compression", "none") == "none"]
        ranks = {int(row.get("ranks", header.get("ranks", 0))) for row in chosen}
        if len(ranks) != 1:
            raise UserError(f"--calibrate={path}: needs rows of algorithm ring, all on the same number of ranks")
        sizes = [
            float(row.get("wire_bytes") or row["bytes"] * _WIRE[row.get("compression", "none")] / 4) for row in chosen
        ]
        return fit_ring(sizes, [float(row["seconds"]) for row in chosen], ranks.pop())
    except OSError as error:
        raise UserError(f"--calibrate={path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--calibrate={path}: not a benchmark's JSON ({error})") from None
