"""Saves the checkpoints of the program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from hybrid_imagenet.callbacks.save_checkpoints import SaveCheckpoints
from hybrid_imagenet.checkpoints import run_state
from hybrid_imagenet.optimizers import restored_loss_scale
from hybrid_imagenet.training import build
from hybrid_imagenet.training.components import RunComponents
from hybrid_imagenet.training.inputs import replaced_on_all_ranks


class ProgramCheckpoints(SaveCheckpoints):
    """Saves network, optimizer, and the rest of what `restoring.begin_or_resume` needs."""

    def __init__(self, components: RunComponents):
        """Takes the components of the run."""
        checkpoints = components.plan.checkpoints
        super().__init__(
            every_epochs=checkpoints.every_epochs,
            every_steps=checkpoints.every_steps,
            save_best=checkpoints.keep_best,
        )
        self._components = components

    def trained_variables(self) -> Mapping[str, keras.Variable]:
        """Returns the variables of the network and the optimizer."""
        return self._components.variables()

    def describe(self) -> dict[str, Any]:
        """Describes run, order of examples and sums of the epoch; every rank calls it."""
        components = self._components
        gather = components.communicator.allgather_object
        sums = components.step.sums.read()
        return {
            **build.description(components.plan, components.data.source),
            "precision": components.plan.precision,
            "loss_scale": restored_loss_scale.describe(components.optimizer.loss_scale),
            "val_split": components.plan.validation.split,
            "world_size": components.communicator.size,
            "order": run_state.describe_order(components.data.order),
            "data": {name: source.identity for name, source in components.sources.items()},
            "epoch_sums": gather([sums.loss, sums.top1, sums.top5, sums.count]),
            "replaced": replaced_on_all_ranks(
                components.data, components.state.finished_epochs, gather
            ),
        }
