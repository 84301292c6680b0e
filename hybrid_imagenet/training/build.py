"""Builds each component of a run from its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet import __version__, xla
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config.flag_checks import check_classes
from hybrid_imagenet.config.flags import DataFlags
from hybrid_imagenet.data import class_sizes, device, listing, pipeline, splits
from hybrid_imagenet.data.datasets import SPLITS, DatasetRequest
from hybrid_imagenet.data.image_mixing import ImageMixer
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.data.sources.subset import Subset
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory
from hybrid_imagenet.models.blocks import BATCH_NORM_EPSILON
from hybrid_imagenet.optimizers.average import WeightAverage
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.kinds import classify
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.run_plan import ReadingPlan, RunPlan, XlaUse
from hybrid_imagenet.training import warm_start
from hybrid_imagenet.training.batch_subsampler import BatchSubsampler
from hybrid_imagenet.training.losses import LOSSES, initial_bias
from hybrid_imagenet.training.step import Batch, TrainStep


def sources(data: DataFlags, seed: int) -> tuple[Source, Source]:
    """Returns the training images and the validation images.

    With --tuning_split some training images are held out. They are the validation images unless
    --eval_split selects another split. They are opened before the run is planned, because the plan
    depends on their number.

    Args:
      data: Flags of the data.
      seed: Seed that draws the images that are held out.

    Raises:
      UserError: If the images cannot be used.
    """
    opened = {}
    for split in SPLITS:
        request = DatasetRequest.from_flags(data, split, memory_bytes=data.half_memory_bytes)
        opened[split] = request.open()
    train = opened["train"]
    validation = opened["validation"]
    listing.check_splits(data.dataset, train.class_names, validation.class_names)
    check_classes(data, train.num_classes)
    if not data.tuning_split:
        return train, validation
    num_held_out = data.num_held_out(train.num_examples)
    remaining, held_out = splits.split_for_tuning(num_held_out, train.num_examples, seed)
    if data.validated_split == "tuning":
        validation = Subset(train, held_out)
    return Subset(train, remaining, train.notes), validation


def check_shuffle_window(data: DataFlags, source: Source) -> None:
    """Raises UserError for --shuffle_window with a dataset that has no shards."""
    if data.shuffle_window and source.shard_sizes is None:
        raise UserError(
            f"--shuffle_window={data.shuffle_window} needs a dataset in shards (such as"
            f" tfrecord), not {data.dataset}. Omit the flag."
        )


def sample_order(plan: RunPlan, source: Source) -> SampleOrder:
    """Returns the order of training examples."""
    return pipeline.example_order(source, plan.data.shuffle_window, plan.seed)


def model(plan: RunPlan, num_classes: int, communicator: Communicator) -> keras.Model:
    """Returns the network; layers of --freeze are excluded from training.

    Raises:
      UserError: If a flag does not fit the network.
    """
    network_plan = plan.network
    sync_allreduce = None
    if network_plan.ranks_per_group > 1:
        is_over_all_ranks = network_plan.ranks_per_group == communicator.size
        sync_allreduce = (
            communicator.allreduce_sum if is_over_all_ranks else communicator.allreduce_neighbors
        )
    network = factory.create(
        network_plan.model,
        num_classes,
        network_plan.input_size,
        precision=plan.precision,
        initializer=network_plan.initializer,
        zero_last_gamma=network_plan.zero_last_gamma,
        batch_norm=network_plan.batch_norm,
        seed=plan.seed,
        width=network_plan.width,
        stem=network_plan.stem,
        blurpool=network_plan.blurpool,
        initial_bias=initial_bias(plan.step.loss, num_classes),
        virtual_gpus=network_plan.parts_per_rank,
        sync_allreduce=sync_allreduce,
        # On a CPU separate layers are faster.
        jit_stem=network_plan.jit_stem and xla.has_gpu(),
    )
    warm_start.freeze(network, network_plan.frozen_layers)
    return network


def optimizer(
    plan: RunPlan, network: keras.Model, communicator: Communicator
) -> DistributedOptimizer:
    """Returns the optimizer, with reduction over ranks, loss scale, schedule and weight average."""
    optimizer_plan = plan.optimizer
    inner = optimizer_plan.create()
    inner.set_kinds(classify(network))
    average = None
    if optimizer_plan.average_decay:
        average = WeightAverage(optimizer_plan.average_decay, optimizer_plan.average_every)
    distributed_optimizer = DistributedOptimizer(
        inner,
        compression=optimizer_plan.compression,
        loss_scale=optimizer_plan.loss_scale,
        schedule=plan.schedule.values,
        communicator=communicator,
        average=average,
    )
    # The loss scale follows from the type in which the network computes.
    distributed_optimizer.attach(network)
    return distributed_optimizer


def train_step(
    plan: RunPlan,
    network: keras.Model,
    distributed_optimizer: DistributedOptimizer,
    subsample_batch: BatchSubsampler | None = None,
    class_weights: npt.NDArray[np.float32] | None = None,
) -> TrainStep:
    """Returns the training step of the network.

    Args:
      plan: Plan of the run.
      network: Returned by `model`.
      distributed_optimizer: Returned by `optimizer`.
      subsample_batch: Returned by `batch_subsampler`.
      class_weights: Returned by `class_weights`.
    """
    return TrainStep(
        network,
        distributed_optimizer,
        train_preprocess(plan),
        loss=LOSSES[plan.step.loss],
        label_smoothing=plan.step.label_smoothing,
        jit_compile=_compiles_step(plan.step.xla),
        subsample_batch=subsample_batch,
        mixer=image_mixer(plan),
        class_weights=class_weights,
    )


def _compiles_step(xla_use: XlaUse) -> bool:
    """Returns whether XLA compiles forward and backward pass."""
    if xla_use is XlaUse.IF_POSSIBLE:
        return xla.has_gpu() and xla.supports_step()
    return xla_use is XlaUse.ON


def class_weights(
    plan: RunPlan, source: Source, communicator: Communicator
) -> npt.NDArray[np.float32] | None:
    """Returns the weight of each class in the loss (--class_weights), float32 [classes], or None.

    Every rank calls it. Rank 0 counts the training images of each class.

    Raises:
      UserError: On all ranks, if they cannot be counted.
    """
    if not plan.step.balances_classes:
        return None
    sizes: list[int] = []
    with communicator.raise_on_all_ranks():
        if communicator.rank == 0:
            sizes = class_sizes.count_classes(source, plan.data.dataset).tolist()
    sizes = communicator.broadcast_object(sizes)
    return class_sizes.balanced_weights(np.array(sizes, np.int64))


def train_preprocess(plan: RunPlan) -> Callable[[Batch], tf.Tensor]:
    """Returns the function that augments a training batch on the device.

    It returns images in the compute type of the network.
    """
    kind = plan.data.augmentation
    dtype = plan.compute_dtype
    mixer = image_mixer(plan)

    def augment(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        return device.augment(images, seeds, kind, dtype)

    function = augment if mixer is None else _augment_and_mix(kind, mixer, dtype)
    prepare = device.compile_preprocessing(function, kind)
    return lambda batch: prepare(batch["image"], batch["seed"])


def _augment_and_mix(
    kind: str, mixer: ImageMixer, dtype: str
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """Returns a function that augments and mixes in FP32, and casts the result."""

    def mix_and_cast(images: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        return tf.cast(mixer.images(images, seeds), dtype)

    # XLA compiles mixing also after an augmentation that it cannot compile.
    mix = device.compile_preprocessing(mix_and_cast, "none")
    return lambda images, seeds: mix(device.augment(images, seeds, kind, tf.float32), seeds)


def image_mixer(plan: RunPlan) -> ImageMixer | None:
    """Returns the mixer of images for MixUp and CutMix, or None without them."""
    data = plan.data
    if not (data.mixup_alpha or data.cutmix_alpha):
        return None
    return ImageMixer(data.mixup_alpha, data.cutmix_alpha, plan.virtual_gpus)


def batch_subsampler(plan: RunPlan, communicator: Communicator) -> BatchSubsampler | None:
    """Returns what selects random images of a batch, or None if all are used."""
    if not plan.step.smallest_random_batch:
        return None
    return BatchSubsampler(
        plan.step.smallest_random_batch,
        plan.virtual_gpus,
        communicator.size,
        communicator.allreduce_sum,
    )


def evaluation_preprocess(dtype: str) -> Callable[[Batch], tf.Tensor]:
    """Returns the function that normalizes a batch of validation images on the device."""
    prepare = device.compile_preprocessing(lambda images: device.normalize(images, dtype), "none")
    return lambda batch: prepare(batch["image"])


def host_options(reading: ReadingPlan, threads: int) -> pipeline.HostOptions:
    """Returns the options of reading and decoding on the host.

    Args:
      reading: Plan of reading.
      threads: Number of threads unless the plan has one.
    """
    return pipeline.HostOptions(
        threads=reading.threads or threads,
        device=_prefetch_device(),
        memory_bytes=reading.memory_bytes,
        bad_records=reading.bad_records,
        max_bad_records=reading.max_bad_records,
    )


def description(plan: RunPlan, source: Source) -> dict[str, Any]:
    """Describes the network for checkpoints, so that it can be used without the run's flags.

    Args:
      plan: Plan of the run.
      source: Training images, which have the classes.

    Returns:
      Values that JSON can represent.
    """
    return {
        **plan.network.architecture,
        "num_classes": source.num_classes,
        "class_names": list(source.class_names),
        "image_size": plan.validation.image_size,
        "batch_norm_epsilon": BATCH_NORM_EPSILON,
        "crop_fraction": plan.validation.crop_fraction,
        "loss": plan.step.loss,
        "eval_flip": plan.validation.flip,
        "optimizer": plan.optimizer.name,
        "version": __version__,
    }


def _prefetch_device() -> str | None:
    """Returns the GPU to which batches are copied ahead of the step, or None on a CPU."""
    return "/gpu:0" if tf.config.list_physical_devices("GPU") else None
