"""Settles what nobody has set: as the run that is resumed had it, or by the batch, the data and the
number of GPUs.

A default that has changed since a run began must not act on it. `complete` is the last step of
`config.resolve`: what comes out needs no further look at defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import files
from hybrid_imagenet.comm import gpus
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.config import derived, stored
from hybrid_imagenet.config.flags import CHOICES, GPU_BATCH, OPTIONS, Run
from hybrid_imagenet.data import datasets
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.depths import DEPTHS
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import Origin, check_value
from hybrid_imagenet.runlog import run_dir
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.relative_step import relative_step

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

_FREE = (Origin.DEFAULT, Origin.BATCH)
_LASTING = (
    "lr_scaling",
    "warmup_epochs",
    "warmup_start_lr",
    "momentum",
    "weight_decay",
    "epochs",
    "eval_offset_epochs",
)
"""What MLPerf's table gives a run for all of it."""
_REPLACEABLE = (
    Origin.DEFAULT,
    Origin.RECIPE,
    Origin.HARDWARE,
)  # by the value of the run that is resumed
# What a run has under these origins was not set by anyone.
_UNASKED = [origin.value for origin in (*_REPLACEABLE, Origin.RUN)]


def recipe(
    dataset: str, *, flagfile: bool, resume: bool, run_dir_flag: str | None
) -> tuple[str, Origin]:
    """Chooses the recipe of a run without --recipe.

    A run that is resumed keeps its recipe. Otherwise a flag file implies hybrid, which is what flag
    files have always been written for, and without one the dataset decides.

    Args:
      dataset: --dataset.
      flagfile: whether a flag file was read.
      resume: --resume.
      run_dir_flag: --run_dir.

    Returns:
      The name of the recipe, and what has set it.

    Raises:
      UserError: if the config.json of the run that is resumed cannot be read.
    """
    by_dataset = Run.recipe if flagfile else datasets.source_type(dataset).default_recipe
    origin = Origin.DEFAULT if by_dataset == Run.recipe else Origin.DATA
    if resume:
        # Without --run_dir the directory is named after the recipe. Runs that began when hybrid was
        # the default of all datasets are in a directory of that name.
        for name in dict.fromkeys((by_dataset, Run.recipe)):
            directory = run_dir.choose_directory(run_dir_flag, name, dataset, resume=True)
            if not (directory / "config.json").exists():
                continue
            earlier = stored.read(directory)["flags"].get("recipe")
            if isinstance(earlier, str):
                return (
                    earlier,
                    Origin.DEFAULT if earlier == by_dataset == Run.recipe else Origin.RUN,
                )
    return by_dataset, origin


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


def description(config: RunConfig) -> Mapping[str, Any]:
    """Returns the config.json of the run that is to be resumed; empty where there is none, and on
    ranks other than 0.

    Raises:
      UserError: if it is empty, cut or describes no run: today's defaults must not take the place
        of the run's.
    """
    if not config.resume or placement().rank:
        return {}
    directory = run_dir.choose_directory(config.run_dir, config.recipe, config.dataset, resume=True)
    return stored.read(directory) if (directory / "config.json").exists() else {}


def on_hardware(config: RunConfig) -> RunConfig:
    """Returns the configuration with the defaults for GPUs, if the run is for GPUs.

    It is if this process would train on one, or if --print_config_gpus asks what a run on GPUs
    would do. The query loads no TensorFlow.
    """
    defaults: dict[str, Any] = {"per_gpu_batch": GPU_BATCH}
    if xla_compiles_by_default(config):
        defaults["jit_compile"] = True
    unset = {name: v for name, v in defaults.items() if config.origins[name] is Origin.DEFAULT}
    assumed = config.print_config_gpus and (config.print_config or config.check_only)
    if not unset or not (assumed or gpus.in_use()):
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


def of_earlier_run(config: RunConfig, earlier: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with the earlier run's settings, where nobody sets them for this
    start.

    They are its order of images, the options of its optimizer, and what it had by default or from
    the recipe of that name. What followed from the batch or the data does so again: on other ranks
    the learning rate, but not the length of the run and the rest of MLPerf's table, which would be
    another schedule.

    Args:
      config: of this start.
      earlier: `description` of the run.

    Raises:
      UserError: if the recipe or the default of an optimizer, a schedule or an all-reduce is
        another one now, or a value exists no more.
    """
    if not earlier:
        return config
    flags, origins = ({**earlier.get(key, {})} for key in ("flags", "origins"))
    if "shuffle_window" in flags:
        flags["shuffle_window"] = (
            flags["shuffle_window"] or 0
        )  # the window of data at a URL must not take its place
    always = {"seed", "shuffle_window"}  # the rest of an epoch is that of its order
    if flags.get("optimizer") == config.optimizer:
        always |= {
            name
            for name in CHOICES["optimizer"][config.optimizer]
            if origins.get(name) != Origin.BATCH.value
        }
    by_table = flags.get("lr_schedule") == config.lr_schedule == "mlperf"
    lasting = {
        name
        for name in _LASTING
        if by_table
        and config.origins.get(name) is Origin.DEFAULT
        and origins.get(name) in (Origin.BATCH.value, Origin.RUN.value)
    }
    alike = flags.get("recipe") == config.recipe
    kept, notes = {}, {}
    for name, now in config.shown().items():
        origin = config.origins[name]
        if name not in flags or origin not in _REPLACEABLE:
            continue
        then = flags[name]
        asked = (
            origins.get(name) not in _UNASKED or name == "shuffle_window"
        )  # whose 0 stands for None
        changed = alike and not asked and then != now and name not in lasting
        if changed and name in CHOICES:
            raise UserError(
                f"the run began with --{name}={then}, and the {origin.value} is {now} now: give"
                " either"
            )
        if changed or name in lasting or (name in always and origin is Origin.DEFAULT):
            kept[name] = tuple(then) if isinstance(then, list) else then
            check_value(name, kept[name], OPTIONS[name])
        if changed:
            where = "on this machine" if origin is Origin.HARDWARE else "in this version"
            notes[name] = f"the {origin.value} has {now} {where}, but the run began with {then}"
    return dataclasses.replace(
        config.replace(Origin.RUN, **kept), dropped={**config.dropped, **notes}
    )


def shared(config: RunConfig, broadcast: Callable[[Any], Any]) -> RunConfig:
    """Returns the configuration with what only rank 0 may know.

    It is what rank 0 has taken over from the run, whose directory need not be on the other hosts,
    and the batch that follows from rank 0's hardware.

    Raises:
      UserError: if this rank has chosen another recipe than rank 0, because it does not see the
        run's directory.
    """
    own = {
        name: value for name, value in config.values().items() if config.origins[name] is Origin.RUN
    }
    first = broadcast({"recipe": config.recipe, "per_gpu_batch": config.per_gpu_batch, "run": own})
    if config.recipe != first["recipe"]:
        raise UserError(
            f"--recipe={config.recipe} on this host, but {first['recipe']} on that of rank 0, which"
            f" has the directory of the run. Add --recipe={first['recipe']} to the command."
        )
    if "per_gpu_batch" not in first["run"] and config.per_gpu_batch != first["per_gpu_batch"]:
        config = config.replace(Origin.HARDWARE, per_gpu_batch=first["per_gpu_batch"])
    return complete(config.replace(Origin.RUN, **first["run"]))


def complete(config: RunConfig) -> RunConfig:
    """The configuration with the settings that follow from the batch at the start of the run, and
    from a URL.

    With --lr_schedule=mlperf these are the learning rate (which is then not scaled), warmup,
    momentum, weight decay and number of epochs of MLPerf's table (`schedules.mlperf`), the offset
    by which a validation falls on the epoch in which the target is expected, and the group of GPUs
    that normalizes about as many images as the table has; with --optimizer=hybrid the trust
    coefficient, which gives LARS the relative step of that table as soon as it has come in. A
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
    if OPTIMIZERS[config.optimizer].bounded_warmup and config.origins["lars_eta"] in _FREE:
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
        "eval_offset_epochs": point.evaluation_offset(config.eval_every_epochs),
    }
    if not config.sync_batch_norm and ":" not in config.model:
        table["bn_group"] = _table_group(config, point.normalized_images)
    return config.replace(
        Origin.BATCH, **{name: v for name, v in table.items() if config.origins.get(name) in _FREE}
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
