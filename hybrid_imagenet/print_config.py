"""Writes the text of --print_config: settings with their origins, and the plan by epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hybrid_imagenet import run_plan
from hybrid_imagenet.config.flag_checks import check_data
from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.optimizers.registry import rule
from hybrid_imagenet.options import Origin, format_value
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.training_schedule import MLPerfDecay
from hybrid_imagenet.training import relative_step_advice

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig

# The summary does not list the flags that ask for it.
_FLAGS_OF_PRINTING = ("print_config", "print_config_all", "print_config_gpus", "check_only")
_HEADER = (
    f"{'epoch':>5}  {'phase':<8}  {'learning rate':>23}  {'AdaBound bounds':>21}  {'momentum':>8}  "
    f"{'per GPU':>9}  {'batch':>7}  {'steps':>6}  {'pixels':>6}"
)


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """One epoch of a run.

    Attributes:
      epoch: Number, from 1.
      phase: Update rule at its first step: AdaBound, SGD or LARS.
      learning_rate: At its first step.
      last_learning_rate: At its last step.
      bounds: Lower and upper bound of AdaBound at its last step; None in other phases.
      momentum: At its first step.
      per_gpu_batch: Images per GPU and micro-batch.
      accumulation: Micro-batches per update.
      global_batch: Images of all GPUs per update.
      steps: Number of updates.
      image_size: Side of training images, in pixels.
    """

    epoch: int
    phase: str
    learning_rate: float
    last_learning_rate: float
    bounds: tuple[float, float] | None
    momentum: float
    per_gpu_batch: int
    accumulation: int
    global_batch: int
    steps: int
    image_size: int


def describe(config: RunConfig, num_examples: int) -> str:
    """Describes every setting, and every epoch of a run on `num_examples` images.

    Raises:
      UserError: If a batch is larger than the dataset.
    """
    check_data(config, num_examples)
    plan = run_plan.make(config)
    epochs = plan_epochs(plan, num_examples)
    return _join(
        [
            *_setting_lines(config, plan, list(config.as_dict())),
            "",
            *_result_lines(plan, num_examples, epochs),
            *_warning_lines(config, plan),
            "",
            _HEADER,
            *map(_row, epochs),
        ]
    )


def summarize(config: RunConfig, num_examples: int) -> str:
    """Describes the settings that are not defaults, and the epochs in which the schedule changes.

    Args:
      config: Configuration of the run.
      num_examples: Number of training images.

    Raises:
      UserError: If a batch is larger than the dataset.
    """
    check_data(config, num_examples)
    plan = run_plan.make(config)
    names = [name for name in config.as_dict() if _is_in_summary(config, name)]
    epochs = plan_epochs(plan, num_examples)
    table = [_HEADER]
    index_before = -1
    for index in boundaries(epochs):
        if index > index_before + 1:
            table.append(f"{'...':>5}")
        table.append(_row(epochs[index]))
        index_before = index
    num_others = len(config.as_dict()) - len(names)
    note = (
        f"{num_others} other settings have their defaults. --print_config=all prints them, and"
        " every epoch."
    )
    return _join(
        [
            *_setting_lines(config, plan, names),
            "",
            *_result_lines(plan, num_examples, epochs),
            *_warning_lines(config, plan),
            "",
            *table,
            "",
            note,
        ]
    )


def _is_in_summary(config: RunConfig, name: str) -> bool:
    if name == "recipe":
        return True
    return config.origins[name] is not Origin.DEFAULT and name not in _FLAGS_OF_PRINTING


def plan_epochs(plan: RunPlan, num_examples: int) -> list[EpochPlan]:
    """Returns every epoch of a run on `num_examples` images."""
    order = SampleOrder(num_examples, plan.seed)
    schedule = plan.schedule.values
    epochs = []
    for span in plan.length(order).spans(plan.global_batch):
        stage = plan.batches.at(span.epoch)
        batch = plan.global_batch(span.epoch)
        second = order.advance(span.begin, batch)
        last = span.begin
        if span.steps > 1:
            last = order.advance(span.begin, batch, span.steps - 1)
        first_values = schedule(order.position(span.begin), order.position(second), batch)
        last_values = schedule(order.position(last), order.position(span.end), batch)
        bounds = None
        if not last_values["phase"]:
            bounds = (last_values["lower_bound"], last_values["upper_bound"])
        epochs.append(
            EpochPlan(
                epoch=span.epoch + 1,
                phase=rule(plan.optimizer.name, first_values["phase"]),
                learning_rate=first_values["learning_rate"],
                last_learning_rate=last_values["learning_rate"],
                bounds=bounds,
                momentum=first_values["momentum"],
                per_gpu_batch=stage.per_gpu_batch,
                accumulation=stage.accumulation,
                global_batch=batch,
                steps=span.steps,
                image_size=plan.image_sizes.at(span.epoch),
            )
        )
    return epochs


def boundaries(epochs: Sequence[EpochPlan]) -> list[int]:
    """Returns the indices of the first and last epoch, and of those in which something changes.

    That is the phase, the momentum, the batch or the image size, or whether the learning rate
    rises, falls or stays.
    """

    def state(index: int) -> tuple[object, ...]:
        row = epochs[index]
        following = epochs[min(index + 1, len(epochs) - 1)]
        rises = following.learning_rate > row.learning_rate
        falls = following.learning_rate < row.learning_rate
        batch = (row.per_gpu_batch, row.accumulation, row.global_batch)
        return row.phase, row.momentum, *batch, row.image_size, rises, falls

    last = len(epochs) - 1
    return [
        index
        for index in range(len(epochs))
        if index in (0, last) or state(index) != state(index - 1)
    ]


def _join(lines: Iterable[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


def _setting_lines(config: RunConfig, plan: RunPlan, names: Sequence[str]) -> list[str]:
    """Returns a line for each of these settings, and one for each that was set but is not used."""
    values = config.as_dict()
    texts = {name: format_value(values[name]) for name in names}
    width = max(map(len, [*texts, *config.dropped]))
    value_width = max(map(len, texts.values()))
    lines = [
        f"{name:<{width}}  {text:<{value_width}}  {_format_origin(config, plan, name)}"
        for name, text in texts.items()
    ]
    return lines + [f"{name:<{width}}  not used: {note}" for name, note in config.dropped.items()]


def _format_origin(config: RunConfig, plan: RunPlan, name: str) -> str:
    origin = config.origins[name]
    if origin is Origin.RECIPE:
        return f"{origin.value} {config.run.recipe}"
    if origin is Origin.BATCH:
        return f"{origin.value} at batch {plan.base_batch}"
    return origin.value


def _result_lines(plan: RunPlan, num_examples: int, epochs: Sequence[EpochPlan]) -> list[str]:
    """Returns lines on values that follow from all settings together."""
    steps = sum(row.steps for row in epochs)
    gpus = pluralize(plan.workers, "GPU")
    lines = [f"{num_examples} training images, {gpus}, {steps} steps"]
    relative_step = relative_step_advice.line(plan)
    if relative_step is not None:
        lines.append(relative_step)
    if isinstance(plan.schedule.decay, MLPerfDecay):
        images = plan.batches.at(0).per_gpu_batch * plan.normalized_gpus
        in_table = mlperf.point_at(plan.base_batch).normalized_images
        lines.append(
            f"batch normalization over {images} images"
            f" ({pluralize(plan.normalized_gpus, 'GPU')}); MLPerf's table has {in_table}"
        )
    options = plan.optimizer.options
    if options.decay_is_decoupled:
        lines.append(
            f"decoupled decay {options.weight_decay:.3g} of the weights a step at batch"
            f" {plan.base_batch}"
        )
    return lines


def _warning_lines(config: RunConfig, plan: RunPlan) -> list[str]:
    warnings = list(config.kept_notes)
    warning = relative_step_advice.warning(plan)
    if warning is not None:
        warnings.append(warning)
    return [f"warning: {text}" for text in warnings]


def _row(row: EpochPlan) -> str:
    rates = f"{row.learning_rate:.5g}"
    if row.last_learning_rate != row.learning_rate:
        rates += f" to {row.last_learning_rate:.5g}"
    bounds = ""
    if row.bounds is not None:
        lower, upper = row.bounds
        bounds = f"{lower:.4g} to {upper:.5g}"
    images = f"{row.per_gpu_batch}"
    if row.accumulation > 1:
        images += f" x {row.accumulation}"
    return (
        f"{row.epoch:>5}  {row.phase:<8}  {rates:>23}  {bounds:>21}  {row.momentum:>8.4f}  "
        f"{images:>9}  {row.global_batch:>7}  {row.steps:>6}  {row.image_size:>6}"
    )
