"""Declares the flags of every run, in groups, and collects the options of each choice.

The registries of optimizers, schedules and all-reduces declare the options of these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet.comm.settings import ALGORITHMS, CommunicationFlags
from hybrid_imagenet.data import datasets, splits
from hybrid_imagenet.data.augmentations import AUGMENTATIONS
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models.depths import DEPTHS, STEMS, WIDTH
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.options import Option, option, options_of
from hybrid_imagenet.runlog.trackers import DEFAULT_PROJECT, NAMES
from hybrid_imagenet.schedules.batch_schedule import MAX_BATCH, MAX_MICRO_BATCHES, MAX_PIXELS
from hybrid_imagenet.schedules.training_schedule import SCALINGS, SCHEDULES

GPU_BATCH = 256
"""Default of --per_gpu_batch on GPUs, where smaller batches leave most of a GPU idle."""


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Run and results."""

    recipe: str = option(
        "hybrid",
        "Named set of defaults, one per published method; `list` prints them all. Without this"
        " flag and without a flag file, --dataset=folder uses"
        f" {datasets.SOURCES['folder'].default_recipe}.",
        basic=True,
    )
    run_dir: str | None = option(
        None, "Directory for results (default: runs/RECIPE-DATASET).", basic=True
    )
    print_config: bool = option(
        False,
        "Print the settings that differ from the defaults, what set them, and the epochs in which"
        " the schedule changes; then exit. --print_config=all prints every setting and every"
        " epoch.",
        basic=True,
    )
    print_config_all: bool = option(False, "Same as --print_config=all.")
    print_config_gpus: int | None = option(
        None,
        "Number of GPUs to assume for --print_config and --check_only (default: those of this"
        " start).",
        unit="GPUs",
        minimum=1,
    )
    check_only: bool = option(
        False,
        "Check flags, data, run directory and checkpoint, print each check, and exit: 0 if the"
        " run can start, else 2 with an error.",
        basic=True,
    )
    resume: bool = option(
        False,
        "Continue the run in --run_dir with its settings from its latest valid checkpoint. Flags"
        " of this command replace its settings. If there is no run, start one.",
        basic=True,
    )
    epochs: float = option(
        90,
        "Passes over the training images; a schedule spans all of them. 0.5 is half a pass.",
        unit="epochs",
        above=0,
        maximum=1e6,
        keep_integer=True,
        basic=True,
    )
    max_steps: int | None = option(
        None,
        "Stop after this many steps of the run, with a validation and a checkpoint. Schedules still"
        " span --epochs.",
        unit="steps",
        minimum=1,
    )
    stop_at_top1: float | None = option(
        None,
        "Stop after a validation with at least this top-1 accuracy (a fraction).",
        minimum=0,
        maximum=1,
    )
    seed: int = option(
        0, "Seed of initialization, data order and augmentation.", minimum=0, basic=True
    )
    deterministic: bool = option(
        False, "Make runs bitwise repeatable on the same number of ranks on each host; slower."
    )
    log_every_steps: int = option(
        20,
        "Steps between fetches of the training metrics from the device. With 1 or 2 the host waits"
        " for a GPU at each of these steps.",
        unit="steps",
        minimum=1,
    )
    stall_timeout: float = option(
        300.0,
        "Stop the job after this time without progress. A hung rank is reported after 30 s, or"
        " after half of this time if that is less, or after four mean steps if these take longer."
        " 0 disables.",
        unit="s",
        minimum=0,
    )
    progress: str = option(
        "auto",
        "How rank 0 shows progress: a live area on a terminal, plain lines elsewhere.",
        choices=("auto", "live", "plain", "none"),
    )
    verbose: bool = option(
        False, "Also print how gradients travel between ranks: tensors, buckets, bytes per step."
    )
    tensorboard: bool = option(
        False, "Write TensorBoard events to RUN_DIR/tensorboard.", basic=True
    )
    tracker: str | None = option(
        None,
        "Also send the records to an experiment tracker, whose package must be installed. Works"
        " offline; a resumed run continues its run there.",
        choices=NAMES,
        basic=True,
    )
    tracker_project: str | None = option(
        None,
        "Project of --tracker, which MLflow calls experiment (default: WANDB_PROJECT,"
        f" MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT, or else {DEFAULT_PROJECT}).",
    )
    profile_steps: tuple[int, ...] = option(
        (),
        "First and last step to profile, as in 10,20: a trace for TensorBoard in RUN_DIR/profile.",
        minimum=1,
    )


@dataclasses.dataclass(frozen=True)
class EvaluationFlags:
    """Evaluation and checkpoints."""

    eval_every_epochs: float = option(
        1,
        "Epochs between validations; 0.5 is twice in each. With --lr_schedule=mlperf they are"
        " placed so that one comes after the epoch in which MLPerf's runs reached 75.9 %.",
        unit="epochs",
        above=0,
        maximum=1e6,
        keep_integer=True,
    )
    eval_batch: int | None = option(
        None,
        "Validation images per GPU and step (default: the training batch).",
        minimum=1,
        maximum=MAX_BATCH,
    )
    eval_image_size: int | None = option(
        None,
        "Side of validation images (default: --image_size).",
        unit="pixels",
        minimum=8,
        maximum=MAX_PIXELS,
    )
    eval_flip: bool = option(
        False,
        "Validate with the mean scores of an image and its mirror image; takes twice as long.",
    )
    target_top1: tuple[float, ...] = option(
        (0.75, 0.759),
        "Top-1 fractions; the first epoch that reaches each is reported, with its time.",
        minimum=0,
        maximum=1,
        basic=True,
    )
    single_gpu_throughput: float | None = option(
        None,
        "Images per second of one GPU alone, from which scaling efficiency is computed.",
        above=0,
    )
    checkpoint_every_epochs: float = option(
        1,
        "Epochs between checkpoints; 0.5 is twice in each.",
        unit="epochs",
        above=0,
        maximum=1e6,
        keep_integer=True,
    )
    checkpoint_every_steps: int | None = option(
        None, "Also save after this many steps.", unit="steps", minimum=1
    )
    checkpoint_every_seconds: float | None = option(
        None, "Also save after this time.", unit="s", minimum=1
    )
    keep_checkpoints: int = option(2, "Number of latest valid checkpoints to keep.", minimum=1)
    keep_best: bool = option(
        True, "Also save each epoch with the best validation top-1 so far, and keep the best one."
    )


@dataclasses.dataclass(frozen=True)
class DataFlags:
    """Data and augmentation."""

    dataset: str = option(
        "imagenet2012",
        f"Dataset: {datasets.HELP}.",
        basic=True,
    )
    data_dir: str | None = option(
        None,
        "Directory of the dataset (TFDS data_dir, shards or image tree); for"
        f" {datasets.URL_DATASETS} also a URL such as https://host/path, with --data_cache_dir for"
        " copies of its files.",
        basic=True,
    )
    storage_timeout: float = option(
        120.0,
        "Time for which failed requests to a URL are retried before the run stops.",
        unit="s",
        minimum=0,
    )
    shuffle_window: int | None = option(
        None,
        "Mix the images of this many shards (files) at a time, the shards in a new order each"
        " epoch; 0 mixes all images (default: 0, or for a URL 16 shards or 4 Parquet files).",
        unit="shards",
        minimum=0,
    )
    val_fraction: float = option(
        0.0,
        "Fraction of each class to hold out for validation, if --dataset=folder has no directory"
        " of validation images. The same images are held out in every run.",
        minimum=0,
        maximum=0.9,
        basic=True,
    )
    tuning_split: float = option(
        0.0,
        "Number of training images (below 1: fraction) to hold out for tuning. They are drawn by"
        " --seed, and validated instead of the validation images.",
        unit="images",
        minimum=0,
    )
    eval_split: str = option(
        "tuning",
        "Images to validate with --tuning_split: those held out for tuning or, for the final"
        " report, the validation images.",
        choices=("tuning", "validation"),
    )
    augmentation: str = option(
        "auto",
        "Training augmentation; shift (flips and whole-pixel shifts) is for small images. auto"
        " follows the dataset: digits for digits and other characters, shift for small pictures,"
        " else alexnet.",
        choices=("auto", *AUGMENTATIONS),
        basic=True,
    )
    mixup_alpha: float = option(
        0.0,
        "MixUp: blend each training image, and its label, with another one of its GPU's batch; the"
        " share of each is drawn from Beta(alpha, alpha), such as 0.2. With --cutmix_alpha too,"
        " each image is mixed by one of the two at random. 0 for none.",
        minimum=0,
        maximum=8,
    )
    cutmix_alpha: float = option(
        0.0,
        "CutMix: replace a square of each training image by that of another one of its GPU's batch,"
        " and share the label by area; the share is drawn from Beta(alpha, alpha), such as 1. 0 for"
        " none.",
        minimum=0,
        maximum=8,
    )
    eval_crop: float | None = option(
        None,
        "Side of the central square that is evaluated, as a fraction of the shorter side (default:"
        " 0.875, which is 224 of 256, or 1 with --augmentation=digits or shift).",
        minimum=0.05,
        maximum=1,
    )
    num_examples: int | None = option(
        None, "Training images of a synthetic dataset (default: as many as ImageNet).", minimum=1
    )
    num_classes: int | None = option(
        None,
        "Number of classes, if the files have no class names (manifest, labels.txt or metadata), or"
        " if some classes of a folder have no images.",
        minimum=1,
    )
    data_threads: int | None = option(
        None,
        "Decoding threads per rank (default: the machine's cores divided by its ranks).",
        minimum=1,
        maximum=4096,
    )
    data_memory_gb: float = option(
        4.0,
        "Memory of a rank for reading and decoding ahead (half) and for row groups of Parquet"
        " (half).",
        unit="GB",
        minimum=0.01,
    )
    data_cache_dir: str | None = option(
        None,
        "Local directory for copies of the files of a URL. The ranks of a machine and later runs"
        " share it.",
    )
    bad_records: str = option(
        "fail",
        "Reaction to a record that cannot be read or decoded: fail, or count, log and replace it.",
        choices=("fail", "skip"),
    )
    max_bad_records: int = option(
        100,
        "With --bad_records=skip, fail if there are more bad records on all ranks than this.",
        minimum=0,
    )
    loss: str = option(
        "softmax",
        "softmax: cross-entropy over all classes. sigmoid: the sum of a binary cross-entropy for"
        " each class.",
        choices=("softmax", "sigmoid"),
    )
    label_smoothing: float = option(
        0.0,
        "Probability moved from the true label to all labels.",
        minimum=0,
        maximum=1,
        basic=True,
    )
    class_weights: str = option(
        "none",
        "balanced: multiply the loss of each training image by n / (K * n_c), for n training images"
        " of K classes, n_c of them of its class, so that all classes count alike.",
        choices=("none", "balanced"),
    )

    @property
    def validated_split(self) -> str:
        """The images that are validated: `tuning` for those that --tuning_split holds out."""
        return self.eval_split if self.tuning_split else "validation"

    @property
    def half_memory_bytes(self) -> int:
        """Half of --data_memory_gb in bytes.

        One half is for batches that are read ahead, the other for the row groups of Parquet.
        """
        return int(self.data_memory_gb * 1e9 / 2)

    def num_held_out(self, num_examples: int) -> int:
        """Returns the number of training images that --tuning_split holds out.

        Raises:
          UserError: If no image is left to train on, or none to tune on.
        """
        try:
            return splits.num_held_out(self.tuning_split, num_examples)
        except ValueError as error:
            raise UserError(f"--tuning_split={self.tuning_split:g}: {error}") from None


@dataclasses.dataclass(frozen=True)
class NetworkFlags:
    """Model and precision."""

    model: str = option(
        "resnet50",
        "Network. keras:NAME is a network of keras.applications with random weights, such as"
        " keras:EfficientNetV2B0. MODULE:FUNCTION is your function, which takes num_classes and"
        " image_size, and returns a Keras model whose output is logits.",
        choices=(*DEPTHS, "alexnet_bn"),
        accepts_function=True,
        basic=True,
    )
    init_from: str | None = option(
        None,
        "Start with the weights of a checkpoint, a run, or a file of torchvision or timm; where the"
        " number of classes differs, the last layer starts with random weights.",
        basic=True,
    )
    freeze: tuple[str, ...] = option(
        (), "Do not train layers whose names start with one of these, and keep their statistics."
    )
    model_width: int = option(
        WIDTH,
        "Channels of a ResNet's first stage; each later stage has twice as many.",
        unit="channels",
        minimum=1,
        # The convolutions of a ResNet-50 of this width have 6 billion weights.
        maximum=1024,
    )
    stem: str = option(
        "imagenet",
        "First layer of a ResNet: 7x7 with stride 2 and a pooling, or for small images 3x3, also"
        " with stride 2.",
        choices=STEMS,
    )
    blurpool: bool = option(
        False,
        "Blur the features of a ResNet before each stride (Zhang 2019): less aliasing for some"
        " time.",
    )
    image_size: int = option(
        224,
        "Side of the square network input.",
        unit="pixels",
        minimum=8,
        maximum=MAX_PIXELS,
        basic=True,
    )
    image_size_schedule: tuple[str, ...] = option(
        (),
        "Size of training images by epoch: entries EPOCH:PIXELS, epochs counted from 0, as in"
        " 0:128,18:160,28:224; validation is at --image_size, or --eval_image_size, throughout.",
    )
    initializer: str = option(
        "kaiming",
        "Convolution weights (Lu et al. §2.2.3, Table 3.5).",
        choices=("kaiming", "xavier", "gaussian"),
    )
    zero_last_gamma: bool = option(
        True, "Start the last BN scale of each residual block at 0 (Lu et al., Table 3.6)."
    )
    batch_norm: str = option(
        "last",
        "Statistics used for inference: of the last iteration, averaged over all GPUs (Lu et al.),"
        " a moving average, or precise ones from frozen weights.",
        choices=("last", "moving", "precise"),
    )
    sync_batch_norm: bool = option(
        False, "Compute training statistics over all GPUs in every step (Lu et al., Table 3.4)."
    )
    bn_group: int = option(
        1,
        "Number of neighboring GPUs over which training statistics are computed; all GPUs are"
        " --sync_batch_norm.",
        unit="GPUs",
        minimum=1,
    )
    persistent_batch_norm: bool = option(
        True,
        "On GPUs, use cuDNN's kernels that normalize in one pass, in the layout of the"
        " convolutions. The order of their sums varies, so --deterministic never uses them.",
    )
    precision: str = option(
        "auto",
        "Compute type; auto is mixed_float16 on a GPU with tensor cores (V100 and newer),"
        " mixed_bfloat16 on a CPU with BF16 instructions, else float32.",
        choices=("auto", "float32", "mixed_float16", "mixed_bfloat16"),
        basic=True,
    )
    loss_scale: str = option(
        "auto",
        "dynamic, a number, or auto. auto is dynamic if gradients are computed in FP16, or sent in"
        " FP16 between ranks, else 1.",
    )
    max_skipped_steps: int = option(
        50,
        "Stop after this many skipped steps in a row (non-finite gradients).",
        unit="steps",
        minimum=1,
    )
    jit_compile: bool = option(
        False,
        "Compile the forward and the backward pass with XLA. With several GPUs, gradients are then"
        " reduced after the backward pass instead of during it. On by default for a ResNet in"
        " mixed_float16 on one GPU (A100 and newer), in a run of more than ten minutes without"
        " --virtual_gpus, --deterministic and schedules of batch or image size.",
    )
    jit_stem: bool = option(
        True,
        "Compute the normalization, ReLU and max pooling of a ResNet's stem as one XLA program on"
        " a GPU. On by default only in mixed_float16 without --deterministic.",
    )


@dataclasses.dataclass(frozen=True)
class OptimizationFlags:
    """Batch, optimizer and schedules."""

    per_gpu_batch: int = option(
        32,
        "Images per GPU and micro-batch, over which batch normalization computes its statistics."
        f" On GPUs the default is {GPU_BATCH}; most recipes use the batch of their paper.",
        unit="images",
        minimum=1,
        maximum=MAX_BATCH,
        basic=True,
    )
    virtual_gpus: int = option(
        1,
        "Number of GPUs that each rank emulates: it reads as many batches and normalizes each"
        " separately. Learning rates follow the number.",
        unit="GPUs",
        minimum=1,
        maximum=4096,
    )
    random_batch: int = option(
        0,
        "Smallest number of images that a GPU uses in a step: it draws a number between this and"
        " --per_gpu_batch, and omits the other images (Lu et al., Table 3.4, first row). Gradients"
        " and moments are weighted by the number; learning rates do not change. 0 uses all images."
        " Needs --sync_batch_norm.",
        unit="images",
        minimum=0,
    )
    gradient_accumulation_steps: int = option(
        1,
        "Micro-batches per update. Their gradients are added up on each GPU, and reduced over GPUs"
        " once per update.",
        minimum=1,
        maximum=MAX_MICRO_BATCHES,
        basic=True,
    )
    batch_schedule: tuple[str, ...] = option(
        (),
        "Batch by epoch (Mikami et al., Table 3): flash_exp1 to flash_exp4, or entries"
        " EPOCH:IMAGES, EPOCH:IMAGESxACCUMULATION or EPOCH:*FACTOR; images are per GPU, epochs"
        " count from 0, factors refer to the first batch.",
    )
    batch_growth: str = option(
        "per_gpu",
        "What a factor in --batch_schedule multiplies: the images per GPU (per_gpu), or the"
        " micro-batches per update (accumulation).",
        choices=("per_gpu", "accumulation"),
    )
    optimizer: str = option("hybrid", "Update rule.", choices=tuple(OPTIMIZERS), basic=True)
    ema_decay: float = option(
        0.0,
        "Keep an exponential moving average of the weights with this decay, and validate it, with"
        " precise statistics whatever --batch_norm is; 0 for none. It is ramped up: (1 + t) / (10 +"
        " t) after t updates, if that is less.",
        minimum=0,
        maximum=0.999999,
    )
    ema_every: int = option(
        1,
        "Steps between two updates of the average of --ema_decay.",
        unit="steps",
        minimum=1,
    )
    lr: float = option(0.1, "Learning rate before --lr_scaling.", minimum=0, basic=True)
    lr_scaling: str = option(
        "workers",
        "Linear scaling: lr * N (Lu et al.), lr * B / 256 (Goyal et al.), or none.",
        choices=SCALINGS,
    )
    lr_schedule: str = option(
        "exponential",
        "How the learning rate decays after the warmup. flash_a and flash_b are the schedules of"
        " Mikami et al., warmup included; mlperf is polynomial, with MLPerf's values for the"
        " batch.",
        choices=tuple(SCHEDULES),
        basic=True,
    )
    warmup_epochs: float = option(
        10.0,
        "Epochs of the AdaBound or linear warmup, T of Lu et al.",
        unit="epochs",
        minimum=0,
        basic=True,
    )


REMOVED = {
    "adabound_beta1": ("It is 0.9. In model.fit, hi.optimizers.AdaBound(beta1=...) can change it."),
    "adabound_beta2": (
        "It is 0.999. In model.fit, hi.optimizers.AdaBound(beta2=...) can change it."
    ),
    "adamw_beta1": "It is 0.9. In model.fit, hi.optimizers.AdamW(beta1=...) can change it.",
    "adamw_beta2": "It is 0.999. In model.fit, hi.optimizers.AdamW(beta2=...) can change it.",
    "batch_norm_epsilon": (
        "It is 1e-5. Use your own network, --model=MODULE:FUNCTION, to change it."
    ),
    "batch_norm_momentum": (
        "It is 0.9. Use your own network, --model=MODULE:FUNCTION, to change it."
    ),
    "data_cache": (
        "The operating system keeps files that were read in free memory. Omit the flag."
    ),
    "decoder": "TensorFlow decodes all images. Omit the flag.",
    "eval_offset_epochs": (
        "With --lr_schedule=mlperf it follows MLPerf's rules, else it is 0. Use a smaller"
        " --eval_every_epochs to validate in other epochs."
    ),
    "jit_update": "The update is always a program of its own. Omit the flag.",
    "lr_final": (
        "The polynomial and cosine schedules end at 0. In model.fit, hi.schedules.cosine(final=...)"
        " can change it."
    ),
    "lr_step_factor": (
        "It is 0.1. Use --lr_schedule=exponential with --lr_decay for another factor."
    ),
    "muon_other_rate": "It is 1. Omit the flag.",
    "precise_batch_norm_batches": "It is 16. Omit the flag.",
    "remainder": (
        "The last batch of an epoch is filled from the next epoch, so that each image is used once"
        " per epoch. Omit the flag."
    ),
    "xla_programs": "Use --jit_stem or --nojit_stem. The programs norm and shortcut are gone.",
}
"""Flags that were removed: how to do without each, as sentences."""


GROUPS: Mapping[str, type] = {
    "run": RunFlags,
    "evaluation": EvaluationFlags,
    "data": DataFlags,
    "network": NetworkFlags,
    "optimization": OptimizationFlags,
    "communication": CommunicationFlags,
}
"""The groups of flags, by the attribute of a `RunConfig` that has their values."""
COMMON = {
    name: declared for group in GROUPS.values() for name, declared in options_of(group).items()
}
"""The flags of every run."""
GROUP_OF_FLAG = {
    name: attribute for attribute, group in GROUPS.items() for name in options_of(group)
}
"""The group of each flag of every run."""
CHOICES: Mapping[str, Mapping[str, Mapping[str, Option]]] = {
    "optimizer": {name: method.flags for name, method in OPTIMIZERS.items()},
    "lr_schedule": {name: options_of(decay) for name, decay in SCHEDULES.items()},
    "allreduce": {name: options_of(algorithm.options) for name, algorithm in ALGORITHMS.items()},
}
"""The options of each value of a flag that selects an implementation."""
OPTIONS = COMMON | {
    name: declared
    for values in CHOICES.values()
    for options in values.values()
    for name, declared in options.items()
}
"""All flags. If several choices declare the same flag, the last declaration wins."""


def default_values(choices: Mapping[str, str]) -> dict[str, Any]:
    """Returns the declared default of each flag.

    Args:
      choices: The chosen optimizer, schedule and all-reduce, by flag. Their options are among the
        flags.
    """
    declared = dict(COMMON)
    for flag, choice in choices.items():
        declared |= CHOICES[flag].get(choice, {})
    return {name: each_option.default for name, each_option in declared.items()}


def owners(flag: str, name: str) -> list[str]:
    """Returns the values of a flag that have an option."""
    return [value for value, options in CHOICES[flag].items() if name in options]
