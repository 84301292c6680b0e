"""Makes batches from a source and an order: each rank reads, decodes and crops its own share ahead
of the trainer.

The random choices of an image depend on (seed, epoch, example) only, so neither the number of ranks
nor the number of threads changes what is seen.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from hybrid_imagenet.data import augmentations, dali, images, mixing
from hybrid_imagenet.data.bad_records import BadRecords, UsableExamples
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import sampling
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.order.shard_order import ShardOrder
from hybrid_imagenet.schedules.run_length import RunLength, Span

_SHARDS_AHEAD = 8  # of evaluation, which reads one after another
BatchSizes = Callable[
    [int], tuple[int, int]
]  # epoch -> (images per rank and micro-batch, micro-batches per step)
Element = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """The host's options for reading, decoding and bad records.

    Attributes:
      threads: decoding threads of this rank.
      readers: micro-batches that are read from storage at the same time.
      reads: records of a micro-batch that are read at the same time; they hide what a read from a
      network takes.
      prefetch: finished micro-batches kept ready.
      device: where finished micro-batches are copied ahead of the trainer ("/gpu:0"); None leaves
      them on the host.
      memory_bytes: bound on what is read and decoded ahead; lowers `readers` and `prefetch` to 1 at
      least.
      bad_records: "fail" or "skip", see `training`.
      max_bad_records: bad records of all ranks above which skipping fails.
      decoder: "tensorflow" or "dali".
    """

    threads: int = 2
    readers: int = 4
    reads: int = 8
    prefetch: int = 2
    device: str | None = None
    memory_bytes: int = 4 << 30
    bad_records: str = "fail"
    max_bad_records: int = 100
    decoder: str = "tensorflow"


def order_of(source: Source, window: int, seed: int = 0, remainder: str = "wrap") -> SampleOrder:
    """Returns the order of a source's examples: all mixed, or with a window those of this many
    shards at a time.
    """
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
    """Returns this rank's micro-batches from `start` until `epochs` epochs or `max_steps` steps
    from there are done.

    A step takes size * batch * accumulation examples; rank r has the r-th contiguous part of them,
    as `accumulation` elements
    `{"image": uint8 [b, side, side, 3], "label": int64 [b], "seed": int64 [b, 2]}`. Batch,
    accumulation and image size may change from epoch to epoch: the epoch is the one in which a step
    begins.

    With `parts` above 1 the rank stands for `parts` ranks: `batch` and `b` are those of one part,
    and an element holds the elements that these ranks would have, one after the other.

    A record that cannot be used ends the run with `bad_records="fail"`; with "skip" it is logged,
    counted in `Batches.bad` (or `bad`, which several may share), and another example takes its
    place, so that all ranks keep the same number of steps.

    With an order that keeps to a window of shards, rank 0 warns if the first images hold few
    classes.

    Raises (when iterated):
      UserError: for a bad record under "fail", or more than `max_bad_records`.
    """

    def sizes(epoch: int) -> tuple[int, int, int]:
        batch, accumulation = batches(epoch) if callable(batches) else batches
        return batch, accumulation, image_size(epoch) if callable(image_size) else image_size

    def global_batch(epoch: int) -> int:
        batch, accumulation, _ = sizes(epoch)
        return size * parts * batch * accumulation

    def stage(first: Span, *others: Span) -> PipelineSegment:
        """Returns the micro-batches of epochs whose sizes are alike."""
        batch, accumulation, pixels = sizes(first.epoch)
        count = global_batch(first.epoch)

        def examples_of(number: int) -> MicroBatch:
            step, micro = divmod(number, accumulation)
            cursor = order.advance(first.begin, count, step)
            source.prefetch(order.shards_ahead(cursor))
            examples, epochs = order.share(cursor, count, rank, size)
            # Each part has a contiguous share of its own, in which its micro-batches follow one
            # another.
            own = [
                values.reshape(parts, accumulation, batch)[:, micro].ravel()
                for values in (examples, epochs)
            ]
            return MicroBatch(own[0], own[1], np.ones(parts * batch, np.float32))

        steps = sum(span.steps for span in (first, *others))
        return PipelineSegment(parts * batch, pixels, steps * accumulation, examples_of)

    options = options or HostOptions()
    spans = RunLength(order, epochs, max_steps).spans(global_batch, start)
    segments = [
        stage(*alike) for _, alike in itertools.groupby(spans, lambda span: sizes(span.epoch))
    ]
    return Batches(
        source,
        segments,
        options,
        bad or BadRecords(source, options.bad_records, options.max_bad_records),
        augmentation=augmentation,
        seed=order.seed,
        watch=mixing.Watch(source.num_classes, order.window)
        if order.window and rank == 0
        else None,
    )


def evaluation(
    source: Source,
    batch: int,
    rank: int = 0,
    size: int = 1,
    *,
    image_size: int,
    crop_fraction: float = augmentations.EVALUATION_FRACTION,
    options: HostOptions | None = None,
) -> Batches:
    """Returns this rank's part of one pass over all examples: every rank has the same number of
    elements.

    Elements are `{"image": uint8 [b, s, s, 3], "label": int64 [b], "weight": float32 [b]}`; each
    example has weight 1 exactly once over all ranks; padding (and, under "skip", a bad record's
    place) has weight 0. Images are the central square of `crop_fraction` of the shorter side.
    """
    steps = -(-source.num_examples // (batch * size))
    ends = np.cumsum(source.shard_sizes) if source.shard_sizes is not None else np.empty(0)

    def examples_of(step: int) -> MicroBatch:
        examples, weights = sampling.padded_share(source.num_examples, step, batch, rank, size)
        if weights.any():
            shard = int(np.searchsorted(ends, examples[0], "right"))
            source.prefetch(range(shard, min(shard + _SHARDS_AHEAD, len(ends))))
        return MicroBatch(examples, np.zeros_like(examples), weights)

    options = options or HostOptions()
    bad = BadRecords(source, options.bad_records, options.max_bad_records)
    return Batches(
        source,
        [PipelineSegment(batch, image_size, steps, examples_of)],
        options,
        bad,
        crop_fraction=crop_fraction,
    )


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The examples that one rank reads together."""

    examples: sampling.Indices
    epochs: sampling.Indices
    weights: np.ndarray  # float32 [b]; 0 marks padding


@dataclasses.dataclass(frozen=True)
class PipelineSegment:
    """A run of micro-batches of one size, for network inputs of `image_size` pixels."""

    batch: int
    image_size: int
    count: int
    examples_of: Callable[[int], MicroBatch]


@dataclasses.dataclass
class Batches:
    """Yields micro-batches as dictionaries of tensors; each `iter()` starts from the beginning.

    Labels are int64: TensorFlow computes with integers of 32 bits on the host, and a GPU would wait
    for it.

    Attributes:
      bad: what was skipped so far.
      crop_fraction: of the shorter side, for evaluation: elements have weights; None in training:
      they have seeds.
      augmentation: in training.
      seed: of its draws.
      watch: counts the classes of the first images, for a warning.
      wait_seconds: time that the consumer has waited for batches.
    """

    source: Source
    stages: Sequence[PipelineSegment]
    options: HostOptions
    bad: BadRecords
    crop_fraction: float | None = None
    augmentation: str = "none"
    seed: int = 0
    watch: mixing.Watch | None = None
    wait_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._reader = UsableExamples(
            self.source, self.bad, self.options.reads, self.options.readers
        )
        self._failure: UserError | None = None
        self._built: tuple[PipelineSegment, int, tf.data.Dataset] | None = None
        self._dali: tuple[tuple[int, int], dali.Decoder] | None = None

    def __iter__(self) -> Iterator[Element]:
        """Yields the elements; raises UserError for a record that cannot be used."""
        for stage in self.stages:
            if self.source.reuse_decoded_batch:
                yield from self._repeated(stage)
                continue
            done = 0
            while done < stage.count:  # again only after an image that did not decode was skipped
                known = len(self.bad.known)
                elements = iter(self._dataset(stage, done))
                try:
                    for element in self._timed(elements):
                        done += 1
                        yield element
                except tf.errors.OpError as error:
                    self._explain(stage, stage.examples_of(done), known, error)

    def _repeated(self, stage: PipelineSegment) -> Iterator[Element]:
        """Yields the pixels of one batch with the labels, seeds and weights of all."""
        first = next(iter(self._dataset(dataclasses.replace(stage, count=1), 0)))
        for number in range(stage.count):
            wanted = stage.examples_of(number)
            element = {
                "image": first["image"],
                "label": tf.constant(self.source.read(wanted.examples)[1], tf.int64),
            }
            if self.crop_fraction is not None:
                yield {**element, "weight": tf.constant(wanted.weights)}
            else:
                yield {
                    **element,
                    "seed": tf.constant(sampling.seeds(self.seed, wanted.epochs, wanted.examples)),
                }

    def _timed(self, elements: Iterator[Element]) -> Iterator[Element]:
        while True:
            started = time.perf_counter()
            element = next(elements, None)
            self.wait_seconds += time.perf_counter() - started
            if element is None:
                return
            yield element

    def _explain(
        self, stage: PipelineSegment, wanted: MicroBatch, known: int, error: Exception
    ) -> None:
        """Finds the record behind a failure; returns if more than the `known` ones are to be
        skipped from now on.
        """
        if self._failure:
            raise self._failure from None
        for requested in np.unique(wanted.examples):
            self._reader.check_decodes(int(requested), self._host(stage).side)
        if len(self.bad.known) == known:
            raise error

    def _host(self, stage: PipelineSegment) -> augmentations.HostStage:
        """Returns the side of the square images that come from the host, and the draws that each
        takes.
        """
        if self.crop_fraction is not None:
            return augmentations.HostStage(0, stage.image_size)
        return augmentations.host_stage(self.augmentation, stage.image_size)

    def _dataset(self, stage: PipelineSegment, start: int) -> tf.data.Dataset:
        """Returns the elements of a stage from number `start`; the last one built is kept, for
        repeated evaluation.
        """
        if self._built is None or self._built[:2] != (stage, start):
            self._built = (stage, start, self._build(stage, start))
        return self._built[2]

    def _build(self, stage: PipelineSegment, start: int) -> tf.data.Dataset:
        options, host = self.options, self._host(stage)
        readers, prefetch = self._ahead(stage.batch, host.side)
        numbers = tf.data.Dataset.range(start, stage.count)
        decoded = (
            self._decoded_by_dali if options.decoder == "dali" else self._decoded_by_tensorflow
        )
        if self._whole(host):
            decoded = self._undecoded
        data = decoded(numbers, stage, host, readers).prefetch(prefetch)
        settings = tf.data.Options()
        # DALI decodes in threads of its own, and those that read wait for them.
        settings.threading.private_threadpool_size = (
            readers if options.decoder == "dali" else options.threads
        )
        settings.threading.max_intra_op_parallelism = 1
        settings.autotune.enabled = False
        data = data.with_options(settings)
        if options.device:
            return data.apply(
                tf.data.experimental.prefetch_to_device(options.device, buffer_size=1)
            )
        return data

    def _decoded_by_tensorflow(
        self,
        numbers: tf.data.Dataset,
        stage: PipelineSegment,
        host: augmentations.HostStage,
        readers: int,
    ) -> tf.data.Dataset:
        types = (tf.string, tf.int32, tf.int32, tf.int64, tf.int64, tf.float32)
        shapes = ((), (), (4,), (), (2,), ())
        accurate = self.crop_fraction is not None  # in evaluation

        def read(step: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return _call(
                lambda number: self._read(stage, number, host), step, types, stage.batch, shapes
            )

        def finish(
            content: tf.Tensor, branch: tf.Tensor, window: tf.Tensor, *rest: tf.Tensor
        ) -> Element:
            return self._element(
                images.decode(content, branch, window, host.side, accurate=accurate), *rest
            )

        data = _map(_map(numbers, read, readers).unbatch(), finish, self.options.threads)
        return data.batch(stage.batch, drop_remainder=True)

    def _whole(self, host: augmentations.HostStage) -> bool:
        """Returns whether every image reaches the trainer as the source has it: whole, and of the
        requested size.
        """
        fraction = self.crop_fraction or (1.0 if self.augmentation in augmentations.WHOLE else 0.0)
        return self.source.side == host.side and fraction == 1.0

    def _undecoded(
        self,
        numbers: tf.data.Dataset,
        stage: PipelineSegment,
        host: augmentations.HostStage,
        readers: int,
    ) -> tf.data.Dataset:
        types = (tf.uint8, tf.int64, tf.int64, tf.float32)
        shapes = ((host.side, host.side, 3), (), (2,), ())

        def read(number: int) -> tuple[np.ndarray, ...]:
            wanted = stage.examples_of(number)
            seeds = sampling.seeds(self.seed, wanted.epochs, wanted.examples)
            pixels, labels = self.source.read_pixels(wanted.examples)
            return pixels, labels.astype(np.int64), seeds, wanted.weights

        def finish(step: tf.Tensor) -> Element:
            return self._element(*_call(read, step, types, stage.batch, shapes))

        return _map(numbers, finish, readers)

    def _decoded_by_dali(
        self,
        numbers: tf.data.Dataset,
        stage: PipelineSegment,
        host: augmentations.HostStage,
        readers: int,
    ) -> tf.data.Dataset:
        if self._dali is None or self._dali[0] != (stage.batch, host.side):
            gpu = dali.gpu_of(self.options.device)
            accurate = self.crop_fraction is not None  # in evaluation
            made = dali.Decoder(
                stage.batch, host.side, self.options.threads, gpu, accurate=accurate
            )
            self._dali = (stage.batch, host.side), made
        decoder = self._dali[1]
        types = (tf.uint8, tf.int64, tf.int64, tf.float32)
        shapes = ((host.side, host.side, 3), (), (2,), ())

        def decoded(number: int) -> tuple[np.ndarray, ...]:
            content, branch, window, *rest = self._read(stage, number, host)
            return decoder.decode(content, branch, window), *rest

        def finish(step: tf.Tensor) -> Element:
            return self._element(*_call(decoded, step, types, stage.batch, shapes))

        return _map(numbers, finish, readers)

    def _element(
        self, image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor, weight: tf.Tensor
    ) -> Element:
        extra = {"seed": seed} if self.crop_fraction is None else {"weight": weight}
        return {"image": image, "label": label, **extra}

    def _ahead(self, batch: int, side: int) -> tuple[int, int]:
        """Returns how many concurrent reads and finished batches fit the memory; an encoded image
        counts as 256 KiB.
        """
        decoded, encoded = batch * side**2 * 3, batch << 18
        if self.options.decoder == "dali":
            encoded += decoded  # who reads also waits for the pixels
        prefetch = min(self.options.prefetch, self.options.memory_bytes // (2 * decoded))
        readers = min(self.options.readers, self.options.memory_bytes // (2 * encoded))
        return max(1, readers), max(1, prefetch)

    def _read(
        self, stage: PipelineSegment, number: int, host: augmentations.HostStage
    ) -> tuple[np.ndarray, ...]:
        """Returns encoded images, and what is to be done with each, for one micro-batch."""
        wanted = stage.examples_of(number)
        try:
            contents, probed, labels, own = self._reader.read(wanted.examples)
        except UserError as error:
            self._failure = error
            raise
        if self.watch is not None:
            self.watch.add(labels)
        weights = wanted.weights * own  # what took the place of a bad record must not count
        if not own.all():
            missing = ~own & (wanted.weights > 0)
            places = np.stack([wanted.epochs, wanted.examples], axis=1)[missing]
            self.bad.replaced.update((int(epoch), int(example)) for epoch, example in places)
        seeds = sampling.seeds(self.seed, wanted.epochs, wanted.examples)
        sizes = probed[:, 1:]
        if self.crop_fraction is not None:
            windows = augmentations.center(sizes, self.crop_fraction)
        else:
            windows = augmentations.windows(
                self.augmentation, sizes, sampling.uniforms(seeds, host.draws)
            )
        branch, window = images.branches(probed[:, 0], windows, host.side)
        return contents, branch, window, labels, seeds, weights


def _map(data: tf.data.Dataset, function: Callable[..., object], calls: int) -> tf.data.Dataset:
    """Maps in order, without AutoGraph: it writes files, which a killed rank would leave behind."""
    return data.map(
        tf.autograph.experimental.do_not_convert(function),
        num_parallel_calls=calls,
        deterministic=True,
    )


def _call(
    function: Callable[[int], tuple[np.ndarray, ...]],
    step: tf.Tensor,
    types: tuple[tf.DType, ...],
    batch: int,
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[tf.Tensor, ...]:
    """Calls Python inside of tf.data; each result has `batch` entries of its shape."""
    arrays = tf.numpy_function(lambda number: function(int(number)), [step], types)
    for array, shape in zip(arrays, shapes, strict=True):
        array.set_shape((batch, *shape))
    return tuple(arrays)
