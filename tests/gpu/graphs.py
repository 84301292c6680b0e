"""Traces steps as for a GPU, on a machine without one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from horovod.common.process_sets import ProcessSet

from hybrid_imagenet import config as configuration
from hybrid_imagenet import recipes, run_plan
from hybrid_imagenet.callbacks.train_function import split_step, step_for
from hybrid_imagenet.comm import SingleProcess, process
from hybrid_imagenet.comm.communicator import GradientExchange
from hybrid_imagenet.comm.connected import ConnectedRanks
from hybrid_imagenet.comm.horovod_engine import HorovodCollectives
from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.comm.tensorflow_engine import TensorFlowCollectives
from hybrid_imagenet.data import pipeline
from hybrid_imagenet.data.sources.synthetic import SyntheticSource
from hybrid_imagenet.models.normalization import BatchNormalization
from hybrid_imagenet.optimizers.accumulation import MicroBatchUse
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.resilience.step_requests import NUM_REQUESTS
from hybrid_imagenet.training import build
from hybrid_imagenet.training.losses import LOSSES
from hybrid_imagenet.training.step import EvaluationStep
from tests.gpu import copies

SMALL = (
    "--dataset=synthetic",
    "--model=resnet8",
    "--model_width=8",
    "--image_size=32",
    "--per_gpu_batch=4",
)
CLASSES = 10


class RankZeroOfTwo(ConnectedRanks):
    """Rank 0 of two ranks that always agree and send nothing."""

    def __init__(self, settings: Any, engine: str = "horovod") -> None:
        """Connects through an engine whose operations are only traced."""
        self.rank = 0
        self.local_rank = 0
        self.size = 2
        self.local_size = 2
        self.hosts = ("a", "a")
        if engine == "horovod":
            self.collectives = HorovodCollectives(2)
            self._host_collectives = self.collectives
        else:
            self.collectives = TensorFlowCollectives(0, 2, gpu=True)
            self._host_collectives = TensorFlowCollectives(0, 2)
        self.gradient_exchange = GradientExchange(settings, self.make_selector(settings), nccl=True)

    broadcast_object = SingleProcess.broadcast_object
    allgather_object = SingleProcess.allgather_object

    def shutdown(self) -> None:
        """Does nothing, because nothing was started."""


@contextlib.contextmanager
def on_gpu(*, xla: bool = True) -> Iterator[set[int]]:
    """Builds graphs as for a GPU, with or without XLA, inside the context.

    Yields the ids of the handles of variables on the CPU.
    """
    with pytest.MonkeyPatch.context() as patch, copies.pinned() as on_cpu:
        patch.setattr(tf.config, "get_visible_devices", lambda kind=None: [f"{kind}:0"])
        patch.setattr(ProcessSet, "size", lambda self: 2)
        patch.setenv("HYBRID_IMAGENET_XLA", str(int(xla)))
        yield on_cpu


@functools.cache
def specs(
    augmentation: str, image_size: int, batch: int, weighted: bool = False
) -> dict[str, tf.TensorSpec]:
    """Returns the specification of the batches of the input pipeline."""
    source = SyntheticSource("train", 2 * batch, CLASSES, reuse_decoded_batch=False)
    if weighted:
        batches = pipeline.evaluation_batches(source, batch, image_size=image_size)
    else:
        order = pipeline.example_order(source, 0)
        settings = {"image_size": image_size, "augmentation": augmentation}
        batches = pipeline.training_batches(
            source, order, Cursor(), (batch, 1), epochs=1, **settings
        )
    element = next(iter(batches))
    return {name: tf.TensorSpec(t.shape, t.dtype, name) for name, t in element.items()}


def resolved(*flags: str) -> Any:
    """Returns the configuration of a small network with more flags."""
    return configuration.resolve([*SMALL, *flags], 2)


def training(
    config: Any, ranks: str = "", precision: str = "mixed_float16"
) -> Iterator[tuple[str, Any]]:
    """Yields the traced steps of a configuration.

    They are one update per batch, or the micro-batches and the update after them.
    """
    communicator: Any = SingleProcess()
    plan = run_plan.make(config, precision)
    if ranks:
        communicator = RankZeroOfTwo(plan.communication, ranks)
    network = build.model(plan, CLASSES, communicator)
    optimizer = build.optimizer(plan, network, communicator)
    if ranks:
        optimizer.reducer.request_sum = RequestSum(NUM_REQUESTS)
    subsample_batch = build.batch_subsampler(plan, communicator)
    weights = np.ones(CLASSES, np.float32) if plan.step.balances_classes else None
    step = build.train_step(plan, network, optimizer, subsample_batch, weights)
    batch = specs(
        config.data.augmentation,
        config.network.image_size,
        config.optimization.per_gpu_batch * config.optimization.virtual_gpus,
    )
    if config.optimization.gradient_accumulation_steps == 1:
        yield "single", step.update.get_concrete_function(batch)
        return
    step.prepare_accumulation()
    yield "accumulate", step.accumulate.get_concrete_function(batch)
    yield (
        "last",
        step.update.get_concrete_function(batch, tf.TensorSpec([], tf.float32, "micro_batches")),
    )


def evaluation(config: Any, precision: str = "mixed_float16") -> Any:
    """Returns the traced step of validation."""
    plan = run_plan.make(config, precision)
    network = build.model(plan, CLASSES, SingleProcess())
    preprocess = build.evaluation_preprocess(plan.compute_dtype)
    step = EvaluationStep(
        network, preprocess, loss=LOSSES[config.data.loss], flip=config.evaluation.eval_flip
    )
    batch = specs(
        "none", config.network.image_size, config.optimization.per_gpu_batch, weighted=True
    )
    return step._compiled.get_concrete_function(batch)


def augmentations() -> dict[str, str]:
    """Returns the augmentations, each with a recipe that uses it or an empty string."""
    recipe_of = {"none": "", "digits": "", "shift": ""}
    for name in recipes.names():
        recipe_of.setdefault(
            configuration.resolve(["--dataset=synthetic", f"--recipe={name}"]).data.augmentation,
            name,
        )
    return recipe_of


def augmentation(name: str, precision: str = "float16") -> Any:
    """Returns the traced part of an augmentation that runs on the device."""
    prepare = build.train_preprocess(run_plan.make(resolved(f"--augmentation={name}"), precision))
    return tf.function(prepare, autograph=False).get_concrete_function(specs(name, 32, 4))


def fit(
    inner: Any,
    *,
    compiled: bool,
    precision: str = "mixed_float16",
    micro_batch: MicroBatchUse | None = None,
) -> Any:
    """Returns the traced training step of `model.fit` on two ranks, with Keras's `train_step`.

    A `micro_batch` selects the use of the step in gradient accumulation.
    """
    policy = keras.dtype_policies.DTypePolicy(precision)
    x = images = keras.Input((16, 16, 3))
    x = keras.layers.ReLU(dtype=policy)(
        BatchNormalization(dtype=policy)(keras.layers.Conv2D(4, 3, dtype=policy)(x))
    )
    model = keras.Model(
        images, keras.layers.Dense(CLASSES)(keras.layers.GlobalAveragePooling2D()(x))
    )
    steps = None if micro_batch is None else 2
    optimizer = DistributedOptimizer(inner, gradient_accumulation_steps=steps)
    two = RankZeroOfTwo(optimizer.settings)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=compiled)
    optimizer.attach(model)
    step = split_step(model.train_step, optimizer) if compiled else model.train_step
    if micro_batch is not None:
        step = step_for(micro_batch, step, optimizer.micro_batches)
    data = (
        tf.TensorSpec([4, 16, 16, 3], tf.float32, "images"),
        tf.TensorSpec([4], tf.int64, "labels"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "communicator", lambda: two)
        traced = tf.function(lambda *pair: step(pair), autograph=False)
        return traced.get_concrete_function(*data)


def audited(function: Any, on_cpu: Sequence[int] | set[int], table: Any) -> copies.Audit:
    """Returns the audit of a traced step, to which the host passes the control word."""
    return copies.Audit(on_cpu, table).step(function, host=["control"])
