"""Builds the components of a run on one rank, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping

import keras
import tensorflow as tf

from hybrid_imagenet import comm
from hybrid_imagenet.checkpoints.run_state import RunState, array_name
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.resilience.watchdog import Watchdog
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.training import (
    accumulators,
    build,
    delayed_readback,
    hardware,
    loss_alarm,
    step,
)
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.inputs import TrainingData
from hybrid_imagenet.training.losses import LOSSES
from hybrid_imagenet.training.recorder import Recording
from hybrid_imagenet.training.step import EvaluationStep


class RunComponents:
    """The components of a run on one rank.

    Attributes:
      plan: Plan of the run.
      communicator: Connects the ranks.
      recording: Run directory, records, view and summary.
      sources: Images to train on, "training", and to validate, by the name of their split.
      state: Position of the run.
      watchdog: Reports ranks that hang.
      data: Batches of training examples.
      model: The network, whose `optimizer` is `optimizer`.
      optimizer: Update rule, with the reduction over ranks and the schedule.
      class_weights: Weight of each class in the loss, float32 [classes], or None.
      step: The compiled training step.
      validation: The pass over the validation images.
      facts: World size, precision, hardware and numbers of images, for config.json.
    """

    def __init__(
        self,
        plan: RunPlan,
        communicator: Communicator,
        recording: Recording,
        sources: Mapping[str, Source],
    ):
        """Builds all components; every rank calls it.

        Args:
          plan: Plan of the run.
          communicator: Connects the ranks.
          recording: Run directory, records, view and summary.
          sources: Images to train on, "training", and to validate, by the name of their split.

        Raises:
          UserError: On all ranks, if a component cannot be built.
        """
        train_source = sources["training"]
        validation_source = sources[plan.validation.split]
        self.plan = plan
        self.communicator = communicator
        self.recording = recording
        self.sources = sources
        self.state = RunState()
        self.watchdog = Watchdog(
            communicator,
            plan.recording.stall_timeout,
            waiting_modules=(comm, accumulators, loss_alarm, delayed_readback, step),
        )
        options = build.host_options(
            plan.data.reading, tf.config.threading.get_intra_op_parallelism_threads() or 1
        )
        order = build.sample_order(plan, train_source)
        self.data = TrainingData(plan, train_source, order, communicator, options)
        # A user's own function that builds the network may fail on one rank only. Without this
        # block the other ranks would wait for that rank.
        with communicator.raise_on_all_ranks():
            self.model = build.model(plan, train_source.num_classes, communicator)
        self.optimizer = build.optimizer(plan, self.model, communicator)
        # Callbacks find the optimizer here, as in `fit`.
        self.model.optimizer = self.optimizer
        subsample_batch = build.batch_subsampler(plan, communicator)
        self.class_weights = build.class_weights(plan, train_source, communicator)
        self.step = build.train_step(
            plan, self.model, self.optimizer, subsample_batch, self.class_weights
        )
        self.validation = self._build_validation(validation_source, options)
        loss_scale = self.optimizer.loss_scale
        self.facts = {
            "world_size": communicator.size,
            "precision": plan.precision,
            "loss_scale": "dynamic" if loss_scale.dynamic else f"{loss_scale.initial:g}",
            "hosts": list(communicator.hosts),
            "train_images": train_source.num_examples,
            "validation_images": validation_source.num_examples,
            "num_classes": train_source.num_classes,
            **hardware.describe(),
        }

    def _build_validation(self, source: Source, options: HostOptions) -> Validation:
        plan = self.plan
        step = EvaluationStep(
            self.model,
            build.evaluation_preprocess(plan.compute_dtype),
            loss=LOSSES[plan.step.loss],
            flip=plan.validation.flip,
        )
        return Validation(
            step,
            source,
            self.communicator,
            batch=plan.validation.batch,
            image_size=plan.validation.image_size,
            crop_fraction=plan.validation.crop_fraction,
            options=options,
        )

    def variables(self) -> dict[str, keras.Variable]:
        """Returns the variables of the model and the optimizer, by a stable name."""
        owners = {"model": self.model, "optimizer": self.optimizer}
        variables = {}
        for name, owner in owners.items():
            for index, variable in enumerate(owner.variables):
                variables[array_name(name, index, variable.path)] = variable
        return variables
