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
from hybrid_imagenet.planner.clusters import (
    CLUSTERS,
    HOST_LINKS,
    INTRA_HOST_LINKS,
    JITTER,
    ClusterModel,
    ComputeTime,
    fit_compute_time,
    parse_link,
)
from hybrid_imagenet.planner.network_layers import MODELS, layers_of
from hybrid_imagenet.planner.prediction import TrainingJob
from hybrid_imagenet.schedules import mlperf

# Bytes of a gradient element in the all-reduce, by --compression.
_ELEMENT_BYTES = {"none": 4, "fp16": 2, "bf16": 2}
# Speeds and operations per layer are for images with this many pixels on each side.
_IMAGE_SIZE = 224


@dataclasses.dataclass(frozen=True)
class PlannerFlags:
    """Flags of the planner: the cluster and the training.

    Flags that are None follow --cluster.
    """

    cluster: str = option(
        "h1", "Cluster to plan for; other flags change parts of it.", choices=tuple(CLUSTERS)
    )
    hosts: int | None = option(
        None, "Number of hosts (default: as in the cluster).", minimum=1, maximum=1_000_000
    )
    gpus_per_host: int | None = option(
        None, "Number of GPUs per host (default: as in the cluster).", minimum=1, maximum=1024
    )
    allreduce: str = option(
        "auto",
        "All-reduce; auto chooses the ring, or hierarchical if that is clearly faster.",
        choices=("auto", *ALGORITHMS),
    )
    model: str = option("resnet50", "Network.", choices=MODELS)
    per_gpu_batch: int | None = option(
        None,
        "Images per GPU and step (default: the batch with which --speed was measured).",
        minimum=1,
        maximum=1_000_000,
    )
    precision: str | None = option(
        None,
        "Arithmetic on the GPU (default: that of the published result of the cluster).",
        choices=("fp16", "bf16", "fp32"),
    )
    compression: str = option(
        "fp16", "Type in which gradients are sent.", choices=tuple(_ELEMENT_BYTES)
    )
    speed: str = option(
        "auto",
        "Speed of one GPU. own: measured with this program on such a GPU; published: the speed of"
        " the cluster's source; auto: own if it is known, else published; or FILE: the report.json"
        " of `hybrid-imagenet bench gpu` on your GPU.",
    )
    images_per_second: float | None = option(
        None,
        "Speed of one GPU alone at --per_gpu_batch, instead of --speed (default: from --speed).",
        minimum=1e-3,
    )
    link: str | None = option(
        None,
        f"Link between hosts: {', '.join(HOST_LINKS)}, or a bandwidth such as 25gbit or"
        " 3.1GB/s:20us (default: as in the cluster).",
    )
    inside: str | None = option(
        None,
        f"Link inside a host: {', '.join(INTRA_HOST_LINKS)}, or a bandwidth such as 20GB/s:5us"
        " (default: as in the cluster).",
    )
    epochs: int = option(90, "Passes over ImageNet.", minimum=1)
    max_gpus: int = option(
        4096, "Largest number of GPUs in the table.", minimum=1, maximum=10_000_000
    )


def parse(arguments: Sequence[str]) -> PlannerFlags:
    """Parses the command line.

    Raises:
      UserError: One line that names the flag, its value and the remedy.
    """
    options = options_of(PlannerFlags)
    texts = parse_arguments(arguments, options)
    values = {name: parse_value(name, text, options[name]) for name, text in texts.items()}
    return PlannerFlags(**values)


@dataclasses.dataclass(frozen=True)
class SingleGpuSpeed:
    """The speed of one GPU in the planned training.

    Attributes:
      title: Name of the GPU; empty if unknown.
      per_gpu_batch: Images per step.
      step_seconds: Computation time of a step.
      source: The publication or measurement.
      measured_alone: Whether the GPU ran alone. If it was one of many, `step_seconds` already
        includes the wait for the slowest rank.
      note: A line that says which speed --speed=auto has chosen, and how to choose the other one.
        Empty without --speed=auto.
    """

    title: str
    per_gpu_batch: int
    step_seconds: float
    source: str
    measured_alone: bool = True
    note: str = ""


def resolve(flags: PlannerFlags) -> tuple[ClusterModel, SingleGpuSpeed, TrainingJob]:
    """Returns the cluster with all overrides, the speed of a GPU, and the training.

    Raises:
      UserError: If flags contradict each other, or no speed is known.
    """
    preset = CLUSTERS[flags.cluster]
    inside = preset.inside
    if flags.inside:
        inside = parse_link("inside", flags.inside, INTRA_HOST_LINKS)
    between = preset.between
    if flags.link:
        between = parse_link("link", flags.link, HOST_LINKS)
    cluster = dataclasses.replace(
        preset,
        hosts=flags.hosts or preset.hosts,
        local_size=flags.gpus_per_host or preset.local_size,
        inside=inside,
        between=between,
    )
    gpu_speed = _single_gpu_speed(flags, cluster)
    jitter = cluster.jitter
    if gpu_speed.measured_alone:
        jitter = max(jitter, JITTER)
    job = TrainingJob(
        layers=layers_of(flags.model),
        compute_seconds=gpu_speed.step_seconds,
        per_gpu_batch=gpu_speed.per_gpu_batch,
        element_bytes=_ELEMENT_BYTES[flags.compression],
        jitter=jitter,
        images_per_epoch=mlperf.TRAIN_IMAGES,
        epochs=flags.epochs,
    )
    return cluster, gpu_speed, job


def _single_gpu_speed(flags: PlannerFlags, cluster: ClusterModel) -> SingleGpuSpeed:
    """Returns the speed of one GPU as --images_per_second or --speed chooses it."""
    if flags.images_per_second is not None:
        batch = flags.per_gpu_batch or cluster.per_gpu_batch
        return SingleGpuSpeed("", batch, batch / flags.images_per_second, "given")
    if flags.speed not in ("auto", "published", "own"):
        if flags.precision:
            raise UserError(
                f"--precision={flags.precision} contradicts --speed={flags.speed}, because the"
                " report was measured in one precision. Omit --precision."
            )
        return read_gpu_report(flags.speed, flags.model, flags.per_gpu_batch)

    precision = flags.precision or next(iter(cluster.compute_times))
    own_speeds: list[GpuSpeed] = []
    if flags.speed != "published":
        own_speeds = speeds(cluster.gpu, precision, by_this_program=True)
    if flags.per_gpu_batch:
        batch = flags.per_gpu_batch
    elif own_speeds:
        batch = own_speeds[0].batch
    else:
        batch = cluster.per_gpu_batch

    own_speed = next((speed for speed in own_speeds if speed.batch == batch), None)
    if own_speed is not None:
        note = _note_on_own_speed(flags, cluster, own_speed)
        return _scale_to_model(flags, cluster, fit_compute_time(own_speed), batch, note=note)

    title = GPUS[cluster.gpu].title
    remedy = (
        "Set --images_per_second, or --speed=FILE with the report.json of hybrid-imagenet bench"
        " gpu."
    )
    if flags.speed == "own":
        raise UserError(
            f"--speed=own is not known for {title} in {precision} at batch {batch}. {remedy}"
        )
    published = cluster.compute_times.get(precision)
    if published is None:
        raise UserError(f"--precision={precision} has no published speed for {title}. {remedy}")
    return _scale_to_model(
        flags,
        cluster,
        published,
        batch,
        # If a cluster has no jitter, its published speed includes the wait for the slowest rank.
        measured_alone=cluster.jitter > 0,
        note=_note_on_published_speed(flags, title, own_speeds),
    )


def _scale_to_model(
    flags: PlannerFlags,
    cluster: ClusterModel,
    compute_time: ComputeTime,
    per_gpu_batch: int,
    *,
    measured_alone: bool = True,
    note: str = "",
) -> SingleGpuSpeed:
    """Converts a computation time of ResNet-50 to the planned network.

    All networks are assumed to run at ResNet-50's operations per second.
    """
    model_operations = sum(layer.operations for layer in layers_of(flags.model))
    resnet50_operations = sum(layer.operations for layer in layers_of("resnet50"))
    scale = model_operations / resnet50_operations
    return SingleGpuSpeed(
        GPUS[cluster.gpu].title,
        per_gpu_batch,
        compute_time.step_seconds(per_gpu_batch) * scale,
        compute_time.source,
        measured_alone,
        note,
    )


def _note_on_own_speed(flags: PlannerFlags, cluster: ClusterModel, own_speed: GpuSpeed) -> str:
    """Returns the line that --speed=auto chose this program's speed; else empty."""
    if flags.speed != "auto":
        return ""
    date = f", {own_speed.date}" if own_speed.date else ""
    note = f"speed: measured with this program on such a GPU (synthetic images{date})."
    published = cluster.compute_times.get(own_speed.precision)
    if published is not None:
        note += f" --speed=published takes the published speed ({published.source})."
    return note


def _note_on_published_speed(
    flags: PlannerFlags, title: str, own_speeds: Sequence[GpuSpeed]
) -> str:
    """Returns the line that --speed=auto chose a published speed, and why; else empty."""
    if flags.speed != "auto":
        return ""
    if not own_speeds:
        return (
            f"speed: published by others, because this program has not been measured on the {title}"
            " in this precision."
        )
    batches = " and ".join(f"--per_gpu_batch={speed.batch}" for speed in own_speeds)
    return (
        f"speed: published by others, because this program has been measured with {batches} only."
    )


def read_gpu_report(path: str, model: str, per_gpu_batch: int | None) -> SingleGpuSpeed:
    """Reads the speed of one GPU from the report.json that `bench gpu` writes.

    Args:
      path: Path of the file.
      model: The planned network.
      per_gpu_batch: Planned images per GPU and step; None takes the report's.

    Raises:
      UserError: If the file cannot be read, or measured another network, batch or image size.
    """
    try:
        with open(path, encoding="utf-8") as file:
            row = json.load(file)["rungs"]["one GPU"]
        title = f"{row['gpu'] or 'CPU'} in {row['precision']}"
        speed = SingleGpuSpeed(title, int(row["batch_per_rank"]), float(row["step_seconds"]), path)
        measured_model = str(row["model"])
        image_size = int(row["image_size"])
    except OSError as error:
        raise UserError(
            f"--speed={path} could not be read: {error.strerror}. Choose auto, own, published, or"
            " the report.json of hybrid-imagenet bench gpu."
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--speed={path} is not a report of hybrid-imagenet bench gpu ({error}). Choose its"
            " report.json."
        ) from None
    if image_size != _IMAGE_SIZE or not 0 < speed.step_seconds < math.inf:
        raise UserError(
            f"--speed={path} was measured with {image_size} pixels and {speed.step_seconds:g} s"
            f" per step. Choose a measurement with {_IMAGE_SIZE} pixels and a time above 0."
        )
    if measured_model != model or per_gpu_batch not in (None, speed.per_gpu_batch):
        planned = f"--model={model}"
        if per_gpu_batch:
            planned += f" --per_gpu_batch={per_gpu_batch}"
        raise UserError(
            f"--speed={path} measured {measured_model} at batch {speed.per_gpu_batch}, but the plan"
            f" is for {planned}. Run hybrid-imagenet bench gpu -- {planned} to measure it."
        )
    return speed
