"""Checks flags that depend on each other. Each rule raises UserError, which names the flags."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import math
import typing

from hybrid_imagenet.comm import torus
from hybrid_imagenet.comm.settings import GridOptions
from hybrid_imagenet.config.derived import batches, sizes
from hybrid_imagenet.config.flags import COMMON, DataFlags
from hybrid_imagenet.errors import UserError, pluralize
from hybrid_imagenet.models import keras_families
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import Origin
from hybrid_imagenet.schedules.training_schedule import (
    FIXED_SCHEDULES,
    FLAGS_IGNORED_BY_FIXED,
    MomentumRule,
    StepDecay,
)

if typing.TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig


def check(config: RunConfig) -> None:
    """Applies every rule to a complete configuration."""
    for rule in RULES:
        rule(config)


def _warmup_fits(config: RunConfig) -> None:
    optimization = config.optimization
    # A short trial of a recipe or flag file may end during the warmup. Two contradicting flags on
    # the command line are a mistake.
    is_on_command_line = config.origins.get("warmup_epochs") is Origin.COMMAND_LINE
    if (
        is_on_command_line
        and OPTIMIZERS[optimization.optimizer].bounded_warmup
        and optimization.warmup_epochs > config.run.epochs
    ):
        raise UserError(
            f"--warmup_epochs={optimization.warmup_epochs:g} is longer than"
            f" --epochs={config.run.epochs:g}. Lower the first or raise the second."
        )


def _number_of_gpus_is_used(config: RunConfig) -> None:
    if config.run.print_config_gpus and not (config.run.print_config or config.run.check_only):
        raise UserError(
            "--print_config_gpus needs --print_config or --check_only. Add one of the two, or omit"
            " --print_config_gpus."
        )


def _profile_has_a_first_and_a_last_step(config: RunConfig) -> None:
    steps = config.run.profile_steps
    if steps and (len(steps) != 2 or steps[0] > steps[1]):
        raise UserError(
            f"--profile_steps={','.join(map(str, steps))} is invalid. Set the first and the last"
            " step, as in 10,20."
        )


def _allreduce_fits(config: RunConfig) -> None:
    communication = config.communication
    if communication.compression == "bf16" and communication.allreduce != "ring":
        raise UserError(
            f"--compression=bf16 has its own exchange. Omit --allreduce={communication.allreduce},"
            " or use --compression=fp16."
        )
    options = config.allreduce_options
    if isinstance(options, GridOptions) and options.torus_grid is not None:
        try:
            torus.parse_grid(options.torus_grid)
        except ValueError as error:
            raise UserError(f"--torus_grid: {error}") from None


def _schedule_is_possible(config: RunConfig) -> None:
    optimization = config.optimization
    method = OPTIMIZERS[optimization.optimizer]
    if optimization.lr_schedule in (*FIXED_SCHEDULES, "mlperf") and (
        method.bounded_warmup or method.rate != "lr" or method.example_rate is not None
    ):
        raise UserError(
            f"--lr_schedule={optimization.lr_schedule} has its own warmup, so it cannot be"
            " combined with"
            f" --optimizer={optimization.optimizer}. Use --optimizer=sgd or lars, or another"
            " schedule."
        )
    if (
        optimization.lr_schedule == "mlperf"
        and optimization.optimizer != "lars"
        and config.origins["lr"] is Origin.DEFAULT
    ):
        raise UserError(
            f"--optimizer={optimization.optimizer} cannot use the learning rates of"
            " --lr_schedule=mlperf, which are for LARS. Set --lr."
        )
    for name in FLAGS_IGNORED_BY_FIXED if optimization.lr_schedule in FIXED_SCHEDULES else ():
        if config.origins.get(name) is Origin.COMMAND_LINE:
            raise UserError(
                f"--{name} cannot be combined with --lr_schedule={optimization.lr_schedule}, whose"
                " rates are those of the paper. Omit it, and change the step with --lars_eta."
            )
    rule = config.rule(MomentumRule)
    is_momentum_set = config.origins.get("momentum") is Origin.COMMAND_LINE
    if rule and rule.momentum_rule != "constant" and is_momentum_set:
        raise UserError(
            f"--momentum cannot be combined with --momentum_rule={rule.momentum_rule}, which"
            " derives it from the batch. Omit one of them."
        )
    decay = config.schedule_options
    steps = list(decay.lr_steps) if isinstance(decay, StepDecay) else []
    if steps != sorted(set(steps)):
        raise UserError(
            f"--lr_steps={','.join(f'{e:g}' for e in steps)} is not in ascending order. Sort the"
            " epochs, and set each once."
        )


def _learning_rate_is_of_the_optimizer(config: RunConfig) -> None:
    optimization = config.optimization
    # The default and the rates of recipes are those of SGD. AdamW would diverge with them.
    rate = OPTIMIZERS[optimization.optimizer].example_rate
    origin = config.origins["lr"]
    if rate is not None and origin in (Origin.DEFAULT, Origin.RECIPE):
        raise UserError(
            f"--optimizer={optimization.optimizer} needs its own learning rate, because"
            f" {optimization.lr:g} is that of SGD. Add --lr={rate:g} --lr_scaling=none."
        )


def _batches_are_possible(config: RunConfig) -> None:
    try:
        schedule = batches(config)
    except ValueError as error:
        raise UserError(f"--batch_schedule: {error}") from None
    if config.network.sync_batch_norm and any(stage.accumulation > 1 for stage in schedule.stages):
        raise UserError(
            "--gradient_accumulation_steps above 1 cannot be combined with --sync_batch_norm,"
            " because statistics over all images of an update need all micro-batches at once. Set"
            " --gradient_accumulation_steps=1, or omit --sync_batch_norm."
        )


def _normalization_groups_are_possible(config: RunConfig) -> None:
    group = config.network.bn_group
    virtual = config.optimization.virtual_gpus
    if config.network.sync_batch_norm and group > 1:
        raise UserError(
            f"--bn_group={group} cannot be combined with --sync_batch_norm, which is one group."
            " Omit one of them."
        )
    if virtual % group and group % virtual:
        raise UserError(
            f"--bn_group={group} cannot be combined with --virtual_gpus={virtual}, because a group"
            " must be a part of a rank's GPUs or hold all GPUs of its ranks. Choose two numbers of"
            " which one divides the other."
        )


def _loss_scale_is_a_number(config: RunConfig) -> None:
    loss_scale = config.network.loss_scale
    with contextlib.suppress(ValueError):
        if loss_scale in ("auto", "dynamic") or 0 < float(loss_scale) < math.inf:
            return
    raise UserError(
        f"--loss_scale={loss_scale} is invalid. Set auto, dynamic or a positive number."
    )


def _average_has_a_decay(config: RunConfig) -> None:
    optimization = config.optimization
    if optimization.ema_every > 1 and not optimization.ema_decay:
        raise UserError(
            f"--ema_every={optimization.ema_every} needs --ema_decay. Add --ema_decay, or omit"
            " --ema_every."
        )


def _random_batches_are_possible(config: RunConfig) -> None:
    if not config.optimization.random_batch:
        return
    flag = f"--random_batch={config.optimization.random_batch}"
    if not config.network.sync_batch_norm:
        raise UserError(
            f"{flag} needs --sync_batch_norm, which weights the moments of unequal batches. Add it."
        )
    if config.network.jit_compile:
        raise UserError(f"{flag} cannot be combined with --jit_compile. Omit one of them.")
    if config.network.model_width % 16:
        raise UserError(
            f"{flag} cannot be combined with --model_width={config.network.model_width}, because"
            " on CPUs TensorFlow's convolutions of such widths overwrite memory when the size of"
            " the batch changes. Set --model_width to a multiple of 16."
        )
    smallest = min(stage.per_gpu_batch for stage in batches(config).stages)
    if config.optimization.random_batch > smallest:
        raise UserError(
            f"{flag} is too large, because a GPU has a batch of {smallest} images. Set at most that"
            " number."
        )


def _images_can_be_mixed(config: RunConfig) -> None:
    for name in ("mixup_alpha", "cutmix_alpha"):
        value = config.get(name)
        if not value:
            continue
        if config.optimization.random_batch:
            raise UserError(
                f"--{name}={value:g} cannot be combined with --random_batch, which changes the"
                " number of images that can be mixed. Omit one of them."
            )
        if min(stage.per_gpu_batch for stage in batches(config).stages) < 2:
            raise UserError(
                f"--{name}={value:g} mixes the images of a GPU's batch, which has only one. Set"
                " --per_gpu_batch to 2 or more."
            )


def _tuning_split_is_a_number_of_images(config: RunConfig) -> None:
    data = config.data
    if data.tuning_split >= 1 and not data.tuning_split.is_integer():
        raise UserError(
            f"--tuning_split={data.tuning_split:g} is invalid. Set a whole number of images, or a"
            " fraction of them below 1."
        )
    if not data.tuning_split and config.origins.get("eval_split") is Origin.COMMAND_LINE:
        raise UserError(
            f"--eval_split={data.eval_split} needs --tuning_split. Add --tuning_split, or omit"
            " --eval_split."
        )


_RESNET_FLAGS = (
    "blurpool",
    "eval_image_size",
    "image_size_schedule",
    "model_width",
    "stem",
    "virtual_gpus",
)


def _alexnet_has_no_flags_of_resnets(config: RunConfig) -> None:
    for name in _RESNET_FLAGS:
        if config.network.model == "alexnet_bn" and config.get(name) != COMMON[name].default:
            raise UserError(
                f"--{name} cannot be combined with --model=alexnet_bn. Omit it, or use a ResNet."
            )


# Other networks ignore these flags, so a recipe or a flag file may have them.
_IGNORED_BY_OTHER_NETWORKS = (
    "model_width",
    "stem",
    "initializer",
    "zero_last_gamma",
    "batch_norm",
)
# Other networks do not support these flags.
_NOT_FOR_OTHER_NETWORKS = (
    "sync_batch_norm",
    "bn_group",
    "virtual_gpus",
    "image_size_schedule",
    "ema_decay",
    "blurpool",
    "eval_image_size",
)


def _keras_network_exists(config: RunConfig) -> None:
    if keras_families.is_keras_network(config.network.model):
        keras_families.family_of(config.network.model)


def _own_network_has_no_flags(config: RunConfig) -> None:
    if ":" not in config.network.model:
        return
    wrong = [
        name
        for name in _IGNORED_BY_OTHER_NETWORKS
        if config.origins.get(name) is Origin.COMMAND_LINE
    ]
    wrong += [name for name in _NOT_FOR_OTHER_NETWORKS if config.get(name) != COMMON[name].default]
    if wrong:
        name = wrong[0]
        raise UserError(
            f"--{name}={config.get(name)} is for the built-in networks. Omit it with"
            f" --model={config.network.model}."
        )


def _image_sizes_are_possible(config: RunConfig) -> None:
    try:
        sizes(config.network)
    except ValueError as error:
        raise UserError(f"--image_size_schedule: {error}") from None


def check_classes(data: DataFlags, classes: int) -> None:
    """Checks the number of classes of the training images.

    Raises:
      UserError: If it is 1, or another number than --num_classes.
    """
    if data.num_classes not in (None, classes):
        raise UserError(
            f"--num_classes={data.num_classes} is wrong, because {data.dataset} has {classes}"
            " classes. Omit it."
        )
    if classes == 1:
        raise UserError(
            f"--dataset={data.dataset} has one class, but training needs at least two. Check"
            " --data_dir."
        )


def check_data(config: RunConfig, num_examples: int) -> None:
    """Checks the batches of all epochs against the dataset.

    Raises:
      UserError: If an update needs more images than an epoch has.
    """
    for stage in batches(config).stages:
        batch = stage.global_batch(config.gpus)
        if batch > num_examples:
            micro = f" x {stage.accumulation} micro-batches" if stage.accumulation > 1 else ""
            flag = f"batch_schedule={','.join(config.optimization.batch_schedule)}"
            if not stage.epoch:
                flag = f"per_gpu_batch={config.optimization.per_gpu_batch}"
            raise UserError(
                f"--{flag}: {stage.per_gpu_batch} images{micro} on {pluralize(config.gpus, 'GPU')}"
                f" make a batch of {batch} from epoch {stage.epoch} on, but there are"
                f" {num_examples} training images. Lower --{flag.partition('=')[0]}, or use"
                " fewer GPUs."
            )


def find_network_module(target: str) -> str | None:
    """Returns the file of the module in --model=MODULE:FUNCTION.

    The module is not imported, because it may import TensorFlow. Whether it has the function is
    found when the network is built.

    Raises:
      UserError: If there is no such module.
    """
    spec = _find_spec(target.partition(":")[0])
    if spec is None:
        raise UserError(
            f"--model={target}: there is no such module. Use a module in this directory or in"
            " PYTHONPATH."
        )
    return spec.origin


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec of a module, or None if there is no such module.

    `importlib.util.find_spec` of the whole name would import the packages above the module.
    """
    path, *remaining_names = module.split(".")
    try:
        spec = importlib.util.find_spec(path)
        for name in remaining_names:
            path = f"{path}.{name}"
            directories = spec and spec.submodule_search_locations
            if not directories:
                return None
            spec = importlib.machinery.PathFinder.find_spec(path, list(directories))
    except (ImportError, KeyError, ValueError):
        # KeyError is raised for a directory without __init__.py above the module.
        return None
    return spec


RULES = (
    _warmup_fits,
    _number_of_gpus_is_used,
    _profile_has_a_first_and_a_last_step,
    _allreduce_fits,
    _schedule_is_possible,
    _learning_rate_is_of_the_optimizer,
    _batches_are_possible,
    _normalization_groups_are_possible,
    _image_sizes_are_possible,
    _alexnet_has_no_flags_of_resnets,
    _keras_network_exists,
    _own_network_has_no_flags,
    _loss_scale_is_a_number,
    _average_has_a_decay,
    _random_batches_are_possible,
    _images_can_be_mixed,
    _tuning_split_is_a_number_of_images,
)
