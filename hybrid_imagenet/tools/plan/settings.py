"""Reads the planner's flags and completes them from the described cluster."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from hybrid_imagenet.analysis.published import GPUS, speeds
from hybrid_imagenet.comm.settings import ALGORITHMS
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import mlperf
from hybrid_imagenet.options import option, options_of, parse_arguments, parse_value
from hybrid_imagenet.tools.plan.clusters import CLUSTERS, INSIDE, LINKS, Cluster, line, parse_link
from hybrid_imagenet.tools.plan.layers import MODELS, layers_of
from hybrid_imagenet.tools.plan.predict import Job

_WIRE = {"none": 4, "fp16": 2, "bf16": 2}  # bytes of a gradient element


@dataclasses.dataclass(frozen=True)
class Plan:
    """The cluster and the training to plan. Flags left out come from --cluster."""

    cluster: str = option("h1", "Described cluster; other flags change parts of it.", choices=tuple(CLUSTERS))
    hosts: int | None = option(None, "Hosts.", minimum=1, maximum=1_000_000)
    gpus_per_host: int | None = option(None, "GPUs per host.", minimum=1, maximum=1024)
    allreduce: str = option("auto", "All-reduce; auto takes the fastest.", choices=("auto", *ALGORITHMS))
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
    epochs: int = option(90, "Passes over ImageNet.", minimum=1)
    max_gpus: int = option(4096, "Largest number of GPUs in the table.", minimum=1, maximum=10_000_000)


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
        jitter=cluster.jitter,
        images_per_epoch=mlperf.TRAIN_IMAGES,
        epochs=plan.epochs,
    )
    return cluster, alone, job


def _one_gpu(plan: Plan, cluster: Cluster) -> OneGpu:
    batch = plan.per_gpu_batch or cluster.batch
    if plan.images_per_second is not None:
        return OneGpu("", batch, batch / plan.images_per_second, "given")
    if plan.speed not in ("published", "own"):
        if plan.precision:
            raise UserError(f"--precision={plan.precision}: --speed={plan.speed} has its own; omit it")
        return read_report(plan.speed, plan.model, plan.per_gpu_batch)
    precision, title = plan.precision or next(iter(cluster.speeds)), GPUS[cluster.gpu].title
    if plan.speed == "published":
        flag, kind, speed = f"precision={precision}", precision, cluster.speeds.get(precision)
    else:
        flag, kind = "speed=own", f"{precision} at batch {batch}"
        measured = speeds(cluster.gpu, precision, own=True)
        speed = next((line(one) for one in measured if one.batch == batch), None)
    if speed is None:
        raise UserError(
            f"--{flag}: none is known for {title} in {kind}; give --images_per_second, or "
            "--speed=FILE with the report.json of hybrid-imagenet bench gpu"
        )
    # Other networks are taken to run at ResNet-50's operations per second.
    operations = {name: sum(layer.operations for layer in layers_of(name)) for name in (plan.model, "resnet50")}
    scale = operations[plan.model] / operations["resnet50"]
    return OneGpu(title, batch, speed.seconds(batch) * scale, speed.source)


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
            f"--speed={path}: {error.strerror}; choose published, own, or the report.json of hybrid-imagenet bench gpu"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"--speed={path}: not a report of hybrid-imagenet bench gpu ({error})") from None
    if side != 224 or not 0 < found.seconds < math.inf:
        raise UserError(f"--speed={path}: {side} pixels, {found.seconds:g} s a step: give a measurement at 224 pixels")
    if measured != model or batch not in (None, found.batch):
        asked = f"--model={model}" + (f" --per_gpu_batch={batch}" if batch else "")
        raise UserError(
            f"--speed={path}: measured {measured} at batch {found.batch}, planned are {asked}; measure those with "
            f"hybrid-imagenet bench gpu -- {asked}"
        )
    return found
