"""Makes batches from a source and an order: each rank reads, decodes and crops its own share ahead of the trainer.

The random choices of an image depend on (seed, epoch, example) only, so neither the number of ranks nor the number of
threads changes what is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from hybrid_imagenet.data import mixing
from hybrid_imagenet.data.bad_records import BadRecords
from hybrid_imagenet.data.batches import Batches, HostOptions, Request, Stage
from hybrid_imagenet.data.sources.base import Source
from hybrid_imagenet.numerics import augment, sampling
from hybrid_imagenet.numerics.run_length import RunLength
from hybrid_imagenet.numerics.sampling import Cursor, SampleOrder
from hybrid_imagenet.numerics.shard_order import ShardOrder

_SHARDS_AHEAD = 8  # of evaluation, which reads one after another
BatchSizes = Callable[[int], tuple[int, int]]  # epoch -> (images per rank and micro-batch, micro-batches per step)


def order_of(source: Source, window: int, seed: int = 0, remainder: str = "wrap") -> SampleOrder:
    """Returns the order of a source's examples: all mixed, or with a window those of so many shards at a time."""
    if window and source.shard_sizes is not None:
        return ShardOrder(source.shard_sizes, window, seed, remainder)
    return SampleOrder(source.num_examples, seed, remainder)


def training(
    source: Source,
    order: SampleOrder,
    start: Cursor,
    batches: BatchSizes | tuple[int, int],
    rank: int = 0,
    size: int = 1,
    *,
    epochs: float,
    max_steps: int | None = None,
    image_size: int | Callable[[int], int],
    augmentation: str,
    options: HostOptions | None = None,
    bad: BadRecords | None = None,
    parts: int = 1,
) -> Batches:
    """Returns this rank's micro-batches from `start` until `epochs` epochs or `max_steps` steps from there are done.

    A step takes size * batch * accumulation examples; rank r has the r-th contiguous part of them, as `accumulation`
    elements `{"image": uint8 [b, side, side, 3], "label": int64 [b], "seed": int64 [b, 2]}`. Batch, accumulation and
    image size may change from epoch to epoch: the epoch is the one in which a step begins.

    With `parts` above 1 the rank stands for so many ranks: `batch` and `b` are those of one part, and an element holds
    the elements that these ranks would have, one after the other.

    A record that cannot be used ends the run with `bad_records="fail"`; with "skip" it is logged, counted in
    `Batches.bad` (or `bad`, which several may share) and `Batches.tally`, and another example takes its place, so that
    all ranks keep the same number of steps.

    With an order that keeps to a window of shards, rank 0 warns if the first images hold few classes.

    Raises (when iterated):
      UserError: for a bad record under "fail", or more than `max_bad_records`.
    """

    def sizes(epoch: int) -> tuple[int, int, int]:
        batch, accumulation = batches(epoch) if callable(batches) else batches
        return batch, accumulation, image_size(epoch) if callable(image_size) else image_size

    def stages() -> Iterator[Stage]:
        length = RunLength(order, epochs, max_steps)
        spans = length.spans(lambda epoch: size * parts * sizes(epoch)[0] * sizes(epoch)[1], start)
        for (batch, accumulation, pixels), alike in itertools.groupby(spans, lambda span: sizes(span.epoch)):
            first, *others = alike
            steps = first.steps + sum(span.steps for span in others)
            request = _training_request(source, order, first.begin, batch, accumulation, rank, size, parts)
            yield Stage(parts * batch, pixels, steps * accumulation, request)

    return Batches(
        source,
        stages,
        augmentation=augmentation,
        crop_fraction=None,
        seed=order.seed,
        options=options or HostOptions(),
        weighted=False,
        bad=bad,
        watch=mixing.Watch(source.num_classes, order.window) if order.window and rank == 0 else None,
    )


def _training_request(
    source: Source, order: SampleOrder, begin: Cursor, batch: int, accumulation: int, rank: int, size: int, parts: int
) -> Callable[[int], Request]:
    count = size * parts * batch * accumulation

    def request(number: int) -> Request:
        step, micro = divmod(number, accumulation)
        cursor = order.advance(begin, count, step)
        source.prefetch(order.shards_ahead(cursor))
        examples, epochs = order.share(cursor, count, rank, size)
        # Each part has a contiguous share of its own, in which its micro-batches follow one another.
        own = [values.reshape(parts, accumulation, batch)[:, micro].ravel() for values in (examples, epochs)]
        return Request(own[0], own[1], np.ones(parts * batch, np.float32))

    return request


def evaluation(
    source: Source,
    batch: int,
    rank: int = 0,
    size: int = 1,
    *,
    image_size: int,
    crop_fraction: float = augment.EVALUATION_FRACTION,
    options: HostOptions | None = None,
) -> Batches:
    """Returns this rank's part of one pass over all examples: every rank has the same number of elements.

    Elements are `{"image": uint8 [b, s, s, 3], "label": int64 [b], "weight": float32 [b]}`; each example has weight 1
    exactly once over all ranks; padding (and, under "skip", a bad record's place) has weight 0. Images are the central
    square of `crop_fraction` of the shorter side.
    """
    steps = -(-source.num_examples // (batch * size))
    ends = np.cumsum(source.shard_sizes) if source.shard_sizes is not None else np.empty(0)

    def request(step: int) -> Request:
        examples, weights = sampling.padded_share(source.num_examples, step, batch, rank, size)
        if weights.any():
            shard = int(np.searchsorted(ends, examples[0], "right"))
            source.prefetch(range(shard, min(shard + _SHARDS_AHEAD, len(ends))))
        return Request(examples, np.zeros_like(examples), weights)

    stage = Stage(batch, image_size, steps, request)
    return Batches(
        source,
        lambda: iter([stage]),
        augmentation="none",
        crop_fraction=crop_fraction,
        seed=0,
        options=options or HostOptions(),
        weighted=True,
    )


__all__ = ["Batches", "HostOptions", "evaluation", "order_of", "training"]
