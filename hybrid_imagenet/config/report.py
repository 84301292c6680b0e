"""Describes a configuration: every setting with its origin, and the schedule by epoch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from hybrid_imagenet.config import derived, relative_step
from hybrid_imagenet.config.checks import check_data
from hybrid_imagenet.config.derived import base_batch, batches, decoupled_decay, sizes
from hybrid_imagenet.errors import counted
from hybrid_imagenet.numerics import mlperf
from hybrid_imagenet.numerics.run_length import RunLength
from hybrid_imagenet.numerics.sampling import SampleOrder
from hybrid_imagenet.optimizers.registry import rule
from hybrid_imagenet.options import Origin, shown

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
        first = schedule(order.position(cursor), order.position(order.advance(cursor, batch)), batch)
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


def describe(config: RunConfig, num_examples: int) -> str:
    """The settings with what set each one, then learning rate, momentum, batch and steps of each epoch."""
    texts = {name: shown(value) for name, value in config.values().items()}
    width, value_width = max(map(len, texts)), max(map(len, texts.values()))
    lines = [f"{name:<{width}}  {text:<{value_width}}  {_origin(config, name)}" for name, text in texts.items()]
    lines += [f"{name:<{width}}  not used: {note}" for name, note in config.dropped.items()]
    rows = plan(config, num_examples)
    lines += [
        "",
        f"{num_examples} training images, {counted(config.gpus, 'GPU')}, {sum(row.steps for row in rows)} steps",
    ]
    lines += filter(None, [relative_step.line(config), relative_step.forecast(config, num_examples)])
    lines += _worked_out(config)
    lines += [f"warning: {text}" for text in [relative_step.warning(config)] if text]
    lines.append("")
    lines.append(
        f"{'epoch':>5}  {'phase':<8}  {'learning rate':>23}  {'AdaBound bounds':>21}  {'momentum':>8}  "
        f"{'per GPU':>9}  {'batch':>7}  {'steps':>6}  {'pixels':>6}"
    )
    lines += [_row(row) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _worked_out(config: RunConfig) -> list[str]:
    """What follows from settings and batch together: the images of a normalization, decay beside the gradient."""
    lines, batch = [], base_batch(config)
    if config.lr_schedule == "mlperf" and not config.sync_batch_norm:
        images, wanted = config.per_gpu_batch * config.bn_group, mlperf.at(batch).normalized_images
        lines.append(
            f"batch normalization over {images} images ({counted(config.bn_group, 'GPU')}); MLPerf's table has {wanted}"
        )
    if config.chosen.get("decoupled_decay"):
        lines.append(f"decoupled decay {decoupled_decay(config):.3g} of the weights a step at batch {batch}")
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
