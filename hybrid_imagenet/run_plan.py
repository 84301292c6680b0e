"""Plans a run: computes everything that training needs from its settings, once.

`make` turns a `RunConfig`, which has flags, into a frozen `RunPlan`, which has numbers and typed
options. Training takes the plan or a part of it, and asks for no flag and derives no number again.

`differences` compares two plans. Fields that do not decide what is trained are declared with
`compare=False`.

Nothing here imports TensorFlow, because --print_config and the checks before a run make plans too.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet import optimizers
from hybrid_imagenet.comm.settings import CommunicationSettings
from hybrid_imagenet.config import RunConfig, derived, smaller_batch_advice
from hybrid_imagenet.data import augmentations
from hybrid_imagenet.errors import SharedError, pluralize
from hybrid_imagenet.optimizers.registry import (
    OPTIMIZERS,
    AdaBoundOptions,
    HybridOptions,
    OptimizerSpec,
    Options,
)
from hybrid_imagenet.options import Origin, format_value
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.batch_schedule import BatchSchedule, ImageSizes
from hybrid_imagenet.schedules.run_length import RunLength, is_due
from hybrid_imagenet.schedules.training_schedule import (
    REFERENCE_BATCH,
    Decay,
    LinearWarmup,
    Rule,
    Schedule,
    WarmupFromZero,
)

if TYPE_CHECKING:
    from hybrid_imagenet.optimizers.grouped import GroupedOptimizer


class XlaUse(enum.Enum):
    """Whether XLA compiles the forward and the backward pass."""

    OFF = "off"
    # A default, which applies on a GPU where XLA works.
    IF_POSSIBLE = "if possible"
    ON = "on"


@dataclasses.dataclass(frozen=True)
class ReadingPlan:
    """How the host reads and decodes images.

    Attributes:
      threads: Decoding threads per rank; None for the cores of the machine divided by its ranks.
      memory_bytes: Limit on batches that are read ahead.
      bad_records: "fail", or "skip" to replace records that cannot be used.
      max_bad_records: Limit on bad records of all ranks if they are replaced.
    """

    threads: int | None
    memory_bytes: int
    bad_records: str
    max_bad_records: int


@dataclasses.dataclass(frozen=True)
class DataPlan:
    """The training images, and how they are changed.

    Attributes:
      dataset: Name of the dataset.
      shuffle_window: Shards whose images are mixed at a time; 0 mixes all images.
      augmentation: Name of the training augmentation, one of `augmentations.AUGMENTATIONS`.
      mixup_alpha: Parameter of MixUp; 0 for none.
      cutmix_alpha: Parameter of CutMix; 0 for none.
      reading: How the host reads and decodes.
    """

    dataset: str
    shuffle_window: int
    augmentation: str
    mixup_alpha: float
    cutmix_alpha: float
    reading: ReadingPlan = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class NetworkPlan:
    """The network.

    Attributes:
      model: Name of the network, or MODULE:FUNCTION.
      width: Channels of the first stage of a ResNet.
      stem: First layer of a ResNet, one of `models.depths.STEMS`.
      blurpool: Whether a ResNet blurs before each stride.
      input_size: Side of its images in pixels; None if training and validation have several sizes.
      initializer: Distribution of the first convolution weights.
      zero_last_gamma: Whether the last scale of each residual block begins at 0.
      batch_norm: Statistics for inference: "last", "moving" or "precise".
      parts_per_rank: Equal parts of a rank's batch that are normalized separately.
      ranks_per_group: Neighboring ranks whose batches are normalized together. Either this or
        `parts_per_rank` is 1.
      persistent_batch_norm: Whether cuDNN may normalize in one pass.
      jit_stem: Whether XLA computes the end of the stem on a GPU.
      frozen_layers: Beginnings of the names of layers that are not trained.
      init_from: File or run whose weights training begins with, or None.
    """

    model: str
    width: int
    stem: str
    blurpool: bool
    input_size: int | None
    initializer: str
    zero_last_gamma: bool
    batch_norm: str
    parts_per_rank: int
    ranks_per_group: int
    persistent_batch_norm: bool
    jit_stem: bool
    frozen_layers: tuple[str, ...]
    init_from: str | None

    @property
    def architecture(self) -> dict[str, Any]:
        """The settings that decide which variables there are, by the keys of a checkpoint."""
        return {
            "model": self.model,
            "width": self.width,
            "stem": self.stem,
            "blurpool": self.blurpool,
        }


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The compiled training step.

    Attributes:
      loss: Name of the loss, a key of `losses.LOSSES`.
      label_smoothing: Probability that is moved from the true label to all labels.
      balances_classes: Whether the loss of each image has the weight of its class.
      smallest_random_batch: Smallest number of images that a GPU draws for a step; 0 uses all.
      xla: Whether XLA compiles the forward and the backward pass.
    """

    loss: str
    label_smoothing: float
    balances_classes: bool
    smallest_random_batch: int
    xla: XlaUse


@dataclasses.dataclass(frozen=True)
class OptimizerPlan:
    """The optimizer.

    Attributes:
      name: Key of `optimizers.registry.OPTIMIZERS`.
      options: The arguments of its class. The learning rate is the peak after scaling.
      compression: Key of `comm.settings.WIRE_DTYPES`, the type in which gradients are sent.
      loss_scale: "auto", "dynamic" or a number.
      average_decay: Decay of the averaged weights; 0 for no average.
      average_every: Steps between two updates of the average.
      max_skipped_steps: Number of skipped steps in a row after which training fails.
    """

    name: str
    options: Options
    compression: str
    loss_scale: str
    average_decay: float
    average_every: int
    max_skipped_steps: int

    @property
    def spec(self) -> OptimizerSpec:
        """The line of the optimizer in the registry."""
        return OPTIMIZERS[self.name]

    def create(self) -> GroupedOptimizer:
        """Creates the optimizer, without reduction and schedule; it loads TensorFlow."""
        return optimizers.create(self.name, **vars(self.options))


@dataclasses.dataclass(frozen=True)
class SchedulePlan:
    """Learning rate, momentum and bounds.

    Attributes:
      decay: The schedule of the learning rate, with its options.
      end_epoch: Epoch at which a schedule that decays to 0 reaches it.
      learning_rate: Learning rate before scaling.
      scaling: What scales it: "workers", "batch" or "none".
      warmup_epochs: T, the length of the warmup.
      rules: Options of the warmup, of the momentum, and of the scaling of Adam's learning rate, as
        far as the optimizer has them.
      values: The function that returns the values of a step; it follows from all others.
    """

    decay: Decay
    end_epoch: float
    learning_rate: float
    scaling: str
    warmup_epochs: float
    rules: tuple[Rule, ...]
    values: Schedule = dataclasses.field(compare=False)

    @property
    def warmup_start(self) -> float:
        """Learning rate at which a linear warmup starts; 0 for the bounded one."""
        for rule in self.rules:
            if isinstance(rule, LinearWarmup | WarmupFromZero):
                return rule.warmup_start_lr
        return 0.0


@dataclasses.dataclass(frozen=True)
class ValidationPlan:
    """When and how the network is validated.

    Attributes:
      split: Which images: "validation", or "tuning" for those held out from training.
      every_epochs: Epochs between two validations.
      offset_epochs: Epoch after which `every_epochs` counts.
      batch: Images per rank and step.
      image_size: Side of the images in pixels.
      crop_fraction: Side of the evaluated square, as a fraction of the shorter side of an image.
      flip: Whether an image and its mirror image are averaged.
      target_top1: Accuracies whose epoch and time are reported.
      stop_at_top1: Accuracy at which training stops, or None.
    """

    split: str
    every_epochs: float
    offset_epochs: float
    batch: int
    image_size: int
    crop_fraction: float
    flip: bool
    target_top1: tuple[float, ...]
    stop_at_top1: float | None

    def is_due(self, after: float, until: float) -> bool:
        """Returns whether a validation is due in (after, until], both in epochs."""
        return is_due(self.every_epochs, self.offset_epochs, after, until)


@dataclasses.dataclass(frozen=True)
class CheckpointPlan:
    """When checkpoints are saved, and which are kept.

    Attributes:
      every_epochs: Epochs between two checkpoints.
      every_steps: Steps between two more; None for none.
      every_seconds: Seconds between two more; None for none.
      keep_latest: Number of latest valid checkpoints that are kept.
      keep_best: Whether the best one is saved and kept too.
    """

    every_epochs: float
    every_steps: int | None
    every_seconds: float | None
    keep_latest: int
    keep_best: bool


@dataclasses.dataclass(frozen=True)
class RecordingPlan:
    """The files and messages of a start of the run.

    Attributes:
      recipe: Name of the recipe, which the default directory has.
      run_dir: Directory of the run; None for the default one.
      resume: Whether the run in the directory continues.
      data_dir: Directory or URL of the dataset, for the commands that are suggested at the end.
      progress: Kind of view: "auto", "live", "plain" or "none".
      verbose: Whether messages for developers are printed.
      log_every_steps: Steps between two records.
      profile_steps: First and last step to profile; empty for none.
      tensorboard: Whether events for TensorBoard are written.
      tracker: Name of an experiment tracker, or None.
      tracker_project: Its project, or None for the default one.
      target_was_set: Whether somebody has set `ValidationPlan.target_top1`.
      single_gpu_images_per_second: Speed of one GPU alone, or None.
      stall_timeout: Seconds without progress after which the job stops; 0 for no limit.
      settings: What config.json stores about the flags, see `RunConfig.stored`.
      smaller_batch_advice: Sentence for a run whose batch does not fit into memory.
    """

    recipe: str
    run_dir: str | None
    resume: bool
    data_dir: str | None
    progress: str
    verbose: bool
    log_every_steps: int
    profile_steps: tuple[int, ...]
    tensorboard: bool
    tracker: str | None
    tracker_project: str | None
    target_was_set: bool
    single_gpu_images_per_second: float | None
    stall_timeout: float
    settings: Mapping[str, Mapping[str, Any]]
    smaller_batch_advice: str


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """Everything that a run does, in numbers and typed options.

    Attributes:
      title: Network, dataset, ranks and batch, as text.
      workers: N, the number of GPUs that learning rates and batches follow.
      virtual_gpus: Number of them that each rank emulates.
      seed: Seed of initialization, order and augmentation.
      deterministic: Whether TensorFlow runs in deterministic mode.
      precision: Keras dtype policy in which the network computes; "auto" if the plan was made
        before the hardware was known.
      epochs: Passes over the training images.
      max_steps: Limit on the steps of the run, or None.
      batches: Batch of a worker in each epoch.
      image_sizes: Side of training images in each epoch.
      data: The training images.
      network: The network.
      step: The compiled training step.
      optimizer: The optimizer.
      schedule: Learning rate, momentum and bounds at each step.
      communication: How the ranks communicate.
      validation: When and how the network is validated.
      checkpoints: When checkpoints are saved.
      recording: The files and messages of a start of the run.
    """

    title: str = dataclasses.field(compare=False)
    workers: int
    virtual_gpus: int
    seed: int
    deterministic: bool
    precision: str
    epochs: float
    max_steps: int | None = dataclasses.field(compare=False)
    batches: BatchSchedule
    image_sizes: ImageSizes
    data: DataPlan
    network: NetworkPlan
    step: StepPlan
    optimizer: OptimizerPlan
    schedule: SchedulePlan
    communication: CommunicationSettings
    validation: ValidationPlan
    checkpoints: CheckpointPlan
    recording: RecordingPlan = dataclasses.field(compare=False)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.workers // self.virtual_gpus

    @property
    def normalized_gpus(self) -> int:
        """Number of GPUs whose images are normalized together."""
        network = self.network
        return self.virtual_gpus // network.parts_per_rank * network.ranks_per_group

    @property
    def compute_dtype(self) -> str:
        """Name of the dtype in which the network computes, such as float16."""
        return self.precision.removeprefix("mixed_")

    @property
    def base_batch(self) -> int:
        """Images per update of all workers at the start of the run."""
        return self.global_batch(0)

    def global_batch(self, epoch: int) -> int:
        """Returns the images per update of all workers in an epoch, counted from 0."""
        return self.batches.at(epoch).global_batch(self.workers)

    def length(self, order: SampleOrder) -> RunLength:
        """Returns where the run stops.

        Args:
          order: Order of the training examples.
        """
        return RunLength(order, self.epochs, self.max_steps)

    def values_at(self, epoch: float) -> dict[str, float]:
        """Returns the values of the schedule for a step that begins at a fractional epoch."""
        return self.schedule.values(epoch, epoch, self.global_batch(int(epoch)))

    def peak_epochs(self) -> list[float]:
        """Returns the fractional epochs at which a schedule can have its peak.

        They are the starts of epochs, and the times just before and after the warmup.
        """
        end = self.schedule.warmup_epochs
        ends_of_warmup = (math.nextafter(end, 0), end, end + self.schedule.values.ramp_epochs)
        epochs = {float(epoch) for epoch in range(math.ceil(self.epochs))}
        epochs |= {epoch for epoch in ends_of_warmup if epoch < self.epochs}
        return sorted(epochs)

    def peak_learning_rate(self) -> float:
        """Returns the largest learning rate of the run."""
        return max(self.values_at(epoch)["learning_rate"] for epoch in self.peak_epochs())


def make(config: RunConfig, precision: str | None = None) -> RunPlan:
    """Plans a run.

    Args:
      config: Complete settings of the run, for its number of GPUs.
      precision: Keras dtype policy in which the network computes; by default what --precision
        says, before the hardware is known.

    Raises:
      SharedError: If groups for normalization do not contain all GPUs. All ranks raise it.
    """
    _check_groups(config)
    return RunPlan(
        title=_title(config),
        workers=config.gpus,
        virtual_gpus=config.optimization.virtual_gpus,
        seed=config.run.seed,
        deterministic=config.run.deterministic,
        precision=precision or config.network.precision,
        epochs=config.run.epochs,
        max_steps=config.run.max_steps,
        batches=derived.batches(config),
        image_sizes=derived.sizes(config.network),
        data=_plan_data(config),
        network=_plan_network(config),
        step=_plan_step(config),
        optimizer=_plan_optimizer(config),
        schedule=_plan_schedule(config),
        communication=_plan_communication(config),
        validation=_plan_validation(config),
        checkpoints=_plan_checkpoints(config),
        recording=_plan_recording(config),
    )


def _batch_norm_groups(config: RunConfig) -> tuple[int, int]:
    """Returns over which images batch normalization computes its statistics.

    Returns:
      The number of equal parts of a rank's batch that are normalized separately, and the number of
      neighboring ranks whose batches are normalized together. One of the two is 1.
    """
    if config.network.sync_batch_norm:
        return 1, config.ranks
    group = config.network.bn_group
    virtual_gpus = config.optimization.virtual_gpus
    if group <= virtual_gpus:
        return virtual_gpus // group, 1
    return 1, group // virtual_gpus


def _check_groups(config: RunConfig) -> None:
    """Checks --bn_group and --sync_batch_norm against the number of GPUs.

    Raises:
      SharedError: If the groups do not contain all GPUs, or XLA would have to compile sums over
        ranks, which it cannot. All ranks raise the same error.
    """
    network = config.network
    gpus = config.gpus
    if gpus % network.bn_group:
        raise SharedError(
            f"--bn_group={network.bn_group} does not divide {gpus} GPUs. Set it to a divisor of"
            f" {gpus}."
        )
    _, num_ranks = _batch_norm_groups(config)
    if network.jit_compile and num_ranks > 1:
        flag = "sync_batch_norm" if network.sync_batch_norm else f"bn_group={network.bn_group}"
        raise SharedError(
            f"--{flag} cannot be combined with --jit_compile, because XLA cannot compile sums over"
            " ranks. Omit one of them."
        )


def differences(before: RunPlan, now: RunPlan) -> list[str]:
    """Returns a line for each value in which two plans differ, such as "workers: 2 -> 4"."""
    old_values = _values("", before)
    new_values = _values("", now)
    lines = []
    for name in {**old_values, **new_values}:
        old = old_values.get(name)
        new = new_values.get(name)
        if old != new:
            lines.append(f"{name}: {_format(old)} -> {_format(new)}")
    return lines


def _values(name: str, value: Any) -> dict[str, Any]:
    """Returns the compared values of a part of a plan, by their paths such as "network.width"."""
    prefix = f"{name}." if name else ""
    if dataclasses.is_dataclass(value):
        values: dict[str, Any] = {name: type(value).__name__}
        for field in dataclasses.fields(value):
            if field.compare:
                values |= _values(f"{prefix}{field.name}", getattr(value, field.name))
        return values
    if isinstance(value, Mapping):
        members = {str(key): member for key, member in value.items()}
    elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
        members = {str(index): member for index, member in enumerate(value)}
    else:
        return {name: value}
    values = {}
    for key, member in members.items():
        values |= _values(f"{prefix}{key}", member)
    return values


def _format(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    return f"{value:.6g}" if isinstance(value, float) else format_value(value)


def _title(config: RunConfig) -> str:
    optimization = config.optimization
    batch = pluralize(config.ranks, "rank")
    if optimization.virtual_gpus > 1:
        batch += f" x {optimization.virtual_gpus} virtual GPUs"
    batch += f" x {optimization.per_gpu_batch} images"
    return f"{config.network.model} on {config.data.dataset}, {batch}"


def _plan_data(config: RunConfig) -> DataPlan:
    data = config.data
    return DataPlan(
        dataset=data.dataset,
        shuffle_window=data.shuffle_window or 0,
        augmentation=data.augmentation,
        mixup_alpha=data.mixup_alpha,
        cutmix_alpha=data.cutmix_alpha,
        reading=ReadingPlan(
            threads=data.data_threads,
            memory_bytes=data.half_memory_bytes,
            bad_records=data.bad_records,
            max_bad_records=data.max_bad_records,
        ),
    )


def _plan_network(config: RunConfig) -> NetworkPlan:
    network = config.network
    has_other_sizes = network.image_size_schedule or config.evaluation.eval_image_size
    parts_per_rank, ranks_per_group = _batch_norm_groups(config)
    return NetworkPlan(
        model=network.model,
        width=network.model_width,
        stem=network.stem,
        blurpool=network.blurpool,
        input_size=None if has_other_sizes else network.image_size,
        initializer=network.initializer,
        zero_last_gamma=network.zero_last_gamma,
        batch_norm=network.batch_norm,
        parts_per_rank=parts_per_rank,
        ranks_per_group=ranks_per_group,
        persistent_batch_norm=network.persistent_batch_norm,
        jit_stem=network.jit_stem,
        frozen_layers=network.freeze,
        init_from=network.init_from,
    )


def _plan_step(config: RunConfig) -> StepPlan:
    xla = XlaUse.OFF
    if config.network.jit_compile:
        # A run that is resumed keeps its default.
        is_default = config.origins.get("jit_compile") in (Origin.HARDWARE, Origin.RUN)
        xla = XlaUse.IF_POSSIBLE if is_default else XlaUse.ON
    return StepPlan(
        loss=config.data.loss,
        label_smoothing=config.data.label_smoothing,
        balances_classes=config.data.class_weights == "balanced",
        smallest_random_batch=config.optimization.random_batch,
        xla=xla,
    )


def _plan_optimizer(config: RunConfig) -> OptimizerPlan:
    return OptimizerPlan(
        name=config.optimization.optimizer,
        options=_scaled_options(config),
        compression=config.communication.compression,
        loss_scale=config.network.loss_scale,
        average_decay=config.optimization.ema_decay,
        average_every=config.optimization.ema_every,
        max_skipped_steps=config.network.max_skipped_steps,
    )


def _scaled_options(config: RunConfig) -> Options:
    """Returns the options of the optimizer, with learning rates and decay for all GPUs."""
    options = config.optimizer_options
    peak = derived.peak_learning_rate(config)
    if isinstance(options, AdaBoundOptions):
        adam_rate = derived.adam_learning_rate(config, options.learning_rate)
        return dataclasses.replace(options, learning_rate=adam_rate, final_lr=peak)
    options = dataclasses.replace(options, learning_rate=peak)
    if isinstance(options, HybridOptions):
        adam_rate = derived.adam_learning_rate(config, options.adabound_lr)
        options = dataclasses.replace(options, adabound_lr=adam_rate)
    if options.decay_is_decoupled:
        # --weight_decay is the fraction of the weights that a step subtracts at the peak of the
        # learning rate, for a batch of 256 images. It grows with the batch, so that an epoch
        # subtracts the same fraction at every batch.
        decay = options.weight_decay * derived.base_batch(config) / REFERENCE_BATCH
        options = dataclasses.replace(options, weight_decay=decay)
    return options


def _plan_schedule(config: RunConfig) -> SchedulePlan:
    optimization = config.optimization
    return SchedulePlan(
        decay=config.schedule_options,
        end_epoch=derived.schedule_end(config),
        learning_rate=optimization.lr,
        scaling=optimization.lr_scaling,
        warmup_epochs=optimization.warmup_epochs,
        rules=config.optimizer_rules,
        values=derived.schedule(config),
    )


def _plan_communication(config: RunConfig) -> CommunicationSettings:
    _, ranks_per_group = _batch_norm_groups(config)
    shared_flags = dataclasses.asdict(config.communication)
    # It belongs to the optimizer.
    del shared_flags["compression"]
    return CommunicationSettings(
        **shared_flags,
        options=config.allreduce_options,
        neighbors=ranks_per_group if ranks_per_group < config.ranks else 1,
        deterministic=config.run.deterministic,
    )


def _plan_validation(config: RunConfig) -> ValidationPlan:
    evaluation = config.evaluation
    optimization = config.optimization
    crop_fraction = config.data.eval_crop
    if crop_fraction is None:
        crop_fraction = augmentations.evaluation_fraction(config.data.augmentation)
    return ValidationPlan(
        split=config.data.validated_split,
        every_epochs=evaluation.eval_every_epochs,
        offset_epochs=_evaluation_offset(config),
        batch=evaluation.eval_batch or optimization.per_gpu_batch * optimization.virtual_gpus,
        image_size=evaluation.eval_image_size or config.network.image_size,
        crop_fraction=crop_fraction,
        flip=evaluation.eval_flip,
        target_top1=evaluation.target_top1,
        stop_at_top1=config.run.stop_at_top1,
    )


def _evaluation_offset(config: RunConfig) -> float:
    """Returns the epoch after which --eval_every_epochs counts.

    With MLPerf's table, a validation falls on the epoch in which the target accuracy is expected,
    as MLPerf's rules allow. Else it is 0.
    """
    if config.optimization.lr_schedule != "mlperf":
        return 0.0
    point = mlperf.point_at(derived.base_batch(config))
    return point.evaluation_offset(config.evaluation.eval_every_epochs)


def _plan_checkpoints(config: RunConfig) -> CheckpointPlan:
    evaluation = config.evaluation
    return CheckpointPlan(
        every_epochs=evaluation.checkpoint_every_epochs,
        every_steps=evaluation.checkpoint_every_steps,
        every_seconds=evaluation.checkpoint_every_seconds,
        keep_latest=evaluation.keep_checkpoints,
        keep_best=evaluation.keep_best,
    )


def _plan_recording(config: RunConfig) -> RecordingPlan:
    run = config.run
    return RecordingPlan(
        recipe=run.recipe,
        run_dir=run.run_dir,
        resume=run.resume,
        data_dir=config.data.data_dir,
        progress=run.progress,
        verbose=run.verbose,
        log_every_steps=run.log_every_steps,
        profile_steps=run.profile_steps,
        tensorboard=run.tensorboard,
        tracker=run.tracker,
        tracker_project=run.tracker_project,
        target_was_set=config.origins["target_top1"] is not Origin.DEFAULT,
        single_gpu_images_per_second=config.evaluation.single_gpu_throughput,
        stall_timeout=run.stall_timeout,
        settings=config.stored(),
        smaller_batch_advice=smaller_batch_advice.advice(config),
    )
