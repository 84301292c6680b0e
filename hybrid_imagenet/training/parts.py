"""Builds the parts of a run on one rank, the same on every rank."""

from __future__ import annotations

import keras
import tensorflow as tf

from hybrid_imagenet import comm
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig, derived
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.models import normalization
from hybrid_imagenet.resilience.watchdog import Watchdog
from hybrid_imagenet.training import accumulators, build, divergence, hardware, late_copies, step
from hybrid_imagenet.training.averaged_weights import AveragedWeights
from hybrid_imagenet.training.batch_norm import BatchNormStatistics, PreciseStatistics
from hybrid_imagenet.training.epoch_values import RelativeUpdates
from hybrid_imagenet.training.evaluation import Validation
from hybrid_imagenet.training.inputs import TrainingData
from hybrid_imagenet.training.losses import LOSSES
from hybrid_imagenet.training.recorder import Recording
from hybrid_imagenet.training.step import EvaluationStep


class Parts:
    """The parts of a run on one rank.

    Attributes: those that `__init__` sets, each under the name of its part.
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
        self.config = config
        self.communicator = communicator
        self.recording = recording
        self.validation_source = validation_source
        self.sources = build.by_name(config, train_source, validation_source)
        self.state = RunState()
        self.watchdog = Watchdog(
            communicator,
            config.stall_timeout,
            waiting_modules=(comm, accumulators, divergence, late_copies, step),
        )
        options = build.host_options(
            config, tf.config.threading.get_intra_op_parallelism_threads() or 1
        )
        order = build.sample_order(config, train_source)
        self.data = TrainingData(config, train_source, order, communicator, options)
        with (
            communicator.raise_on_all_ranks()
        ):  # the user's function may fail on one rank only, and the others must not wait
            self.model = build.model(config, precision, train_source.num_classes, communicator)
        self.schedule = derived.schedule(config)
        self.optimizer = build.optimizer(config, precision, self.model, communicator)
        compute = precision.removeprefix("mixed_")
        choose = build.random_batch(config, communicator)
        self.class_weights = build.class_weights(config, train_source, communicator)
        self.step = build.train_step(
            config,
            precision,
            self.model,
            self.optimizer,
            communicator,
            choose,
            self.class_weights,
        )
        self.statistics = self._statistics(precise=config.batch_norm == "precise")
        self.averaged: AveragedWeights | None = None  # of --ema_decay
        if self.optimizer.average is not None:
            pairs, measure = (
                normalization.inference_statistics(self.model),
                self._statistics(precise=True).synchronize,
            )
            self.averaged = AveragedWeights(
                self.model, self.optimizer.average, pairs, measure, self.state
            )
        kernels = self.optimizer.inner.kernel_indices()
        self.updates = RelativeUpdates([self.model.trainable_variables[i] for i in kernels])
        self.validation = Validation(
            EvaluationStep(
                self.model,
                build.evaluation_preprocess(compute),
                loss=LOSSES[config.loss],
                flip=config.eval_flip,
            ),
            validation_source,
            communicator,
            batch=config.eval_batch or config.per_gpu_batch * config.virtual_gpus,
            image_size=derived.evaluation_size(config),
            crop_fraction=build.evaluation_crop(config),
            options=options,
        )
        self.facts = {
            "world_size": communicator.size,
            "precision": precision,
            "hosts": list(communicator.hosts),
            "train_images": train_source.num_examples,
            "validation_images": validation_source.num_examples,
            "num_classes": train_source.num_classes,
            **hardware.describe(),
        }

    def variables(self) -> dict[str, keras.Variable]:
        """Returns everything that training changes, by a stable name."""
        parts = {"model": self.model.variables, "optimizer": self.optimizer.variables}
        found = {
            f"{part}/{i:04d}/{v.path}": v
            for part, values in parts.items()
            for i, v in enumerate(values)
        }
        averages = self.averaged.variables if self.averaged is not None else {}
        found |= {f"average/{i:04d}/{path}": v for i, (path, v) in enumerate(averages.items())}
        return found | {"record/relative_updates": self.updates.ratios}

    def _statistics(self, *, precise: bool) -> BatchNormStatistics:
        """Returns what merges statistics of normalization over ranks, if `precise` measured
        them.
        """
        layers, collect = normalization.trainable_statistics(self.model), None
        if precise:
            collect = PreciseStatistics(
                self.step.forward,
                layers,
                lambda: self.data.sample(self.state.finished_epochs, self.watchdog.record_progress),
                self.state,
            ).collect
        return BatchNormStatistics(
            self.communicator, layers, collect, lambda: normalization.merge_virtual_gpus(self.model)
        )
