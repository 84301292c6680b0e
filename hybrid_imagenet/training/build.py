"""Builds each component of a run from its configuration.

It is the only module that knows both the flags and the constructors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet import __version__, optimizers, xla
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.config import RunConfig, derived
from hybrid_imagenet.config.flag_checks import check_classes
from hybrid_imagenet.config.flags import DataFlags
from hybrid_imagenet.data import augmentations, class_sizes, device, listing, pipeline, splits
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
from hybrid_imagenet.options import Origin
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.training import warm_start
from hybrid_imagenet.training.losses import LOSSES, initial_bias
from hybrid_imagenet.training.random_batch import RandomBatch
from hybrid_imagenet.training.step import Batch, TrainStep


def sources(config: RunConfig) -> tuple[Source, Source]:
    """Returns the training images and the validation images.

    With --tuning_split some training images are held out. They are the validation images unless
    --eval_split selects another split.

    Raises:
      UserError: if the images cannot be used.
    """
    memory_bytes = _half_memory(config.data)
    opened = {}
    for split in SPLITS:
        request = DatasetRequest.from_flags(config.data, split, memory_bytes=memory_bytes)
        opened[split] = request.open()
    train = opened["train"]
    validation = opened["validation"]
    listing.check_splits(config.data.dataset, train.class_names, validation.class_names)
    check_classes(config.data, train.num_classes)
    if not config.data.tuning_split:
        return train, validation
    num_held_out = derived.held_out(config.data, train.num_examples)
    remaining, held_out = splits.split_for_tuning(num_held_out, train.num_examples, config.run.seed)
    if derived.validated_split(config.data) == "tuning":
        validation = Subset(train, held_out)
    return Subset(train, remaining, train.notes), validation


def sources_by_name(config: RunConfig, train: Source, validation: Source) -> dict[str, Source]:
    """Returns the sources of a run by the name of their split, such as "training"."""
    return {"training": train, derived.validated_split(config.data): validation}


def check_shuffle_window(data: DataFlags, source: Source) -> None:
    """Raises UserError for --shuffle_window with a dataset that has no shards."""
    if data.shuffle_window and source.shard_sizes is None:
        raise UserError(
            f"--shuffle_window={data.shuffle_window} needs a dataset in shards (such as"
            f" tfrecord), not {data.dataset}. Omit the flag."
        )


def sample_order(config: RunConfig, source: Source) -> SampleOrder:
    """Returns the order of training examples."""
    data = config.data
    return pipeline.example_order(source, data.shuffle_window or 0, config.run.seed)


def model(
    config: RunConfig, precision: str, num_classes: int, communicator: Communicator
) -> keras.Model:
    """Returns the network; layers of --freeze are excluded from training.

    Raises:
      UserError: if a flag does not fit the network.
    """
    virtual_gpus, ranks_per_group = derived.batch_norm_groups(config)
    sync_allreduce = None
    if ranks_per_group > 1:
        is_over_all_ranks = ranks_per_group == communicator.size
        sync_allreduce = (
            communicator.allreduce_sum if is_over_all_ranks else communicator.allreduce_neighbors
        )
    other_sizes = config.network.image_size_schedule or config.evaluation.eval_image_size
    network = factory.create(
        config.network.model,
        num_classes,
        None if other_sizes else config.network.image_size,
        precision=precision,
        initializer=config.network.initializer,
        zero_last_gamma=config.network.zero_last_gamma,
        batch_norm=config.network.batch_norm,
        seed=config.run.seed,
        width=config.network.model_width,
        stem=config.network.stem,
        blurpool=config.network.blurpool,
        initial_bias=initial_bias(config.data.loss, num_classes),
        virtual_gpus=virtual_gpus,
        sync_allreduce=sync_allreduce,
        # On a CPU separate layers are faster.
        jit_stem=config.network.jit_stem and xla.has_gpu(),
    )
    warm_start.freeze(network, config.network.freeze)
    return network


def optimizer(
    config: RunConfig, network: keras.Model, communicator: Communicator
) -> DistributedOptimizer:
    """Returns the optimizer, with reduction over ranks, loss scale, schedule and weight average."""
    inner = optimizers.create(**derived.optimizer_arguments(config))
    inner.set_kinds(classify(network))
    average = None
    if config.optimization.ema_decay:
        average = WeightAverage(config.optimization.ema_decay, config.optimization.ema_every)
    distributed_optimizer = DistributedOptimizer(
        inner,
        compression=config.communication.compression,
        loss_scale=config.network.loss_scale,
        schedule=derived.schedule(config),
        communicator=communicator,
        average=average,
    )
    # The loss scale follows from the type in which the network computes.
    distributed_optimizer.attach(network)
    return distributed_optimizer


def train_step(
    config: RunConfig,
    precision: str,
    network: keras.Model,
    distributed_optimizer: DistributedOptimizer,
    omit_images: RandomBatch | None = None,
    class_weights: npt.NDArray[np.float32] | None = None,
) -> TrainStep:
    """Returns the training step of the network.

    Args:
      config: sets loss, augmentation and compilation.
      precision: name of a Keras dtype policy, such as mixed_float16.
      network: returned by `model`.
      distributed_optimizer: returned by `optimizer`.
      omit_images: returned by `random_batch`.
      class_weights: returned by `class_weights`.
    """
    return TrainStep(
        network,
        distributed_optimizer,
        train_preprocess(config, precision.removeprefix("mixed_")),
        loss=LOSSES[config.data.loss],
        label_smoothing=config.data.label_smoothing,
        jit_compile=_compiles_step(config),
        omit_images=omit_images,
        mixer=image_mixer(config),
        class_weights=class_weights,
    )


def _compiles_step(config: RunConfig) -> bool:
    """Returns whether XLA compiles forward and backward pass.

    Unless --jit_compile was set, XLA is not used without a GPU, or where it does not work.
    """
    # A run that is resumed keeps its default.
    is_default = config.origins.get("jit_compile") in (Origin.HARDWARE, Origin.RUN)
    if config.network.jit_compile and is_default:
        return xla.has_gpu() and xla.supports_step()
    return config.network.jit_compile


def class_weights(
    config: RunConfig, source: Source, communicator: Communicator
) -> npt.NDArray[np.float32] | None:
    """Returns the weight of each class in the loss (--class_weights), float32 [classes], or None.

    Every rank calls it. Rank 0 counts the training images of each class.

    Raises:
      UserError: on all ranks, if they cannot be counted.
    """
    if config.data.class_weights == "none":
        return None
    sizes: list[int] = []
    with communicator.raise_on_all_ranks():
        if communicator.rank == 0:
            sizes = class_sizes.count_classes(source, config.data.dataset).tolist()
    sizes = communicator.broadcast_object(sizes)
    return class_sizes.balanced_weights(np.array(sizes, np.int64))


def train_preprocess(config: RunConfig, dtype: str) -> Callable[[Batch], tf.Tensor]:
    """Returns the function that augments a training batch on the device.

    Args:
      config: names the augmentation.
      dtype: of the images that the function returns.
    """
    kind = config.data.augmentation
    mixer = image_mixer(config)

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


def image_mixer(config: RunConfig) -> ImageMixer | None:
    """Returns the mixer of images for --mixup_alpha and --cutmix_alpha, or None if both are 0."""
    data = config.data
    if not (data.mixup_alpha or data.cutmix_alpha):
        return None
    return ImageMixer(data.mixup_alpha, data.cutmix_alpha, config.optimization.virtual_gpus)


def random_batch(config: RunConfig, communicator: Communicator) -> RandomBatch | None:
    """Returns the function that omits images of a batch for --random_batch, or None without it."""
    if not config.optimization.random_batch:
        return None
    return RandomBatch(
        config.optimization.random_batch,
        config.optimization.virtual_gpus,
        communicator.size,
        communicator.allreduce_sum,
    )


def evaluation_preprocess(dtype: str) -> Callable[[Batch], tf.Tensor]:
    """Returns the function that normalizes a batch of validation images on the device."""
    prepare = device.compile_preprocessing(lambda images: device.normalize(images, dtype), "none")
    return lambda batch: prepare(batch["image"])


def host_options(data: DataFlags, threads: int) -> pipeline.HostOptions:
    """Returns the options of reading and decoding on the host.

    Args:
      data: flags of the data.
      threads: number of threads unless --data_threads is set.
    """
    return pipeline.HostOptions(
        threads=data.data_threads or threads,
        device=_prefetch_device(),
        memory_bytes=_half_memory(data),
        bad_records=data.bad_records,
        max_bad_records=data.max_bad_records,
    )


def evaluation_crop(data: DataFlags) -> float:
    """Returns the side of the square that is evaluated, as a fraction of the shorter side."""
    if data.eval_crop is not None:
        return data.eval_crop
    return augmentations.evaluation_fraction(data.augmentation)


def description(config: RunConfig, source: Source) -> dict[str, Any]:
    """Describes the network for checkpoints, so that it can be used without the run's flags.

    Args:
      config: of the run.
      source: training images, which have the classes.

    Returns:
      Values that JSON can represent.
    """
    return {
        "model": config.network.model,
        "num_classes": source.num_classes,
        "class_names": list(source.class_names),
        "image_size": derived.evaluation_size(config),
        "width": config.network.model_width,
        "stem": config.network.stem,
        "blurpool": config.network.blurpool,
        "batch_norm_epsilon": BATCH_NORM_EPSILON,
        "crop_fraction": evaluation_crop(config.data),
        "loss": config.data.loss,
        "eval_flip": config.evaluation.eval_flip,
        "optimizer": config.optimization.optimizer,
        "version": __version__,
    }


def _prefetch_device() -> str | None:
    """Returns the GPU to which batches are copied ahead of the step, or None on a CPU."""
    return "/gpu:0" if tf.config.list_physical_devices("GPU") else None


def _half_memory(data: DataFlags) -> int:
    """Returns half of --data_memory_gb in bytes.

    One half is for batches that are read ahead, the other for the row groups of Parquet.
    """
    return int(data.data_memory_gb * 1e9 / 2)
