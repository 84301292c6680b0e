"""Settles what nobody has set: as the run that is resumed had it, or by the batch, the data and the
number of GPUs.

A default that has changed since a run began must not act on it. `complete` is the last step of
`config.resolve`: what comes out needs no further look at defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import files
from hybrid_imagenet.comm import gpus
from hybrid_imagenet.comm.settings import CommunicationFlags
from hybrid_imagenet.config import derived
from hybrid_imagenet.config.flags import GPU_BATCH, Optimization, Run
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.depths import DEPTHS
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import Origin, format_value, options_of
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.relative_step import relative_step

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

# Values with these origins are derived again.
_DERIVED_AGAIN = (Origin.DEFAULT, Origin.BATCH)


def recipe_note(config: RunConfig, classes: int | None) -> str | None:
    """Returns a line on the recipe if it was not set and the dataset is not ImageNet, else None.

    Args:
      config: of the run.
      classes: number of classes of the dataset, None if it is not known yet.
    """
    origin = config.origins["recipe"]
    if origin is Origin.DATA:
        return (
            f"No --recipe was set: using {config.recipe}, because the dataset is a {config.dataset}"
            f" of images. Set --recipe={Run.recipe} for the method of Lu et al."
        )
    own_files = datasets.source_type(config.dataset).requires_data_dir
    if origin is Origin.DEFAULT and own_files and classes not in (None, mlperf.CLASSES):
        return (
            f"No --recipe was set: using {config.recipe}, which is meant for ImageNet on many GPUs."
            f" This dataset has {classes} classes. Try --recipe=gradual_warmup."
        )
    return None


def is_for_gpus(config: RunConfig) -> bool:
    """Returns whether a run is for GPUs.

    It is if this process would train on one, or if --print_config_gpus asks what a run on GPUs
    would do. The query loads no TensorFlow.
    """
    assumes_gpus = config.print_config_gpus and (config.print_config or config.check_only)
    return bool(assumes_gpus) or gpus.in_use()


def default_batch(config: RunConfig) -> int:
    """Returns the default of --per_gpu_batch, which is larger on GPUs."""
    return GPU_BATCH if is_for_gpus(config) else Optimization.per_gpu_batch


def on_hardware(config: RunConfig, kept: Collection[str] = ()) -> RunConfig:
    """Returns the configuration with the defaults for GPUs, if the run is for GPUs.

    Args:
      config: of the run.
      kept: flags that keep their value, because a run that is resumed has it.
    """
    defaults: dict[str, Any] = {"per_gpu_batch": GPU_BATCH}
    if xla_compiles_by_default(config):
        defaults["jit_compile"] = True
    unset = {
        name: value
        for name, value in defaults.items()
        if config.origins[name] is Origin.DEFAULT and name not in kept
    }
    if not unset or not is_for_gpus(config):
        return config
    return config.replace(Origin.HARDWARE, **unset)


def xla_compiles_by_default(config: RunConfig) -> bool:
    """Returns whether XLA compiles forward and backward pass on a GPU if --jit_compile is not set.

    On one H200 a step of ResNet-50 was 4 % faster so, but its first step took 38 instead of 12 s.
    So it is off

    * with several ranks, because gradients are then not reduced beside the backward pass, and XLA
      cannot sum statistics over ranks;
    * with --deterministic, because XLA chooses kernels by their time at each start;
    * with schedules of batch or image size, each of whose stages would be compiled;
    * for other networks than ResNets, which were not measured and may not compile.
    """
    if config.ranks > 1 or config.deterministic or config.random_batch:
        return False
    if config.batch_schedule or config.image_size_schedule:
        return False
    return config.model in DEPTHS


def shared(config: RunConfig, broadcast: Callable[[Any], Any]) -> RunConfig:
    """Returns the configuration with the values that only rank 0 may know.

    Only the host of rank 0 needs the directory of a run that is resumed, and only rank 0 decides on
    the batch that follows from the hardware. Flags of this start keep the value that they have on
    this host, because a path below ~ may be another one.

    Args:
      config: of this rank.
      broadcast: returns the object that rank 0 passed, as JSON has it, on every rank.

    Raises:
      UserError: if the ranks of this host already communicate in another way than rank 0, because
        they do not see the directory of the run.
    """
    given: dict[str, Any] = {}
    not_given: dict[str, Any] = {}
    for name, value in config.values().items():
        is_given = config.origins[name] in (Origin.COMMAND_LINE, Origin.FLAGFILE)
        (given if is_given else not_given)[name] = value
    origins = {name: config.origins[name].value for name in not_given}
    of_rank_0 = broadcast({"values": not_given, "origins": origins})
    values = given
    for name, value in of_rank_0["values"].items():
        values[name] = tuple(value) if isinstance(value, list) else value
    same = config.with_values(
        values, {name: Origin(origin) for name, origin in of_rank_0["origins"].items()}
    )
    for name in (*options_of(CommunicationFlags), "virtual_gpus", "deterministic"):
        if getattr(same, name) != getattr(config, name):
            value = format_value(getattr(same, name))
            raise UserError(
                f"--{name} is {format_value(getattr(config, name))} on this host, which does not"
                f" see the directory of the run. Add --{name}={value} to the command."
            )
    return same


def complete(config: RunConfig) -> RunConfig:
    """The configuration with the settings that follow from the batch at the start of the run, and
    from a URL.

    With --lr_schedule=mlperf these are the learning rate (which is then not scaled), warmup,
    momentum, weight decay and number of epochs of MLPerf's table (`schedules.mlperf`), and the
    group of GPUs that normalizes about as many images as the table has; with --optimizer=hybrid the
    trust coefficient, which gives LARS the relative step of that table as soon as it has come in. A
    recipe, a flag file or the command line goes before them. A completed configuration stays as it
    is.

    --per_gpu_batch is the batch with which a --batch_schedule begins. Files at a URL are copied
    while they are read: there --shuffle_window is that of `data.datasets`, unless it is set.
    """
    first = derived.first_batch(config)
    found = {
        "per_gpu_batch": first.per_gpu_batch,
        "gradient_accumulation_steps": first.accumulation,
    }
    if found.items() - config.values().items():
        if config.origins["per_gpu_batch"] is Origin.COMMAND_LINE:
            note = (
                f"command line has {config.per_gpu_batch}, but --batch_schedule begins with"
                f" {first.per_gpu_batch}"
            )
            config = dataclasses.replace(config, dropped={**config.dropped, "per_gpu_batch": note})
        config = config.replace(config.origins["batch_schedule"], **found)
    window = datasets.source_type(config.dataset).url_shuffle_window
    if config.shuffle_window is None and files.is_url(config.data_dir or "") and window:
        config = config.replace(Origin.DATA, shuffle_window=window)
    if config.lr_schedule == "mlperf":
        config = _from_table(config)
    if OPTIMIZERS[config.optimizer].bounded_warmup and config.origins["lars_eta"] in _DERIVED_AGAIN:
        config = _tuned_lars(config)
    return config


def _tuned_lars(config: RunConfig) -> RunConfig:
    """Sets --lars_eta so that LARS has the tuned relative step in its first step after the warmup
    and the ramp.
    """
    variant = config.chosen["lars_variant"]
    if variant == "none":
        return config
    batch = derived.base_batch(config)
    begins = config.warmup_epochs + config.chosen["hybrid_ramp_epochs"]
    first = derived.schedule(config)(begins, begins, batch)
    rate, momentum = first["learning_rate"], first["momentum"]
    factor = derived.gradient_factor(config, momentum)
    of_one = relative_step(1.0 if variant == "larc" else rate, 1.0, momentum, factor)
    if of_one <= 0:
        return config
    return config.replace(Origin.BATCH, lars_eta=mlperf.tuned_step(batch) / of_one)


def _from_table(config: RunConfig) -> RunConfig:
    point = mlperf.point_at(derived.base_batch(config))
    rate = point.lr
    if (
        config.origins.get("momentum") is Origin.RUN
    ):  # it stays, so the rate has the table's relative step with it
        rate *= (1 - config.chosen["momentum"]) / (1 - point.momentum)
    table: dict[str, Any] = {
        "lr": rate,
        "lr_scaling": "none",
        "warmup_epochs": point.warmup_epochs,
        "warmup_start_lr": 0.0,
        "momentum": point.momentum,
        "weight_decay": point.weight_decay,
        "epochs": round(point.schedule_epochs),
    }
    if not config.sync_batch_norm and ":" not in config.model:
        table["bn_group"] = _table_group(config, point.normalized_images)
    return config.replace(
        Origin.BATCH,
        **{name: v for name, v in table.items() if config.origins.get(name) in _DERIVED_AGAIN},
    )


def _table_group(config: RunConfig, images: int) -> int:
    """--bn_group for this many images, among the groups that these GPUs, --virtual_gpus and
    --jit_compile allow.
    """
    virtual, gpus = config.virtual_gpus, config.gpus
    groups = [
        g for g in range(1, gpus + 1) if gpus % g == 0 and (virtual % g == 0 or g % virtual == 0)
    ]
    return mlperf.normalization_group(
        images, config.per_gpu_batch, [g for g in groups if g <= virtual or not config.jit_compile]
    )
