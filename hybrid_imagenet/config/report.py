"""Describes a configuration: every setting with its origin, and the schedule by epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hybrid_imagenet.config import derived, relative_step_advice
from hybrid_imagenet.config.derived import base_batch, batches, decoupled_decay, sizes
from hybrid_imagenet.config.flag_checks import check_data
from hybrid_imagenet.errors import pluralize
from hybrid_imagenet.optimizers.registry import rule
from hybrid_imagenet.options import Origin, format_value
from hybrid_imagenet.order.sampling import SampleOrder
from hybrid_imagenet.schedules import mlperf
from hybrid_imagenet.schedules.run_length import RunLength

if TYPE_CHECKING:
    from hybrid_imagenet.config import RunConfig


@dataclasses.dataclass(frozen=True)
class EpochPlan:
    """One epoch of a run.

    Attributes:
      epoch: number, from 1.
      phase: the rule at its first step: AdaBound, SGD or LARS.
      learning_rate: at its first step.
      last_learning_rate: at its last step.
      bounds: lower and upper bound at its last step, where AdaBound has any.
      per_gpu_batch: images per GPU and micro-batch.
      accumulation: micro-batches per update.
      global_batch: images of all GPUs per update.
      steps: updates that begin in it.
      image_size: pixels of training images.
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


def plan(config: RunConfig, num_examples: int) -> list[EpochPlan]:
    """Every epoch of a run on `num_examples` images.

    Raises:
      UserError: if a batch does not fit the dataset.
    """
    check_data(config, num_examples)
    schedule = derived.schedule(config)
    stages, order = batches(config), SampleOrder(num_examples, config.seed, config.remainder)
    pixels = sizes(config)
    rows = []
    length = RunLength(order, config.epochs, config.max_steps)
    for span in length.spans(lambda epoch: stages.at(epoch).global_batch(config.gpus)):
        epoch, cursor, steps = span.epoch, span.begin, span.steps
        stage = stages.at(epoch)
        batch = stage.global_batch(config.gpus)
        last = order.advance(cursor, batch, steps - 1) if steps > 1 else cursor
        first = schedule(
            order.position(cursor), order.position(order.advance(cursor, batch)), batch
        )
        end = schedule(order.position(last), order.position(span.end), batch)
        rows.append(
            EpochPlan(
                epoch=epoch + 1,
                phase=rule(config.optimizer, first["phase"]),
                learning_rate=first["learning_rate"],
                last_learning_rate=end["learning_rate"],
                bounds=None if end["phase"] else (end["lower_bound"], end["upper_bound"]),
                momentum=first["momentum"],
                per_gpu_batch=stage.per_gpu_batch,
                accumulation=stage.accumulation,
                global_batch=batch,
                steps=steps,
                image_size=pixels.at(epoch),
            )
        )
    return rows


_OF_PRINTING = ("print_config", "print_config_all", "print_config_gpus", "check_only")


def describe(config: RunConfig, num_examples: int) -> str:
    """Describes every setting with what set it, then learning rate, momentum, batch and steps of
    each epoch.
    """
    rows = plan(config, num_examples)
    table = [_HEADER, *map(_row, rows)]
    return _text(
        [
            *_settings(config, list(config.values())),
            "",
            *_results(config, num_examples, rows),
            "",
            *table,
        ]
    )


def summarize(config: RunConfig, num_examples: int) -> str:
    """Describes the settings that are not defaults, and the epochs in which the schedule
    changes.
    """
    names = [
        name
        for name in config.values()
        if name == "recipe"
        or (config.origins[name] is not Origin.DEFAULT and name not in _OF_PRINTING)
    ]
    rows = plan(config, num_examples)
    table = [_HEADER]
    shown_before = -1
    for index in boundaries(rows):
        if index > shown_before + 1:
            table.append(f"{'...':>5}")
        table.append(_row(rows[index]))
        shown_before = index
    others = len(config.values()) - len(names)
    more = (
        f"{others} other settings have their defaults. --print_config=all prints them, and every"
        " epoch."
    )
    return _text(
        [*_settings(config, names), "", *_results(config, num_examples, rows), "", *table, "", more]
    )


def boundaries(rows: Sequence[EpochPlan]) -> list[int]:
    """Returns the indices of the epochs in which something changes, with the first and the last.

    It is the phase, the momentum, the batch or the size of images, or whether the learning rate
    rises, falls or stays.
    """

    def state(index: int) -> tuple[object, ...]:
        row = rows[index]
        following = rows[min(index + 1, len(rows) - 1)]
        rises = following.learning_rate > row.learning_rate
        falls = following.learning_rate < row.learning_rate
        batch = (row.per_gpu_batch, row.accumulation, row.global_batch)
        return row.phase, row.momentum, *batch, row.image_size, rises, falls

    last = len(rows) - 1
    return [
        index
        for index in range(len(rows))
        if index in (0, last) or state(index) != state(index - 1)
    ]


def _text(lines: Iterable[str]) -> str:
    return "\n".join(line.rstrip() for line in lines)


def _settings(config: RunConfig, names: Sequence[str]) -> list[str]:
    """Returns a line for each of these settings, and for each that was set but is not used."""
    values = config.values()
    texts = {name: format_value(values[name]) for name in names}
    width = max(map(len, [*texts, *config.dropped]))
    value_width = max(map(len, texts.values()))
    lines = [
        f"{name:<{width}}  {text:<{value_width}}  {_origin(config, name)}"
        for name, text in texts.items()
    ]
    return lines + [f"{name:<{width}}  not used: {note}" for name, note in config.dropped.items()]


def _results(config: RunConfig, num_examples: int, rows: Sequence[EpochPlan]) -> list[str]:
    """Returns lines on what follows from all settings together, with a warning where that is far
    from usual.
    """
    steps = sum(row.steps for row in rows)
    lines = [f"{num_examples} training images, {pluralize(config.gpus, 'GPU')}, {steps} steps"]
    lines += filter(
        None,
        [relative_step_advice.line(config), relative_step_advice.forecast(config, num_examples)],
    )
    lines += _worked_out(config)
    warning = relative_step_advice.warning(config)
    warnings = [*config.kept_notes, *([] if warning is None else [warning])]
    lines += [f"warning: {text}" for text in warnings]
    return lines


_HEADER = (
    f"{'epoch':>5}  {'phase':<8}  {'learning rate':>23}  {'AdaBound bounds':>21}  {'momentum':>8}  "
    f"{'per GPU':>9}  {'batch':>7}  {'steps':>6}  {'pixels':>6}"
)


def _worked_out(config: RunConfig) -> list[str]:
    """What follows from settings and batch together: the images of a normalization, decay beside
    the gradient.
    """
    lines, batch = [], base_batch(config)
    if config.lr_schedule == "mlperf" and not config.sync_batch_norm:
        images, wanted = (
            config.per_gpu_batch * config.bn_group,
            mlperf.point_at(batch).normalized_images,
        )
        lines.append(
            f"batch normalization over {images} images ({pluralize(config.bn_group, 'GPU')});"
            f" MLPerf's table has {wanted}"
        )
    if config.chosen.get("decoupled_decay"):
        lines.append(
            f"decoupled decay {decoupled_decay(config):.3g} of the weights a step at batch {batch}"
        )
    return lines


def _row(row: EpochPlan) -> str:
    rates = f"{row.learning_rate:.5g}"
    if row.last_learning_rate != row.learning_rate:
        rates += f" to {row.last_learning_rate:.5g}"
    bounds = "{:.4g} to {:.5g}".format(*row.bounds) if row.bounds else ""
    images = f"{row.per_gpu_batch}" + (f" x {row.accumulation}" if row.accumulation > 1 else "")
    return (
        f"{row.epoch:>5}  {row.phase:<8}  {rates:>23}  {bounds:>21}  {row.momentum:>8.4f}  "
        f"{images:>9}  {row.global_batch:>7}  {row.steps:>6}  {row.image_size:>6}"
    )


def _origin(config: RunConfig, name: str) -> str:
    origin = config.origins[name]
    which = {Origin.RECIPE: f" {config.recipe}", Origin.BATCH: f" at batch {base_batch(config)}"}
    return origin.value + which.get(origin, "")
