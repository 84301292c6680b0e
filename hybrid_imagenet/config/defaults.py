"""Works out the defaults that follow from the batch, the data and the number of GPUs.

`complete` is the last step of `config.resolve`: what comes out needs no further look at defaults.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hybrid_imagenet.config import derived
from hybrid_imagenet.config.options import Origin
from hybrid_imagenet.data import registry
from hybrid_imagenet.numerics import mlperf, schedules
from hybrid_imagenet.numerics.relative_step import relative_step
from hybrid_imagenet.optimizers.registry import OPTIMIZERS

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

_FREE = (Origin.DEFAULT, Origin.BATCH)


def complete(config: RunConfig) -> RunConfig:
    """The configuration with the settings that follow from the batch at the start of the run, and from a URL.

    With --lr_schedule=mlperf these are the learning rate (which is then not scaled), warmup, momentum, weight decay
    and number of epochs of MLPerf's table (`numerics.mlperf`), the offset by which a validation falls on the epoch in
    which the target is expected, and the group of GPUs that normalizes about as many images as the table has; with
    --optimizer=hybrid the trust coefficient, which gives LARS the relative step of that table as soon as it has come
    in. A recipe, a flag file or the command line goes before them. A completed configuration stays as it is.

    Files at a URL are copied while they are read: there --shuffle_window is that of `data.registry`, unless it is set.
    """
    window = registry.of(config.dataset).url_window
    if config.shuffle_window is None and "://" in (config.data_dir or "") and window:
        config = config.replace(Origin.DATA, shuffle_window=window)
    if config.lr_schedule == "mlperf":
        config = _from_table(config)
    if OPTIMIZERS[config.optimizer].bounded_warmup and config.origins["lars_eta"] in _FREE:
        config = _tuned_lars(config)
    return config


def _tuned_lars(config: RunConfig) -> RunConfig:
    """Sets --lars_eta so that LARS has the tuned relative step in its first step after the warmup and the ramp."""
    variant = config.chosen["lars_variant"]
    if variant == "none":
        return config
    batch = derived.base_batch(config)
    begins = config.warmup_epochs + config.chosen["hybrid_ramp_epochs"]
    first = schedules.create(**derived.schedule_arguments(config))(begins, begins, batch)
    rate, momentum = first["learning_rate"], first["momentum"]
    factor = derived.gradient_factor(config, momentum)
    of_one = relative_step(1.0 if variant == "larc" else rate, 1.0, momentum, factor)
    if of_one <= 0:
        return config
    return config.replace(Origin.BATCH, lars_eta=mlperf.tuned_step(batch) / of_one)


def _from_table(config: RunConfig) -> RunConfig:
    point = mlperf.at(derived.base_batch(config))
    table: dict[str, Any] = {
        "lr": point.lr,
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
    return config.replace(Origin.BATCH, **{name: v for name, v in table.items() if config.origins.get(name) in _FREE})


def _table_group(config: RunConfig, images: int) -> int:
    """--bn_group for this many images, among the groups that these GPUs, --virtual_gpus and --jit_compile allow."""
    virtual, gpus = config.virtual_gpus, config.gpus
    groups = [g for g in range(1, gpus + 1) if gpus % g == 0 and (virtual % g == 0 or g % virtual == 0)]
    return mlperf.normalization_group(
        images, config.per_gpu_batch, [g for g in groups if g <= virtual or not config.jit_compile]
    )
