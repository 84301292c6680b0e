"""Derives defaults from the hardware, the batch, the dataset and the number of GPUs.

`complete` is the last step of `config.resolve`: it returns a configuration without open values. A
run that is resumed keeps most of its values instead, see `resumed_run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import files
from hybrid_imagenet.cluster import gpus
from hybrid_imagenet.comm.settings import CommunicationFlags
from hybrid_imagenet.config import derived
from hybrid_imagenet.config.flags import GPU_BATCH, OptimizationFlags, RunFlags
from hybrid_imagenet.config.resumed_run import DECIDED_ONCE
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.depths import DEPTHS
from hybrid_imagenet.optimizers.registry import OPTIMIZERS, MomentumOptions
from hybrid_imagenet.options import Origin, format_value, options_of
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.relative_step import relative_step

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

# Compute capability of the Ampere generation.
_AMPERE = (8, 0)
# The fastest speed of ResNet-50 without XLA that was measured with this program (H200, FP16). On
# slower GPUs a run takes longer than it says, and gains more.
_TIMED_IMAGES_PER_SECOND = 6956
_TIMED_IMAGE_SIZE = 224
# A run of 530 s is as fast with XLA as without.
_MIN_SECONDS_TO_COMPILE = 600
# The batch of 8 GPUs with 256 images each, from which on README recommends LARS.
_MIN_BATCH_OF_LARS = 2048
# Values with these origins follow from the batch.
_DERIVED_AGAIN = (Origin.DEFAULT, Origin.BATCH)


def recommended_recipe(batch: int) -> str | None:
    """Returns the recipe with which to start, as README and docs/recipes.md recommend it.

    Args:
      batch: Images per step over all GPUs.

    Returns:
      None for a batch that is larger than those of MLPerf's table.
    """
    if batch < _MIN_BATCH_OF_LARS:
        return "gradual_warmup"
    return "mlperf_lars" if mlperf.covers(batch) else None


def recipe_note(config: RunConfig, classes: int | None) -> str | None:
    """Returns a line on the recipe of the run if it was not set, else None.

    Args:
      config: Configuration of the run.
      classes: Number of classes of the dataset, None if it is not known yet.
    """
    origin = config.origins["recipe"]
    if origin is Origin.DATA:
        return (
            f"No --recipe was set: using {config.run.recipe}, because the dataset is a"
            f" {config.data.dataset} of images. Set --recipe={RunFlags.recipe} for the method of Lu"
            " et al."
        )
    if origin is not Origin.DEFAULT:
        return None
    own_files = datasets.source_type(config.data.dataset).requires_data_dir
    if own_files and classes not in (None, mlperf.CLASSES):
        return (
            f"No --recipe was set: using {config.run.recipe}, which is meant for ImageNet on many"
            f" GPUs. This dataset has {classes} classes. Try --recipe=gradual_warmup."
        )
    batch = derived.base_batch(config)
    recommended = recommended_recipe(batch)
    note = f"No --recipe was set: using {config.run.recipe}, the method of Lu et al."
    if recommended is None:
        return f"{note} README recommends no recipe for a global batch of {batch:,}."
    return f"{note} At a global batch of {batch:,}, README recommends --recipe={recommended}."


def is_for_gpus(config: RunConfig) -> bool:
    """Returns whether a run is for GPUs.

    It is if this process would train on one, or if --print_config_gpus asks what a run on GPUs
    would do. The query loads no TensorFlow.
    """
    run = config.run
    assumes_gpus = run.print_config_gpus and (run.print_config or run.check_only)
    return bool(assumes_gpus) or gpus.in_use()


def default_batch(config: RunConfig) -> int:
    """Returns the default of --per_gpu_batch, which is larger on GPUs."""
    return GPU_BATCH if is_for_gpus(config) else OptimizationFlags.per_gpu_batch


def on_hardware(config: RunConfig, kept: Collection[str] = ()) -> RunConfig:
    """Returns the configuration with the defaults for GPUs, if the run is for GPUs.

    A resumed run that XLA compiles by default goes on without XLA if it cannot compile the step
    with the ranks and flags of this start.

    Args:
      config: Configuration of the run.
      kept: Flags that keep their value, because a run that is resumed has it.
    """
    is_kept_default = config.network.jit_compile and config.origins["jit_compile"] is Origin.RUN
    if is_kept_default and not _xla_can_compile_step(config):
        config = config.replace(Origin.HARDWARE, jit_compile=False)
    is_unset = config.origins["per_gpu_batch"] is Origin.DEFAULT and "per_gpu_batch" not in kept
    if not is_unset or not is_for_gpus(config):
        return config
    return config.replace(Origin.HARDWARE, per_gpu_batch=GPU_BATCH)


def decide_xla(config: RunConfig, images: int, precision: str | None = None) -> RunConfig:
    """Decides on a GPU what XLA compiles, where no flag sets it.

    Both decisions are stored with the run. A run that is resumed keeps them on any hardware, but
    see `on_hardware`.

    Args:
      config: Complete.
      images: Number of training images.
      precision: Name of a Keras dtype policy in which the network computes; by default the one that
        --precision has on this GPU.
    """
    undecided = [name for name in DECIDED_ONCE if config.origins[name] is Origin.DEFAULT]
    if not undecided or not gpus.in_use():
        return config
    capability = gpus.compute_capability()
    if precision is None:
        precision = config.network.precision
    if precision == "auto":
        precision = gpus.fast_precision(capability)
    decisions = {
        "jit_compile": _xla_compiles_step(config, images, precision, capability),
        "jit_stem": _xla_computes_stem(config, precision),
    }
    return config.replace(Origin.HARDWARE, **{name: decisions[name] for name in undecided})


def _xla_compiles_step(
    config: RunConfig, images: int, precision: str, capability: tuple[int, int] | None
) -> bool:
    """Returns whether XLA compiles forward and backward pass.

    On one H200 a step of ResNet-50 in FP16 was 4 % faster so, but its first step took 38 instead of
    12 s. So XLA is not the default

    * in other types and on GPUs before Ampere (compute capability 8.0), where it was not timed;
    * for runs of less than about ten minutes, which would take longer;
    * with several ranks, because gradients are then not reduced during the backward pass, and XLA
      cannot sum statistics over ranks;
    * with virtual GPUs, with which it was not timed;
    * with --deterministic, because XLA chooses kernels by their time at each start;
    * with schedules of batch or image size, each of whose stages would be compiled;
    * for other networks than ResNets, which were not measured and may not compile.
    """
    was_timed = (
        precision == "mixed_float16"
        and capability is not None
        and capability >= _AMPERE
        and config.network.model in DEPTHS
    )
    if not was_timed or not _xla_can_compile_step(config):
        return False
    work = images * config.run.epochs * (config.network.image_size / _TIMED_IMAGE_SIZE) ** 2
    return bool(work / _TIMED_IMAGES_PER_SECOND > _MIN_SECONDS_TO_COMPILE)


def _xla_can_compile_step(config: RunConfig) -> bool:
    """Returns whether ranks and flags permit that XLA compiles the step by default."""
    optimization = config.optimization
    has_schedule = optimization.batch_schedule or config.network.image_size_schedule
    return not (
        config.ranks > 1
        or optimization.virtual_gpus > 1
        or optimization.random_batch
        or config.run.deterministic
        or has_schedule
    )


def _xla_computes_stem(config: RunConfig, precision: str) -> bool:
    """Returns whether XLA compiles the end of a ResNet's stem as one program.

    It was timed in FP16 only. In FP32 TensorFlow may transpose activations around it, and nobody
    has checked that it computes the same bits at each start.
    """
    return precision == "mixed_float16" and not config.run.deterministic


def shared(config: RunConfig, broadcast: Callable[[Any], Any]) -> RunConfig:
    """Returns the configuration with the values that only rank 0 may know.

    Only the host of rank 0 needs the directory of a run that is resumed, and only rank 0 decides on
    the batch that follows from the hardware. Flags of this start keep the value that they have on
    this host, because a path below ~ may be another one.

    Args:
      config: Configuration of this rank.
      broadcast: Returns the object that rank 0 passed, as JSON has it, on every rank.

    Raises:
      UserError: If the ranks of this host already communicate in another way than rank 0, because
        they do not see the directory of the run.
    """
    values: dict[str, Any] = {}
    sent_values: dict[str, Any] = {}
    sent_origins: dict[str, str] = {}
    for name, value in config.as_dict().items():
        origin = config.origins[name]
        if origin in (Origin.COMMAND_LINE, Origin.FLAGFILE):
            values[name] = value
        else:
            sent_values[name] = value
            sent_origins[name] = origin.value
    received = broadcast({"values": sent_values, "origins": sent_origins})
    for name, value in received["values"].items():
        values[name] = tuple(value) if isinstance(value, list) else value
    origins = {name: Origin(origin) for name, origin in received["origins"].items()}
    shared_config = config.with_values(values, origins)
    for name in (*options_of(CommunicationFlags), "virtual_gpus", "deterministic"):
        if shared_config.get(name) != config.get(name):
            value = format_value(shared_config.get(name))
            raise UserError(
                f"--{name} is {format_value(config.get(name))} on this host, which does not"
                f" see the directory of the run. Add --{name}={value} to the command."
            )
    return shared_config


def complete(config: RunConfig) -> RunConfig:
    """Returns the configuration with the values that follow from batch, dataset and URL.

    Values from a recipe, a flag file or the command line are kept. A complete configuration is
    returned as it is. The derived values are:

    * with a --batch_schedule of numbers: --per_gpu_batch and --gradient_accumulation_steps, which
      belong to its first batch.
    * with data at a URL: --shuffle_window, because files are copied while they are read.
    * with --lr_schedule=mlperf: learning rate (not scaled further), warmup, momentum, weight decay
      and number of epochs of MLPerf's table, and the group of GPUs that normalizes about as many
      images as the table has.
    * with --optimizer=hybrid: the trust coefficient with which LARS has the relative step of that
      table as soon as it acts fully.
    """
    config = _with_first_batch(config)
    data = config.data
    window = datasets.source_type(data.dataset).url_shuffle_window
    if data.shuffle_window is None and files.is_url(data.data_dir or "") and window:
        config = config.replace(Origin.DATA, shuffle_window=window)
    if config.optimization.lr_schedule == "mlperf":
        config = _with_mlperf_row(config)
    method = OPTIMIZERS[config.optimization.optimizer]
    if method.bounded_warmup and config.origins["lars_eta"] in _DERIVED_AGAIN:
        config = _with_tuned_trust_coefficient(config)
    return config


def _with_first_batch(config: RunConfig) -> RunConfig:
    optimization = config.optimization
    first = derived.first_batch(config)
    before = (optimization.per_gpu_batch, optimization.gradient_accumulation_steps)
    if before == (first.per_gpu_batch, first.accumulation):
        return config
    if config.origins["per_gpu_batch"] is Origin.COMMAND_LINE:
        note = (
            f"command line has {optimization.per_gpu_batch}, but --batch_schedule begins with"
            f" {first.per_gpu_batch}"
        )
        config = dataclasses.replace(config, dropped={**config.dropped, "per_gpu_batch": note})
    return config.replace(
        config.origins["batch_schedule"],
        per_gpu_batch=first.per_gpu_batch,
        gradient_accumulation_steps=first.accumulation,
    )


def _with_tuned_trust_coefficient(config: RunConfig) -> RunConfig:
    """Sets --lars_eta so that the first step of LARS after warmup and ramp is the tuned one."""
    options = config.optimizer_options
    if options.layer_variant == "none":
        return config
    batch = derived.base_batch(config)
    schedule = derived.schedule(config)
    start = config.optimization.warmup_epochs + schedule.ramp_epochs
    first_values = schedule(start, start, batch)
    # LARC's clip limits the step, whatever the learning rate is.
    learning_rate = 1.0 if options.layer_variant == "larc" else first_values["learning_rate"]
    momentum = first_values["momentum"]
    factor = options.gradient_factor(momentum)
    step_of_eta_1 = relative_step(learning_rate, 1.0, momentum, factor)
    if step_of_eta_1 <= 0:
        return config
    return config.replace(Origin.BATCH, lars_eta=mlperf.tuned_step(batch) / step_of_eta_1)


def _with_mlperf_row(config: RunConfig) -> RunConfig:
    point = mlperf.point_at(derived.base_batch(config))
    learning_rate = point.lr
    options = config.optimizer_options
    if isinstance(options, MomentumOptions) and config.origins["momentum"] is Origin.RUN:
        # A resumed run keeps its momentum. This rate gives it the relative step of the table.
        learning_rate *= (1 - options.momentum) / (1 - point.momentum)
    row: dict[str, Any] = {
        "lr": learning_rate,
        "lr_scaling": "none",
        "warmup_epochs": point.warmup_epochs,
        "warmup_start_lr": 0.0,
        "momentum": point.momentum,
        "weight_decay": point.weight_decay,
        "epochs": round(point.schedule_epochs),
    }
    if not config.network.sync_batch_norm and ":" not in config.network.model:
        row["bn_group"] = _normalization_group(config, point.normalized_images)
    unset = {
        name: value for name, value in row.items() if config.origins.get(name) in _DERIVED_AGAIN
    }
    return config.replace(Origin.BATCH, **unset)


def _normalization_group(config: RunConfig, images: int) -> int:
    """Returns the --bn_group that normalizes about this number of images.

    A group must divide the GPUs, and be a part or a multiple of the virtual GPUs of a rank. XLA
    does not compile sums over ranks, so with --jit_compile it is within a rank.
    """
    virtual_gpus = config.optimization.virtual_gpus
    largest = virtual_gpus if config.network.jit_compile else config.gpus
    groups = []
    for group in range(1, min(largest, config.gpus) + 1):
        fits_rank = virtual_gpus % group == 0 or group % virtual_gpus == 0
        if config.gpus % group == 0 and fits_rank:
            groups.append(group)
    return mlperf.normalization_group(images, config.optimization.per_gpu_batch, groups)
