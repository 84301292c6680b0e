"""Restores the state in which a run begins or continues, on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hybrid_imagenet.checkpoints.run_state import check_epoch_order, restore_arrays
from hybrid_imagenet.data import class_sizes
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import random_state
from hybrid_imagenet.optimizers import restored_loss_scale
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.training import accumulators, same_data, warm_start
from hybrid_imagenet.training.components import RunComponents


def begin_or_resume(
    components: RunComponents, callback_variables: Mapping[str, keras.Variable]
) -> Mapping[str, dict[str, Any]]:
    """Restores the latest valid checkpoint, else --init_from, else rank 0's initial state.

    Starts the watchdog, opens the records, and lets signals ask for a stop from now on.

    Rank 0 reads the checkpoint and sends it to the others (Lu et al. §2.2.3); every rank calls it.

    Args:
      components: The components of the run.
      callback_variables: Variables of callbacks by name, which checkpoints contain too.

    Returns:
      The states of callbacks by name that are still to be set, see `callbacks.callback_state`;
      empty without a checkpoint.

    Raises:
      UserError: On all ranks, if a checkpoint, file or directory cannot be used.
    """
    variables = {**components.variables(), **callback_variables}
    messages: list[str] = []
    components.watchdog.start()
    with components.communicator.raise_on_all_ranks():
        # None on the other ranks, which get position and variables by broadcasts.
        checkpoint_on_rank_0 = components.recording.find_checkpoint()
        init_from = components.plan.network.init_from
        if checkpoint_on_rank_0 is None and init_from and components.communicator.rank == 0:
            class_names = components.data.source.class_names
            lines = warm_start.load(init_from, components.model, class_names)
            messages = [f"--init_from: {line}" for line in lines]
            if components.optimizer.average is not None:
                components.optimizer.average.restart()
    meta = components.communicator.broadcast_object(
        checkpoint_on_rank_0.meta if checkpoint_on_rank_0 else None
    )
    if meta is not None:
        _restore_position(components, meta)
    with components.communicator.raise_on_all_ranks():
        if checkpoint_on_rank_0 is not None:
            same_data.check_resumed(checkpoint_on_rank_0, components.sources)
            restore_arrays(checkpoint_on_rank_0, variables)
            check_epoch_order(checkpoint_on_rank_0, components.data.order)
            _check_phase(components)
            loss_scale = components.optimizer.loss_scale
            saved_scale = checkpoint_on_rank_0.meta["loss_scale"]
            if restored_loss_scale.restart_if_changed(loss_scale, saved_scale):
                messages.append(restored_loss_scale.restart_note(loss_scale))
        components.recording.start(
            components.facts, _view_info(components), components.state, is_over=_is_over(components)
        )
    # It comes before the broadcast, because the ranks wait for one another there. As soon as one of
    # them prints that it compiles, a signal must make all of them save.
    REQUESTS.begin()
    components.communicator.broadcast_variables([v.value for v in variables.values()])
    random_state.set_rank_seeds(components.model, components.communicator.rank)
    for message in messages:
        components.recording.announce(message)
    for note in _notes(components):
        components.recording.announce(note)
    return meta["callbacks"] if meta is not None else {}


def _restore_position(components: RunComponents, meta: Mapping[str, Any]) -> None:
    """Restores position and sums on every rank; variables are broadcast later.

    Args:
      components: The components of the run.
      meta: Description of the checkpoint.
    """
    components.state.restore(meta["state"])
    if components.state.has_reached(components.plan.validation.stop_at_top1):
        components.state.stop = "target"
    # Without --hybrid_ramp_epochs the schedule omits LARS's share, which then is 1.
    scheduled = _scheduled_values(components)
    components.state.schedule_values = {
        name: value for name, value in components.state.schedule_values.items() if name in scheduled
    }
    components.optimizer.inner.hyperparameters.assign(components.state.schedule_values)
    components.data.restore_replaced_examples(meta.get("replaced"))
    sums = accumulators.epoch_sums_of_rank(
        meta["epoch_sums"], components.communicator.rank, components.communicator.size
    )
    components.step.sums.restore(sums)


def _is_over(components: RunComponents) -> bool:
    """Returns whether no step is left to train."""
    is_at_end = components.data.length.is_over(components.state.cursor, components.state.step)
    return is_at_end or bool(components.state.stop)


def _check_phase(components: RunComponents) -> None:
    """Raises UserError if a run past its AdaBound warmup would begin another one.

    AdaBound would begin with the velocity of SGD.
    """
    if components.state.schedule_values.get("phase", 0.0) > _scheduled_values(components).get(
        "phase", 1.0
    ):
        raise UserError(
            "--warmup_epochs: the run is past its warmup. Resume with the number of warmup epochs"
            " that it had."
        )


def _scheduled_values(components: RunComponents) -> Mapping[str, float]:
    """Returns the values of the schedule at the present position."""
    return components.plan.values_at(components.data.order.position(components.state.cursor))


def _notes(components: RunComponents) -> list[str]:
    """Returns lines about the data and the position that the user should know."""
    notes = list(
        dict.fromkeys(
            f"data: {note}" for source in components.sources.values() for note in source.notes
        )
    )
    if components.class_weights is not None:
        names = components.data.source.class_names
        notes.append(class_sizes.describe_weights(components.class_weights, names))
    if components.state.stop == "target":
        notes.append(
            f"the run reached --stop_at_top1={components.plan.validation.stop_at_top1:g} in epoch"
            f" {components.state.best_epoch:g}: raise it to train further"
        )
    elif _is_over(components):
        notes.append(
            f"the run was over at step {components.state.step}: raise --epochs or --max_steps to"
            " train further"
        )
    elif components.state.step:
        position = components.data.order.position(components.state.cursor)
        rate = _scheduled_values(components)["learning_rate"]
        notes.append(
            f"resumed at epoch {position:.3f}, step {components.state.step}, learning rate"
            f" {rate:.4g}"
        )
    return notes


def _view_info(components: RunComponents) -> dict[str, Any]:
    """Returns what the view shows before training begins, see `runlog.progress.RunStatus`."""
    plan = components.plan
    num_classes = components.data.source.num_classes
    return {
        "world_size": components.communicator.size,
        "gpus": components.facts.get("gpu", "none") != "none",
        "optimizer": plan.optimizer.name,
        "images_per_epoch": components.data.source.num_examples,
        "num_classes": num_classes,
        "imagenet": plan.network.model == "resnet50" and num_classes == 1000,
        "step": components.state.step,
        "finished_epochs": components.state.finished_epochs,
        "epochs": components.data.order.position(components.state.cursor),
        "ends_at": components.data.length.end_position(components.data.global_batch),
        "target": plan.validation.target_top1[0] if plan.validation.target_top1 else None,
        "single_gpu_images_per_second": plan.recording.single_gpu_images_per_second,
    }
