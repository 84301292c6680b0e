"""Reads the planner's flags and completes them from the described cluster."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from hybrid_imagenet.analysis.published import GPUS, GpuSpeed, speeds
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.options import option, options_of, parse_arguments, parse_value
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.tools.plan.clusters import (
    CLUSTERS,
    INSIDE,
    JITTER,
    LINKS,
    Cluster,
    Speed,
    line,
    parse_link,
)
from hybrid_imagenet.tools.plan.network_layers import MODELS, layers_of
from hybrid_imagenet.tools.plan.prediction import Job

_WIRE = {"none": 4, "fp16": 2, "bf16": 2}  # bytes of a gradient element


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cluster and the training to plan. Flags left out come from --cluster."""

    cluster: str = option(
        "h1", "Described cluster; other flags change parts of it.", choices=tuple(CLUSTERS)
    )
    hosts: int | None = option(None, "Hosts.", minimum=1, maximum=1_000_000)
    gpus_per_host: int | None = option(None, "GPUs per host.", minimum=1, maximum=1024)
    allreduce: str = option(
        "auto",
        "All-reduce; auto takes the ring, or hierarchical where that is clearly faster.",
        choices=("auto", *ALGORITHMS),
    )
    model: str = option("resnet50", "Network.", choices=MODELS)
    per_gpu_batch: int | None = option(
        None, "Images per GPU and step.", minimum=1, maximum=1_000_000
    )
    precision: str | None = option(None, "Arithmetic on the GPU.", choices=("fp16", "bf16", "fp32"))
    compression: str = option("fp16", "Type in which gradients are sent.", choices=tuple(_WIRE))
    speed: str = option(
        "auto",
        "Speed of one GPU: own, what this program has reached on that GPU; published, the"
        " cluster's; auto, own where that is known, else published; or FILE, the report.json of"
        " `bench gpu` on yours.",
    )
    images_per_second: float | None = option(
        None, "Speed of one GPU alone at --per_gpu_batch; replaces --speed.", minimum=1e-3
    )
    link: str | None = option(
        None, f"Link of a host: {', '.join(LINKS)}, or such as 25gbit or 3.1GB/s:20us."
    )
    inside: str | None = option(
        None, f"Link inside a host: {', '.join(INSIDE)}, or such as 20GB/s:5us."
    )
    epochs: int = option(90, "Passes over ImageNet.", minimum=1)
    max_gpus: int = option(
        4096, "Largest number of GPUs in the table.", minimum=1, maximum=10_000_000
    )


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
    """The speed of a GPU.

    Attributes:
      title: its name; empty if not known.
      batch: images per step.
      seconds: of a step.
      source: who measured it.
      alone: whether it ran alone, so that a job's wait for its slowest rank is not part of
      `seconds`.
      choice: which speed --speed=auto has taken and how to take the other one; empty without that
        flag.
    """

    title: str
    batch: int
    seconds: float
    source: str
    alone: bool = True
    choice: str = ""


def resolve(plan: Plan) -> tuple[Cluster, OneGpu, Job]:
    """The cluster with all overrides, one of its GPUs, and the training to predict.

    Raises:
      UserError: for values that do not go together.
    """
    described = CLUSTERS[plan.cluster]
    cluster = dataclasses.replace(
        described,
        hosts=plan.hosts or described.hosts,
        local_size=plan.gpus_per_host or described.local_size,
        inside=parse_link("inside", plan.inside) if plan.inside else described.inside,
        between=parse_link("link", plan.link) if plan.link else described.between,
    )
    alone = _one_gpu(plan, cluster)
    job = Job(
        layers=layers_of(plan.model),
        compute_seconds=alone.seconds,
        batch=alone.batch,
        element_bytes=_WIRE[plan.compression],
        jitter=max(cluster.jitter, JITTER) if alone.alone else cluster.jitter,
        images_per_epoch=mlperf.TRAIN_IMAGES,
        epochs=plan.epochs,
    )
    return cluster, alone, job


def _one_gpu(plan: Plan, cluster: Cluster) -> OneGpu:
    if plan.images_per_second is not None:
        batch = plan.per_gpu_batch or cluster.batch
        return OneGpu("", batch, batch / plan.images_per_second, "given")
    if plan.speed not in ("auto", "published", "own"):
        if plan.precision:
            raise UserError(
                f"--precision={plan.precision}: --speed={plan.speed} has its own; omit it"
            )
        return read_report(plan.speed, plan.model, plan.per_gpu_batch)
    precision = plan.precision or next(iter(cluster.speeds))
    measured = [] if plan.speed == "published" else speeds(cluster.gpu, precision, own=True)
    batch = plan.per_gpu_batch or (measured[0].batch if measured else cluster.batch)
    own = next((speed for speed in measured if speed.batch == batch), None)
    if own is not None:
        return _scaled(plan, cluster, line(own), batch, choice=_chosen_own(plan, cluster, own))
    title = GPUS[cluster.gpu].title
    published = cluster.speeds.get(precision)
    if plan.speed == "own" or published is None:
        flag = "speed=own" if plan.speed == "own" else f"precision={precision}"
        kind = f"{precision} at batch {batch}" if plan.speed == "own" else precision
        raise UserError(
            f"--{flag}: none is known for {title} in {kind}; give --images_per_second, or "
            "--speed=FILE with the report.json of hybrid-imagenet bench gpu"
        )
    # Without jitter, the wait for the slowest rank is part of the published speed.
    alone = cluster.jitter > 0
    return _scaled(
        plan,
        cluster,
        published,
        batch,
        alone=alone,
        choice=_chosen_published(plan, title, measured),
    )


def _scaled(
    plan: Plan, cluster: Cluster, speed: Speed, batch: int, *, alone: bool = True, choice: str = ""
) -> OneGpu:
    """Returns the speed for the planned network, if all networks run at ResNet-50's operations per
    second.
    """
    operations = {
        name: sum(layer.operations for layer in layers_of(name))
        for name in (plan.model, "resnet50")
    }
    scale = operations[plan.model] / operations["resnet50"]
    return OneGpu(
        GPUS[cluster.gpu].title, batch, speed.seconds(batch) * scale, speed.source, alone, choice
    )


def _chosen_own(plan: Plan, cluster: Cluster, own: GpuSpeed) -> str:
    """Returns the line on a speed of this program that --speed=auto has taken."""
    if plan.speed != "auto":
        return ""
    others = cluster.speeds.get(own.precision)
    other = f" --speed=published takes that of others ({others.source})." if others else ""
    when = f", {own.date}" if own.date else ""
    return f"speed: what this program has reached on this GPU (synthetic images{when}).{other}"


def _chosen_published(plan: Plan, title: str, measured: Sequence[GpuSpeed]) -> str:
    """Returns the line on a published speed that --speed=auto has taken; `measured` are this
    program's.
    """
    if plan.speed != "auto":
        return ""
    if not measured:
        return (
            f"speed: published by others, as that of this program on a {title} is not known in this"
            " precision."
        )
    batches = " and ".join(f"--per_gpu_batch={speed.batch}" for speed in measured)
    return f"speed: published by others, as that of this program is known for {batches} only."


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
        title = f"{row['gpu'] or 'CPU'} in {row['precision']}"
        found = OneGpu(title, int(row["batch_per_rank"]), float(row["step_seconds"]), path)
        measured, side = str(row["model"]), int(row["image_size"])
    except OSError as error:
        raise UserError(
            f"--speed={path}: {error.strerror}; choose auto, own, published, or the report.json of"
            " hybrid-imagenet bench gpu"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--speed={path}: not a report of hybrid-imagenet bench gpu ({error})"
        ) from None
    if side != 224 or not 0 < found.seconds < math.inf:
        raise UserError(
            f"--speed={path}: {side} pixels, {found.seconds:g} s a step: give a measurement at 224"
            " pixels"
        )
    if measured != model or batch not in (None, found.batch):
        asked = f"--model={model}" + (f" --per_gpu_batch={batch}" if batch else "")
        raise UserError(
            f"--speed={path}: measured {measured} at batch {found.batch}, planned are {asked};"
            f" measure those with hybrid-imagenet bench gpu -- {asked}"
        )
    return found
