"""Finds out before TensorFlow is loaded what would end a run some seconds later.

Flags are checked on every rank. What a listing, a `stat` or a small file can show is checked once:
by rank 0, or by `hybrid-imagenet run`, which tells the ranks so by `CHECKED_VARIABLE`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.checkpoints import store
from hybrid_imagenet.comm import keras_settings
from hybrid_imagenet.comm.environment import placement
from hybrid_imagenet.config import RunConfig, defaults, derived, stored
from hybrid_imagenet.config.flag_checks import check_classes, check_data, own_network
from hybrid_imagenet.data import class_sizes, datasets
from hybrid_imagenet.errors import UserError, missing_tensorflow_message
from hybrid_imagenet.files import is_url
from hybrid_imagenet.models import keras_families
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import Origin, format_value
from hybrid_imagenet.runlog import run_dir, trackers
from hybrid_imagenet.schedules import training_schedule

ELSEWHERE_VARIABLE = "HYBRID_IMAGENET_RANKS_ELSEWHERE"
"""Set by the scripts for clusters, whose check runs on a host that may not train: it looks at no
disk there.
"""
CHECKED_VARIABLE = "HYBRID_IMAGENET_CHECKED"
"""Set in the environment of ranks whose launcher has checked what lies on the disk."""
_SHAPE = {"model": "model", "model_width": "width", "stem": "stem"}
"""Flags that decide which weights a network has, and their keys in a checkpoint."""
_MOVED = 1e-3  # relative change of a learning rate that is worth a warning


@dataclasses.dataclass
class Findings:
    """Results of the checks: a line for each check, warnings, and notes on what was chosen.

    `classes` is the number of classes of the dataset, None if it is not known yet.
    """

    checked: list[str]
    warnings: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)
    classes: int | None = None


def run(config: RunConfig, *, disk: bool = True) -> None:
    """Checks a run; prints warnings and, with --check_only, what was checked.

    Raises:
      UserError: for the first thing that would end the run before it trains.
    """
    found = check(config, disk=disk)
    for text in found.notes:
        print(text, file=sys.stderr)
    if config.check_only and placement().rank == 0:
        print("\n".join(found.checked))
    for text in found.warnings:
        print(f"warning: {text}", file=sys.stderr)


def check(config: RunConfig, *, disk: bool = True) -> Findings:
    """Checks the flags of a run, and on rank 0 what lies on the disk; arguments and errors as for
    `run`.
    """
    _check_flags(config)
    found = Findings(["flags: valid together"], [])
    if not disk or os.environ.get(ELSEWHERE_VARIABLE):
        found.checked.append("not checked: files, as the ranks run on other hosts")
    elif placement().rank == 0 and not os.environ.get(CHECKED_VARIABLE):
        if importlib.util.find_spec("tensorflow") is None:
            raise UserError(missing_tensorflow_message())
        if config.tracker and not _installed(config.tracker):
            raise UserError(trackers.missing_package(config.tracker))
        keras_settings.check_keras_settings(os.environ)
        _check_disk(config, found)
    if placement().rank == 0 and not os.environ.get(CHECKED_VARIABLE):
        note = defaults.recipe_note(config, found.classes)
        found.notes.extend([] if note is None else [note])
        found.warnings.extend(_flat_warmup(config) + _beyond_the_end(config))
        found.warnings.extend(config.kept_notes)
        if "per_gpu_batch" in config.dropped:
            found.warnings.append(f"--per_gpu_batch: {config.dropped['per_gpu_batch']}")
    return found


def _flat_warmup(config: RunConfig) -> list[str]:
    """A line if the warmup that was asked for does not raise the learning rate."""
    peak, first = (
        derived.rates(config)[OPTIMIZERS[config.optimizer].rate],
        config.chosen.get("warmup_start_lr", 0.0),
    )
    asked = config.warmup_epochs and config.origins["warmup_epochs"] is Origin.COMMAND_LINE
    if not asked or first < peak or config.lr_schedule in training_schedule.FIXED_SCHEDULES:
        return []
    return [
        f"--warmup_epochs={config.warmup_epochs:g}: the learning rate is {peak:g} from the start,"
        f" as that is not above --warmup_start_lr={first:g}; --warmup_start_lr=0 lets it rise"
    ]


def _beyond_the_end(config: RunConfig) -> list[str]:
    """A line for each schedule on the command line with an epoch that training does not reach."""
    last = {
        "warmup_epochs": config.warmup_epochs,
        "lr_steps": max(config.chosen.get("lr_steps") or [0]),
        "batch_schedule": derived.batches(config).stages[-1].epoch,
        "image_size_schedule": derived.sizes(config).stages[-1][0],
    }
    return [
        f"--{name}: its epoch {epoch:g} is not reached, as training ends at epoch {config.epochs:g}"
        for name, epoch in last.items()
        if config.origins.get(name) is Origin.COMMAND_LINE and epoch >= config.epochs
    ]


def training_images(config: RunConfig) -> int:
    """The number of images that are trained on; opens the dataset where it is not known.

    Raises:
      UserError: for a dataset that cannot be opened.
    """
    images = (
        datasets.source_type(config.dataset).train_images
        or datasets.DatasetRequest.from_flags(config).open().num_examples
    )
    return images - derived.held_out(config, images)


def _check_flags(config: RunConfig) -> None:
    """Checks the image size against the network and the batch against a dataset of known size."""
    if keras_families.is_keras_network(config.model):
        keras_families.check_image_size(config.model, config.image_size)
    images = datasets.source_type(config.dataset).train_images
    if images is not None:
        check_data(config, images - derived.held_out(config, images))
        if config.class_weights != "none" and config.dataset == "imagenet2012":
            class_sizes.check_readable(config.dataset, images)


def _installed(module: str) -> bool:
    """Returns whether a module can be imported, as far as its location shows it."""
    try:
        return importlib.util.find_spec(module) is not None
    # The module's parent is missing, or a file of its name is not a package.
    except (ImportError, ValueError):
        return False


def _check_disk(config: RunConfig, found: Findings) -> None:
    data = datasets.probe_splits(datasets.DatasetRequest.from_flags(config))
    if data.num_classes is not None:
        check_classes(config, data.num_classes)
        found.classes = data.num_classes
    if config.check_only and not is_url(config.data_dir or ""):
        check_data(config, training_images(config))  # a run does so once its ranks have started
    classes = "" if data.num_classes is None else f", {data.num_classes} classes"
    found.checked.append(f"dataset: {config.dataset}, {data.description}{classes}")
    file = own_network(config.model) if keras_families.is_user_function(config.model) else None
    found.checked.append(
        f"model: {config.model}" + (f", in {file}, not called yet" if file else "")
    )
    found.checked.extend(
        ["not checked: whether layers have the names of --freeze"] if config.freeze else []
    )
    path = run_dir.choose_directory(
        config.run_dir, config.recipe, config.dataset, resume=config.resume
    )
    state = run_dir.check_directory(path, resume=config.resume)
    found.checked.append(f"run directory: {path}, {state}")
    checkpoint = store.find_latest(path / "checkpoints", store.check_run) if config.resume else None
    if checkpoint is not None:
        earlier = stored.read(path) if (path / "config.json").exists() else {}
        found.warnings.extend(_moved_by_batch(config, earlier))
        _check_resumed(config, checkpoint, earlier, data.num_classes)
        found.checked.append(f"checkpoint: {checkpoint.path}, of this model and optimizer")
        found.warnings.extend(_moved_learning_rate(config, checkpoint.meta, earlier))
    elif config.resume and not any(
        path.glob("checkpoints/step-*")
    ):  # damaged ones are refused when they are read
        found.warnings.append(
            f"--resume: {path} holds no checkpoint yet, so training starts from the beginning"
        )
    if checkpoint is None and config.init_from:
        _check_weights(config, found)


def _check_resumed(
    config: RunConfig,
    checkpoint: store.CheckpointDescription,
    earlier: Mapping[str, Any],
    classes: int | None,
) -> None:
    """Refuses a checkpoint of another network, optimizer or number of classes."""
    for flag, key in (_SHAPE | {"blurpool": "blurpool", "optimizer": "optimizer"}).items():
        before, now = checkpoint.meta.get(key), getattr(config, flag)
        if before is not None and before != now:
            raise UserError(
                f"--{flag}={format_value(now)}: {checkpoint.path} was written with"
                f" --{flag}={format_value(before)}; resume with that, or start a new run in another"
                " --run_dir"
            )
    before, now = checkpoint.meta.get("val_split"), derived.validated_split(config)
    if before is not None and before != now:
        raise UserError(
            f"--eval_split: {checkpoint.path} was judged on the {before} images, not the {now}"
            " images; resume with its flags, and use hybrid-imagenet evaluate for others"
        )
    before = earlier.get("flags", {}).get("ema_decay")
    if before is not None and bool(before) != bool(config.ema_decay):
        raise UserError(
            f"--ema_decay={config.ema_decay:g}: the weights of the run"
            f" {'have an' if before else 'have no'} average; resume with --ema_decay={before:g}"
        )
    before = checkpoint.meta.get("num_classes")
    if before is not None and classes is not None and before != classes:
        raise UserError(
            f"--dataset={config.dataset}: has {classes} classes, but {checkpoint.path} has"
            f" {before}; resume with the data that the run was started with"
        )


def _moved_by_batch(config: RunConfig, earlier: Mapping[str, Any]) -> list[str]:
    """A line for each value of MLPerf's table that is another one at this start's batch than it was
    in the run.
    """
    flags, origins = (earlier.get(key, {}) for key in ("flags", "origins"))
    return [
        f"--{name}: {value:.4g} at this batch, {flags[name]:.4g} in the run so far"
        for name, value in config.values().items()
        if config.origins[name].value == origins.get(name) == Origin.BATCH.value
        and value != flags[name]
    ]


def _moved_learning_rate(
    config: RunConfig, meta: Mapping[str, Any], earlier: Mapping[str, Any]
) -> list[str]:
    """A line if another --epochs than that of the run so far moves the learning rate where training
    continues.
    """
    before = earlier.get("flags", {}).get("epochs")
    if not isinstance(before, int | float):
        return []
    cursor, images = meta["state"]["cursor"], meta.get("data", {}).get("training", {}).get("images")
    position = cursor["epoch"] + (cursor["offset"] / images if images else 0.0)
    batch = derived.batches(config).at(cursor["epoch"]).global_batch(config.gpus)

    def rate(epochs: float) -> float:
        return derived.schedule(config.changed(epochs=epochs))(position, position, batch)[
            "learning_rate"
        ]

    old, new = rate(before), rate(config.epochs)
    if before == config.epochs or abs(new - old) <= _MOVED * max(old, new):
        return []
    return [
        f"--epochs={config.epochs:g}, the run had {before:g}: the learning rate at epoch"
        f" {position:.4g} becomes {new:.4g} instead of {old:.4g}"
    ]


def _check_weights(config: RunConfig, found: Findings) -> None:
    """Refuses weights (--init_from) of another network; functions of the user's are compared when
    they are built.
    """
    try:
        weights = store.find_checkpoint(pathlib.Path(str(config.init_from)))
    except UserError as error:
        raise UserError(f"--init_from={error}") from None
    before = {flag: weights.meta[key] for flag, key in _SHAPE.items() if key in weights.meta}
    models = (config.model, str(before.get("model")))
    own = any(keras_families.is_user_function(model) for model in models)
    if any(keras_families.is_keras_network(model) for model in models):
        # Width and stem have no meaning for such a network.
        before = {"model": before["model"]} if "model" in before else {}
        is_torchvision = weights.path.suffix in store.FOREIGN_SUFFIXES
        if is_torchvision:
            raise UserError(
                f"--init_from={config.init_from}: files of torchvision hold ResNets of this"
                f" program, not --model={config.model}. Pass a checkpoint or a run of"
                f" {config.model}."
            )
    for flag, value in before.items():
        if not own and value != getattr(config, flag):
            raise UserError(
                f"--init_from={config.init_from}: {weights.path} was written with --{flag}={value},"
                f" not {getattr(config, flag)}; give weights of the same network"
            )
    unread = "" if weights.meta else ", not compared with the network yet"
    found.checked.append(f"weights: {weights.path}{unread}")
