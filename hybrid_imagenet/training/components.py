"""Builds the components of a run on one rank, the same on every rank."""

from __future__ import annotations

import keras
import tensorflow as tf

from hybrid_imagenet import comm
from hybrid_imagenet.checkpoints.run_state import RunState, array_name
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig, derived
from hybrid_imagenet.data.pipeline import HostOptions
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.resilience.watchdog import Watchdog
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
      config: settings of the run.
      communicator: connects the ranks.
      recording: run directory, records, view and summary.
      sources: images to train on and to validate, by name.
      validation_source: images to validate.
      state: position of the run.
      watchdog: reports ranks that hang.
      data: batches of training examples.
      model: the network, whose `optimizer` is `optimizer`.
      optimizer: update rule, with the reduction over ranks and the schedule.
      class_weights: weight of each class in the loss, float32 [classes], or None.
      step: the compiled training step.
      validation: the pass over the validation images.
      facts: world size, precision, hardware and numbers of images, for config.json.
    """

    def __init__(
        self,
        config: RunConfig,
        communicator: Communicator,
        recording: Recording,
        precision: str,
        train_source: Source,
        validation_source: Source,
    ):
        """Builds all components; every rank calls it.

        Args:
          config: settings of the run.
          communicator: connects the ranks.
          recording: run directory, records, view and summary.
          precision: name of a Keras dtype policy, such as mixed_float16.
          train_source: images to train on.
          validation_source: images to validate.

        Raises:
          UserError: on all ranks, if a component cannot be built.
        """
        self.config = config
        self.communicator = communicator
        self.recording = recording
        self.validation_source = validation_source
        self.sources = build.sources_by_name(config, train_source, validation_source)
        self.state = RunState()
        self.watchdog = Watchdog(
            communicator,
            config.run.stall_timeout,
            waiting_modules=(comm, accumulators, loss_alarm, delayed_readback, step),
        )
        options = build.host_options(
            config.data, tf.config.threading.get_intra_op_parallelism_threads() or 1
        )
        order = build.sample_order(config, train_source)
        self.data = TrainingData(config, train_source, order, communicator, options)
        # A user's own function that builds the network may fail on one rank only. Without this
        # block the other ranks would wait for that rank.
        with communicator.raise_on_all_ranks():
            self.model = build.model(config, precision, train_source.num_classes, communicator)
        self.optimizer = build.optimizer(config, self.model, communicator)
        # Callbacks find the optimizer here, as in `fit`.
        self.model.optimizer = self.optimizer
        omit_images = build.random_batch(config, communicator)
        self.class_weights = build.class_weights(config, train_source, communicator)
        self.step = build.train_step(
            config,
            precision,
            self.model,
            self.optimizer,
            omit_images,
            self.class_weights,
        )
        self.validation = self._build_validation(precision, options)
        loss_scale = self.optimizer.loss_scale
        self.facts = {
            "world_size": communicator.size,
            "precision": precision,
            "loss_scale": "dynamic" if loss_scale.dynamic else f"{loss_scale.initial:g}",
            "hosts": list(communicator.hosts),
            "train_images": train_source.num_examples,
            "validation_images": validation_source.num_examples,
            "num_classes": train_source.num_classes,
            **hardware.describe(),
        }

    def _build_validation(self, precision: str, options: HostOptions) -> Validation:
        config = self.config
        batch = config.evaluation.eval_batch
        if batch is None:
            batch = config.optimization.per_gpu_batch * config.optimization.virtual_gpus
        step = EvaluationStep(
            self.model,
            build.evaluation_preprocess(precision.removeprefix("mixed_")),
            loss=LOSSES[config.data.loss],
            flip=config.evaluation.eval_flip,
        )
        return Validation(
            step,
            self.validation_source,
            self.communicator,
            batch=batch,
            image_size=derived.evaluation_size(config),
            crop_fraction=build.evaluation_crop(config.data),
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
