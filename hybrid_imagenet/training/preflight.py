"""Checks a run before TensorFlow is loaded, so that errors appear at once.

Flags are checked on every rank. The files on disk are checked once, as far as listings and small
files show: by rank 0, or by `hybrid-imagenet run`, which sets `CHECKED_VARIABLE` for the ranks.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet import config as configuration
from hybrid_imagenet import run_plan
from hybrid_imagenet.checkpoints import store
from hybrid_imagenet.cluster import keras_settings
from hybrid_imagenet.cluster.environment import read_placement
from hybrid_imagenet.config import RunConfig, defaults, stored
from hybrid_imagenet.config.flag_checks import check_classes, check_data, find_network_module
from hybrid_imagenet.config.flags import DataFlags
from hybrid_imagenet.data import class_sizes, datasets
from hybrid_imagenet.errors import UserError, missing_tensorflow_message
from hybrid_imagenet.files import expand_home, is_url
from hybrid_imagenet.models import keras_families
from hybrid_imagenet.options import Origin, format_value
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.runlog import run_dir, trackers
from hybrid_imagenet.schedules.batch_schedule import last_epoch
from hybrid_imagenet.schedules.training_schedule import StepDecay

RANKS_ELSEWHERE_VARIABLE = "HYBRID_IMAGENET_RANKS_ELSEWHERE"
"""Set by the scripts for clusters, which check flags on a host that may not train.

The disk is not checked there.
"""
CHECKED_VARIABLE = "HYBRID_IMAGENET_CHECKED"
"""Set in the environment of ranks whose launcher has checked the disk."""

# Flags with another name than their keys in a checkpoint.
_FLAG_OF_KEY = {"width": "model_width"}
# Keys of a checkpoint on which the shapes of the weights depend.
_WEIGHT_KEYS = ("model", "width", "stem")


@dataclasses.dataclass
class Findings:
    """Results of the checks.

    Attributes:
      plan: Plan of the run.
      check_lines: A line for each check.
      warnings: A line for each warning.
      notes: Lines on the recipe if no flag has chosen it, and on the difference between the
        plans of a resumed run.
      num_classes: Number of classes of the dataset; None if it is not known yet.
    """

    plan: RunPlan
    check_lines: list[str]
    warnings: list[str]
    notes: list[str] = dataclasses.field(default_factory=list)
    num_classes: int | None = None


def run(config: RunConfig, *, disk: bool = True) -> RunPlan:
    """Plans and checks a run, and prints warnings; with --check_only also what was checked.

    Args:
      config: Configuration of the run.
      disk: Whether the ranks run on this host, so that files can be checked.

    Returns:
      The plan, as far as it is known before the ranks are connected.

    Raises:
      UserError: For the first problem that would end the run before it trains.
    """
    findings = check(config, disk=disk)
    for text in findings.notes:
        print(text, file=sys.stderr)
    if config.run.check_only and read_placement().rank == 0:
        print("\n".join(findings.check_lines))
    for text in findings.warnings:
        print(f"warning: {text}", file=sys.stderr)
    return findings.plan


def check(config: RunConfig, *, disk: bool = True) -> Findings:
    """Checks the flags of a run, and on rank 0 the files on disk.

    Args:
      config: Configuration of the run.
      disk: Whether the ranks run on this host, so that files can be checked.

    Raises:
      UserError: For the first problem that would end the run before it trains.
    """
    _check_flags(config)
    plan = run_plan.make(config)
    findings = Findings(plan, ["flags: valid together"], [])
    checks_here = read_placement().rank == 0 and not os.environ.get(CHECKED_VARIABLE)
    if not disk or os.environ.get(RANKS_ELSEWHERE_VARIABLE):
        findings.check_lines.append("not checked: files, because the ranks run on other hosts")
    elif checks_here:
        if importlib.util.find_spec("tensorflow") is None:
            raise UserError(missing_tensorflow_message())
        if config.run.tracker and not _is_installed(config.run.tracker):
            raise UserError(trackers.missing_package(config.run.tracker))
        keras_settings.check_keras_settings(os.environ)
        _check_disk(config, findings)
    if checks_here:
        note = defaults.recipe_note(config, findings.num_classes)
        if note is not None:
            findings.notes.append(note)
        findings.warnings.extend(_warn_of_flat_warmup(config, plan))
        findings.warnings.extend(_warn_of_unreached_epochs(config, plan))
        findings.warnings.extend(config.kept_notes)
        if "per_gpu_batch" in config.dropped:
            findings.warnings.append(f"--per_gpu_batch: {config.dropped['per_gpu_batch']}")
    return findings


def training_images(data: DataFlags) -> int:
    """Returns the number of training images; opens the dataset if its size is not known.

    Raises:
      UserError: If the dataset cannot be opened.
    """
    num_images = datasets.source_type(data.dataset).train_images
    if not num_images:
        num_images = datasets.DatasetRequest.from_flags(data).open().num_examples
    return num_images - data.num_held_out(num_images)


def _check_flags(config: RunConfig) -> None:
    """Checks the image size against the network and the batch against a dataset of known size."""
    data = config.data
    network = config.network
    if keras_families.is_keras_network(network.model):
        keras_families.check_image_size(network.model, network.image_size)
    num_images = datasets.source_type(data.dataset).train_images
    if num_images is not None:
        check_data(config, num_images - data.num_held_out(num_images))
        if data.class_weights != "none" and data.dataset == "imagenet2012":
            class_sizes.check_readable(data.dataset, num_images)


def _is_installed(module: str) -> bool:
    """Returns whether a module can be imported, as far as its location shows it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        # The parent package is missing, or something that is not a package has its name.
        return False


def _check_disk(config: RunConfig, findings: Findings) -> None:
    """Checks dataset, network, run directory, and the files with which training begins."""
    lines = findings.check_lines
    data = datasets.probe_splits(datasets.DatasetRequest.from_flags(config.data))
    num_classes = data.num_classes
    if num_classes is not None:
        check_classes(config.data, num_classes)
        findings.num_classes = num_classes
    if config.run.check_only and not is_url(config.data.data_dir or ""):
        # Without --check_only the ranks check this when they have opened the dataset.
        check_data(config, training_images(config.data))
    classes = "" if num_classes is None else f", {num_classes} classes"
    lines.append(f"dataset: {config.data.dataset}, {data.description}{classes}")
    model = f"model: {config.network.model}"
    if keras_families.is_user_function(config.network.model):
        model += f", in {find_network_module(config.network.model)}, not called yet"
    lines.append(model)
    if config.network.freeze:
        lines.append("not checked: whether layers have the names of --freeze")
    directory = run_dir.choose_directory(
        config.run.run_dir, config.run.recipe, config.data.dataset, resume=config.run.resume
    )
    state = run_dir.check_directory(directory, resume=config.run.resume)
    lines.append(f"run directory: {directory}, {state}")
    checkpoint = None
    if config.run.resume:
        checkpoint = _check_checkpoint(directory, num_classes, findings)
    if checkpoint is None and config.network.init_from:
        _check_weights(findings)


def _check_checkpoint(
    directory: pathlib.Path, num_classes: int | None, findings: Findings
) -> store.CheckpointDescription | None:
    """Checks the checkpoint with which a resumed run continues, and returns it.

    Returns:
      None if there is no valid checkpoint. Damaged ones are an error when the ranks read them.
    """
    checkpoint = store.find_latest(directory / "checkpoints", store.check_run)
    if checkpoint is None:
        if not any(directory.glob("checkpoints/step-*")):
            findings.warnings.append(
                f"--resume: {directory} has no checkpoint yet, so training starts from the"
                " beginning"
            )
        return None
    run_config = stored.read(directory) if (directory / "config.json").exists() else {}
    _require_same_run(findings.plan, checkpoint, run_config, num_classes)
    findings.check_lines.append(f"checkpoint: {checkpoint.path}, of this model and optimizer")
    if run_config:
        findings.notes.extend(_describe_changes(findings.plan, checkpoint.meta, run_config))
    return checkpoint


def _require_same_run(
    plan: RunPlan,
    checkpoint: store.CheckpointDescription,
    run_config: Mapping[str, Any],
    num_classes: int | None,
) -> None:
    """Rejects a checkpoint of another network, optimizer, validation split or number of classes.

    Args:
      plan: Plan of this start.
      checkpoint: Checkpoint with which training would continue.
      run_config: Content of config.json of the run.
      num_classes: Number of classes of the dataset; None if it is not known yet.
    """
    meta = checkpoint.meta
    for key, value in (plan.network.architecture | {"optimizer": plan.optimizer.name}).items():
        stored_value = meta.get(key)
        if stored_value is not None and stored_value != value:
            flag = _FLAG_OF_KEY.get(key, key)
            raise UserError(
                f"--{flag}={format_value(value)}: {checkpoint.path} was written with"
                f" --{flag}={format_value(stored_value)}. Resume with that, or start a new run in"
                " another --run_dir."
            )
    stored_split = meta.get("val_split")
    split = plan.validation.split
    if stored_split is not None and stored_split != split:
        raise UserError(
            f"--eval_split: {checkpoint.path} was validated on the {stored_split} images, not on"
            f" the {split} images. Resume with the flags of the run, and use hybrid-imagenet"
            " evaluate for other images."
        )
    ema_decay = run_config.get("flags", {}).get("ema_decay")
    average_decay = plan.optimizer.average_decay
    if ema_decay is not None and bool(ema_decay) != bool(average_decay):
        has_average = "has averaged weights" if ema_decay else "has no averaged weights"
        raise UserError(
            f"--ema_decay={average_decay:g}: the run {has_average}. Resume with"
            f" --ema_decay={ema_decay:g}."
        )
    flags = run_config.get("flags", {})
    init_from = plan.network.init_from
    if init_from and not _is_same_path(init_from, flags.get("init_from", init_from)):
        raise UserError(
            f"--init_from={init_from}: the run continues with the weights of {checkpoint.path}."
            " Omit --init_from, or start a new run in another --run_dir."
        )
    frozen_layers = plan.network.frozen_layers
    if set(frozen_layers) != set(flags.get("freeze", frozen_layers)):
        stored_freeze = ",".join(flags["freeze"])
        with_that = f"with --freeze={stored_freeze}" if stored_freeze else "without --freeze"
        raise UserError(
            f"--freeze={','.join(frozen_layers)}: the run was started {with_that}. Resume it so, or"
            f" start a new run with --init_from={checkpoint.path}."
        )
    stored_classes = meta.get("num_classes")
    if stored_classes is not None and num_classes is not None and stored_classes != num_classes:
        raise UserError(
            f"--dataset={plan.data.dataset} has {num_classes} classes, but {checkpoint.path} has"
            f" {stored_classes}. Resume with the data that the run was started with."
        )


def _is_same_path(path: str, other: str | None) -> bool:
    """Returns whether two paths name the same file; None names none."""
    return other is not None and expand_home(path).resolve() == expand_home(other).resolve()


def _check_weights(findings: Findings) -> None:
    """Rejects weights of another network for --init_from.

    A network that the user's function returns is compared with them when it is built.
    """
    network = findings.plan.network
    try:
        weights = store.find_checkpoint(pathlib.Path(str(network.init_from)))
    except UserError as error:
        raise UserError(f"--init_from={error}") from None
    described = {key: weights.meta[key] for key in _WEIGHT_KEYS if key in weights.meta}
    models = (network.model, str(described.get("model")))
    if any(keras_families.is_keras_network(model) for model in models):
        # Width and stem have no meaning for such a network.
        described = {"model": described["model"]} if "model" in described else {}
        is_torchvision = weights.path.suffix in store.FOREIGN_SUFFIXES
        if is_torchvision:
            raise UserError(
                f"--init_from={network.init_from}: files of torchvision hold ResNets of this"
                f" program, not --model={network.model}. Pass a checkpoint or a run of"
                f" {network.model}."
            )
    if any(keras_families.is_user_function(model) for model in models):
        described = {}
    for key, value in described.items():
        flag = _FLAG_OF_KEY.get(key, key)
        planned_value = network.architecture[key]
        if value != planned_value:
            raise UserError(
                f"--init_from={network.init_from}: {weights.path} was written with"
                f" --{flag}={value}, not {planned_value}. Use weights of the same network."
            )
    unread = "" if weights.meta else ", not compared with the network yet"
    findings.check_lines.append(f"weights: {weights.path}{unread}")


def _warn_of_flat_warmup(config: RunConfig, plan: RunPlan) -> list[str]:
    """Returns a line if the warmup on the command line does not raise the learning rate."""
    schedule = plan.schedule
    is_requested = schedule.warmup_epochs and config.origins["warmup_epochs"] is Origin.COMMAND_LINE
    peak = plan.optimizer.options.learning_rate
    first = schedule.warmup_start
    if not is_requested or first < peak or schedule.decay.own_peak is not None:
        return []
    return [
        f"--warmup_epochs={schedule.warmup_epochs:g}: the learning rate is {peak:g} from the"
        f" start, because that is not above --warmup_start_lr={first:g}. Set --warmup_start_lr=0 to"
        " let it rise."
    ]


def _warn_of_unreached_epochs(config: RunConfig, plan: RunPlan) -> list[str]:
    """Returns a line for each schedule that goes beyond the last epoch.

    Either the schedule or the number of epochs is on the command line.
    """
    decay = plan.schedule.decay
    steps = decay.lr_steps if isinstance(decay, StepDecay) else ()
    last_epochs = {
        "warmup_epochs": plan.schedule.warmup_epochs,
        "lr_steps": max(steps, default=0.0),
        "batch_schedule": last_epoch(config.optimization.batch_schedule),
        "image_size_schedule": plan.image_sizes.stages[-1][0],
    }
    is_shortened = config.origins.get("epochs") is Origin.COMMAND_LINE
    lines = []
    for name, epoch in last_epochs.items():
        is_requested = config.origins.get(name) is Origin.COMMAND_LINE
        if epoch >= plan.epochs and (is_requested or is_shortened):
            origin = "" if is_requested else f" ({config.origins[name].value})"
            lines.append(
                f"--{name}{origin}: its epoch {epoch:g} is not reached, because training ends at"
                f" epoch {plan.epochs:g}"
            )
    return lines


def _describe_changes(
    plan: RunPlan, meta: Mapping[str, Any], run_config: Mapping[str, Any]
) -> list[str]:
    """Returns lines on the difference between the plan of this start and that of the run so far.

    Args:
      plan: Plan of this start.
      meta: Description of the checkpoint with which training continues.
      run_config: Content of config.json of the run.
    """
    try:
        before = run_plan.make(configuration.from_stored(run_config, plan.ranks))
    except (UserError, ValueError) as error:
        return [f"The plan of the run so far is not known: {error}"]
    lines = run_plan.differences(before, plan)
    if not lines:
        return []
    cursor = meta["state"]["cursor"]
    num_images = meta.get("data", {}).get("training", {}).get("images")
    position = cursor["epoch"] + (cursor["offset"] / num_images if num_images else 0.0)
    rates = [f"{each.values_at(position)['learning_rate']:.4g}" for each in (before, plan)]
    if len(set(rates)) > 1:
        lines.append(f"learning rate at epoch {position:.4g}: {' -> '.join(rates)}")
    return ["The plan differs from that of the run so far:", *(f"  {line}" for line in lines)]
