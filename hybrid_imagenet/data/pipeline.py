"""Makes batches: reads, decodes and crops a rank's examples before they are used.

The random choices for an image depend on (seed, epoch, example) only, so neither the number of
ranks nor the number of threads changes what the network sees.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from hybrid_imagenet.data import augmentations, images, mixing
from hybrid_imagenet.data.bad_records import BadRecords, ExampleReader
from hybrid_imagenet.data.sources.source import Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import sampling
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.order.shard_order import ShardOrder
from hybrid_imagenet.schedules.run_length import RunLength, Span

# Evaluation reads one shard after another, so the next ones can be copied from a URL early.
_EVALUATION_SHARDS_AHEAD = 8
# How much memory an encoded image is assumed to take when reads ahead are limited.
_ENCODED_IMAGE_BYTES = 256 << 10

# Maps an epoch to images per rank and micro-batch, and micro-batches per step.
BatchSizes = Callable[[int], tuple[int, int]]
Element = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class HostOptions:
    """Sets how the host reads and decodes, and what it does with bad records.

    Attributes:
      threads: Number of decoding threads of this rank.
      readers: Number of micro-batches that are read from storage at the same time.
      reads: Number of records of a micro-batch that are read at the same time. More of them hide
        the latency of a network.
      prefetch: Number of finished micro-batches that are kept ready.
      device: Device to which finished micro-batches are copied before the trainer asks for them,
        such as "/gpu:0"; None leaves them on the host.
      memory_bytes: Limit on the memory for images that are read and decoded ahead. It lowers
        `readers` and `prefetch`, but not below 1.
      bad_records: "fail" or "skip", see `training_batches`.
      max_bad_records: With "skip", more bad records than this on all ranks are an error.
    """

    threads: int = 2
    readers: int = 4
    reads: int = 8
    prefetch: int = 2
    device: str | None = None
    memory_bytes: int = 4 << 30
    bad_records: str = "fail"
    max_bad_records: int = 100


def example_order(source: Source, window: int, seed: int = 0) -> SampleOrder:
    """Returns the order in which the examples of a source are read.

    Args:
      source: The examples.
      window: Number of shards that are shuffled together; 0 shuffles all examples together.
      seed: Seed of the shuffle.
    """
    if window and source.shard_sizes is not None:
        return ShardOrder(source.shard_sizes, window, seed)
    return SampleOrder(source.num_examples, seed)


def training_batches(
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
    bad_records: BadRecords | None = None,
    virtual_gpus: int = 1,
) -> Batches:
    """Returns this rank's micro-batches from `start` to the end of training.

    A step takes size * batch * accumulation examples, and rank r reads the r-th contiguous part of
    them. It yields them as `accumulation` elements of the form
    `{"image": uint8 [b, side, side, 3], "label": int64 [b], "seed": int64 [b, 2]}`.
    Batch, accumulation and image size may change from epoch to epoch. A step belongs to the epoch
    in which it begins.

    Rank 0 warns if the order has a window of shards and the first images hold few classes.

    Args:
      source: The examples.
      order: Their order.
      start: Epoch and offset of the first example.
      batches: (batch, accumulation), or a function of the epoch that returns them.
      rank: Number of this process.
      size: Number of processes.
      epochs: Number of epochs after which training ends, counted from the beginning of the run.
      max_steps: Number of steps from `start` after which training ends, if that is sooner.
      image_size: Pixels of the network's input, or a function of the epoch.
      augmentation: One of `augmentations.AUGMENTATIONS`.
      options: See `HostOptions`.
      bad_records: Counter of bad records; several pipelines may share it. By default the
        pipeline has its own.
      virtual_gpus: Number of GPUs that this rank stands for. `batch` and `b` are then those of one
        virtual GPU, and an element holds the elements of all of them, one after the other.

    Raises (when iterated):
      UserError: with `HostOptions.bad_records="fail"`, for a record that cannot be used. With
        "skip", it is logged and counted, and another example replaces it, so that all ranks keep
        the same number of steps; it is an error if there are more than `max_bad_records`.
    """

    def sizes(epoch: int) -> tuple[int, int, int]:
        batch, accumulation = batches(epoch) if callable(batches) else batches
        pixels = image_size(epoch) if callable(image_size) else image_size
        return batch, accumulation, pixels

    def global_batch(epoch: int) -> int:
        batch, accumulation, _ = sizes(epoch)
        return size * virtual_gpus * batch * accumulation

    def segment_of(spans: Sequence[Span]) -> PipelineSegment:
        """Returns the micro-batches of consecutive epochs that have the same sizes."""
        first = spans[0]
        batch, accumulation, pixels = sizes(first.epoch)
        examples_per_step = global_batch(first.epoch)

        def micro_batch(number: int) -> MicroBatch:
            step, micro_step = divmod(number, accumulation)
            cursor = order.advance(first.begin, examples_per_step, step)
            source.prefetch(order.shards_ahead(cursor))
            examples, example_epochs = order.rank_slice(cursor, examples_per_step, rank, size)

            def of_micro_step(values: np.ndarray) -> np.ndarray:
                # Each virtual GPU reads a contiguous part of the rank's examples, as a real GPU
                # would, and its micro-batches follow one another in it.
                by_gpu = values.reshape(virtual_gpus, accumulation, batch)
                return by_gpu[:, micro_step].ravel()

            return MicroBatch(
                of_micro_step(examples),
                of_micro_step(example_epochs),
                np.ones(virtual_gpus * batch, np.float32),
            )

        steps = sum(span.steps for span in spans)
        return PipelineSegment(virtual_gpus * batch, pixels, steps * accumulation, micro_batch)

    options = options or HostOptions()
    if bad_records is None:
        bad_records = BadRecords(source, options.bad_records, options.max_bad_records)
    monitor = None
    if order.window and rank == 0:
        monitor = mixing.ClassMixingMonitor(source.num_classes, order.window)
    all_spans = RunLength(order, epochs, max_steps).spans(global_batch, start)
    spans_by_sizes = itertools.groupby(all_spans, lambda span: sizes(span.epoch))
    segments = [segment_of(list(spans)) for _, spans in spans_by_sizes]
    builder = DatasetBuilder(
        source,
        options,
        bad_records,
        augmentation=augmentation,
        seed=order.seed,
        class_mixing_monitor=monitor,
    )
    return Batches(segments, builder)


def evaluation_batches(
    source: Source,
    batch: int,
    rank: int = 0,
    size: int = 1,
    *,
    image_size: int,
    crop_fraction: float = augmentations.EVALUATION_FRACTION,
    options: HostOptions | None = None,
) -> Batches:
    """Returns this rank's batches of one pass over all examples.

    All ranks have the same number of elements, of the form
    `{"image": uint8 [b, s, s, 3], "label": int64 [b], "weight": float32 [b]}`. Over all ranks, each
    example has weight 1 exactly once. Padding has weight 0, and so has the replacement of a bad
    record.

    Args:
      source: The examples.
      batch: Images per rank and element.
      rank: Number of this process.
      size: Number of processes.
      image_size: Pixels of the network's input.
      crop_fraction: Side of the central square that is evaluated, as a fraction of the image's
        shorter side.
      options: See `HostOptions`.

    Raises (when iterated):
      UserError: as `training_batches`.
    """
    num_steps = -(-source.num_examples // (batch * size))
    shard_ends = np.cumsum(source.shard_sizes) if source.shard_sizes is not None else np.empty(0)

    def micro_batch(step: int) -> MicroBatch:
        examples, weights = sampling.padded_rank_slice(source.num_examples, step, batch, rank, size)
        if weights.any():
            shard = int(np.searchsorted(shard_ends, examples[0], "right"))
            end = min(shard + _EVALUATION_SHARDS_AHEAD, len(shard_ends))
            source.prefetch(range(shard, end))
        return MicroBatch(examples, np.zeros_like(examples), weights)

    options = options or HostOptions()
    bad_records = BadRecords(source, options.bad_records, options.max_bad_records)
    segment = PipelineSegment(batch, image_size, num_steps, micro_batch)
    builder = DatasetBuilder(source, options, bad_records, crop_fraction=crop_fraction)
    return Batches([segment], builder)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Names the examples that one rank reads for one forward pass.

    Attributes:
      examples: Numbers of the examples, int64 [b].
      epochs: The epoch of each, int64 [b].
      weights: float32 [b]; 0 marks padding.
    """

    examples: sampling.Indices
    epochs: sampling.Indices
    weights: np.ndarray


@dataclasses.dataclass(frozen=True)
class PipelineSegment:
    """Describes consecutive micro-batches with one batch size and one image size.

    Attributes:
      batch: Images per micro-batch.
      image_size: Pixels of the network's input.
      count: Number of micro-batches.
      micro_batch: Returns the examples of the micro-batch with a given number, from 0.
    """

    batch: int
    image_size: int
    count: int
    micro_batch: Callable[[int], MicroBatch]


class Batches:
    """Yields micro-batches as dictionaries of tensors.

    Each `iter()` starts from the beginning. Labels are int64, because TensorFlow places int32
    computations on the host, where a GPU would wait for them.

    Attributes:
      bad_records: The bad records so far.
      wait_seconds: Time for which the consumer has waited for batches.
    """

    def __init__(self, segments: Sequence[PipelineSegment], builder: DatasetBuilder) -> None:
        """Reads nothing yet.

        Args:
          segments: The micro-batches.
          builder: Reads and decodes them.
        """
        self.bad_records = builder.bad_records
        self.wait_seconds = 0.0
        self._segments = segments
        self._builder = builder
        self._latest: tuple[PipelineSegment, int, tf.data.Dataset] | None = None

    def __iter__(self) -> Iterator[Element]:
        """Yields the elements.

        Raises:
          UserError: For a record that cannot be used, see `training_batches`.
        """
        for segment in self._segments:
            if self._builder.source.reuse_decoded_batch:
                yield from self._repeat_one_batch(segment)
            else:
                yield from self._read_segment(segment)

    def _read_segment(self, segment: PipelineSegment) -> Iterator[Element]:
        num_done = 0
        # The dataset ends early if an image does not decode. If bad records are skipped, a new
        # dataset continues with the same micro-batch.
        while num_done < segment.count:
            num_bad = len(self.bad_records.reasons)
            elements = iter(self._dataset(segment, num_done))
            try:
                for element in self._measure_waits(elements):
                    num_done += 1
                    yield element
            except tf.errors.OpError:
                self._builder.find_bad_records(segment, num_done)
                if len(self.bad_records.reasons) == num_bad:
                    # All images decode, so the failure has another cause.
                    raise

    def _repeat_one_batch(self, segment: PipelineSegment) -> Iterator[Element]:
        """Yields the first batch's pixels with the labels, seeds and weights of all."""
        builder = self._builder
        first = next(iter(self._dataset(dataclasses.replace(segment, count=1), 0)))
        for number in range(segment.count):
            micro_batch = segment.micro_batch(number)
            labels = builder.source.read(micro_batch.examples)[1]
            element = {"image": first["image"], "label": tf.constant(labels, tf.int64)}
            if builder.is_evaluation:
                element["weight"] = tf.constant(micro_batch.weights)
            else:
                element["seed"] = tf.constant(builder.seeds(micro_batch))
            yield element

    def _measure_waits(self, elements: Iterator[Element]) -> Iterator[Element]:
        while True:
            started = time.perf_counter()
            element = next(elements, None)
            self.wait_seconds += time.perf_counter() - started
            if element is None:
                return
            yield element

    def _dataset(self, segment: PipelineSegment, start: int) -> tf.data.Dataset:
        """Returns the elements of a segment from number `start` on.

        The latest dataset is kept, because repeated evaluation asks for the same one.
        """
        if self._latest is None or self._latest[:2] != (segment, start):
            self._latest = (segment, start, self._builder.build(segment, start))
        return self._latest[2]


@dataclasses.dataclass
class DatasetBuilder:
    """Builds `tf.data` pipelines that read and decode the micro-batches of a segment.

    Attributes:
      source: The examples.
      options: See `HostOptions`.
      bad_records: Counter of bad records.
      crop_fraction: For evaluation, the central square as a fraction of the shorter side; elements
        have weights. None for training; elements have seeds.
      augmentation: The training augmentation.
      seed: Seed of the random augmentation.
      class_mixing_monitor: Warns if the first images hold few classes; None for no warning.
    """

    source: Source
    options: HostOptions
    bad_records: BadRecords
    crop_fraction: float | None = None
    augmentation: str = "none"
    seed: int = 0
    class_mixing_monitor: mixing.ClassMixingMonitor | None = None

    def __post_init__(self) -> None:
        """Creates the reader."""
        self._reader = ExampleReader(
            self.source, self.bad_records, self.options.reads, self.options.readers
        )
        self._read_error: UserError | None = None

    @property
    def is_evaluation(self) -> bool:
        """Whether elements have weights instead of seeds."""
        return self.crop_fraction is not None

    def build(self, segment: PipelineSegment, start: int) -> tf.data.Dataset:
        """Returns the elements of a segment from number `start` on."""
        options = self.options
        host = self._host_augmentation(segment)
        readers, prefetch = self._read_ahead_limits(segment.batch, host.side)
        numbers = tf.data.Dataset.range(start, segment.count)
        if self._source_has_final_pixels(host):
            data = self._read_pixels(numbers, segment, host, readers)
        else:
            data = self._decode(numbers, segment, host, readers)
        data = data.prefetch(prefetch)
        settings = tf.data.Options()
        settings.threading.private_threadpool_size = options.threads
        settings.threading.max_intra_op_parallelism = 1
        settings.autotune.enabled = False
        data = data.with_options(settings)
        if options.device:
            return data.apply(
                tf.data.experimental.prefetch_to_device(options.device, buffer_size=1)
            )
        return data

    def find_bad_records(self, segment: PipelineSegment, number: int) -> None:
        """Finds the images of a failed micro-batch that do not decode.

        They are counted as bad records. TensorFlow's error does not say which image failed, so each
        is decoded again.

        Raises:
          UserError: The error of a failed read; for a bad record under "fail"; or if there are too
            many.
        """
        if self._read_error:
            raise self._read_error from None
        side = self._host_augmentation(segment).side
        for example in np.unique(segment.micro_batch(number).examples):
            self._reader.check_decodes(int(example), side)

    def seeds(self, micro_batch: MicroBatch) -> sampling.Indices:
        """Returns the seeds of the examples' random numbers, int64 [b, 2]."""
        return sampling.seeds(self.seed, micro_batch.epochs, micro_batch.examples)

    def _host_augmentation(self, segment: PipelineSegment) -> augmentations.HostAugmentation:
        if self.is_evaluation:
            return augmentations.HostAugmentation(0, segment.image_size)
        return augmentations.host_augmentation(self.augmentation, segment.image_size)

    def _read_ahead_limits(self, batch: int, side: int) -> tuple[int, int]:
        """Returns how many micro-batches to read at once and to keep ready.

        Encoded and decoded images may take half of the memory each.
        """
        decoded_bytes = batch * side**2 * 3
        encoded_bytes = batch * _ENCODED_IMAGE_BYTES
        prefetch = min(self.options.prefetch, self.options.memory_bytes // (2 * decoded_bytes))
        readers = min(self.options.readers, self.options.memory_bytes // (2 * encoded_bytes))
        return max(1, readers), max(1, prefetch)

    def _source_has_final_pixels(self, host: augmentations.HostAugmentation) -> bool:
        """Returns whether the source already has the pixels that the trainer gets.

        This is so if whole images are used, and have the requested size.
        """
        if self.crop_fraction:
            fraction = self.crop_fraction
        elif self.augmentation in augmentations.WHOLE_IMAGE_AUGMENTATIONS:
            fraction = 1.0
        else:
            fraction = 0.0
        return self.source.side == host.side and fraction == 1.0

    def _decode(
        self,
        numbers: tf.data.Dataset,
        segment: PipelineSegment,
        host: augmentations.HostAugmentation,
        readers: int,
    ) -> tf.data.Dataset:
        types = (tf.string, tf.int32, tf.int32, tf.int64, tf.int64, tf.float32)
        shapes = ((), (), (4,), (), (2,), ())

        def read(number: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return _call_python(
                lambda value: self._read(segment, value, host), number, types, segment.batch, shapes
            )

        def decode(
            content: tf.Tensor, branch: tf.Tensor, window: tf.Tensor, *rest: tf.Tensor
        ) -> Element:
            pixels = images.decode(content, branch, window, host.side, accurate=self.is_evaluation)
            return self._element(pixels, *rest)

        # Reading works on micro-batches, decoding on single images, so that all threads decode.
        encoded_images = _map(numbers, read, readers).unbatch()
        decoded_images = _map(encoded_images, decode, self.options.threads)
        return decoded_images.batch(segment.batch, drop_remainder=True)

    def _read_pixels(
        self,
        numbers: tf.data.Dataset,
        segment: PipelineSegment,
        host: augmentations.HostAugmentation,
        readers: int,
    ) -> tf.data.Dataset:
        types = (tf.uint8, tf.int64, tf.int64, tf.float32)
        shapes = ((host.side, host.side, 3), (), (2,), ())

        def read(number: int) -> tuple[np.ndarray, ...]:
            micro_batch = segment.micro_batch(number)
            pixels, labels = self.source.read_pixels(micro_batch.examples)
            return pixels, labels.astype(np.int64), self.seeds(micro_batch), micro_batch.weights

        def element(number: tf.Tensor) -> Element:
            return self._element(*_call_python(read, number, types, segment.batch, shapes))

        return _map(numbers, element, readers)

    def _element(
        self, image: tf.Tensor, label: tf.Tensor, seed: tf.Tensor, weight: tf.Tensor
    ) -> Element:
        if self.is_evaluation:
            return {"image": image, "label": label, "weight": weight}
        return {"image": image, "label": label, "seed": seed}

    def _read(
        self, segment: PipelineSegment, number: int, host: augmentations.HostAugmentation
    ) -> tuple[np.ndarray, ...]:
        """Reads the encoded images of a micro-batch and plans how to decode them.

        Threads of tf.data call this at the same time.

        Returns:
          (contents, branch, window, labels, seeds, weights): encoded images, bytes [b]; branch and
          window of `images.plan_decoding`; int64 [b]; int64 [b, 2]; float32 [b].
        """
        micro_batch = segment.micro_batch(number)
        try:
            examples = self._reader.read(micro_batch.examples)
        except UserError as error:
            # TensorFlow turns it into an OpError, so it is kept for the thread that iterates.
            self._read_error = error
            raise
        if self.class_mixing_monitor is not None:
            self.class_mixing_monitor.add(examples.labels)
        if not examples.is_original.all():
            self._note_replaced(micro_batch, examples.is_original)
        # The replacement of a bad record must not count in evaluation.
        weights = micro_batch.weights * examples.is_original
        seeds = self.seeds(micro_batch)
        kinds = examples.headers[:, 0]
        sizes = examples.headers[:, 1:]
        if self.crop_fraction is not None:
            windows = augmentations.center_windows(sizes, self.crop_fraction)
        else:
            windows = augmentations.training_windows(
                self.augmentation, sizes, sampling.uniforms(seeds, host.num_draws)
            )
        branch, window = images.plan_decoding(kinds, windows, host.side)
        return examples.contents, branch, window, examples.labels, seeds, weights

    def _note_replaced(self, micro_batch: MicroBatch, is_original: npt.NDArray[np.bool]) -> None:
        # Padding was not asked for, so it does not count as replaced.
        is_replaced = ~is_original & (micro_batch.weights > 0)
        pairs = zip(micro_batch.epochs[is_replaced], micro_batch.examples[is_replaced], strict=True)
        self.bad_records.replaced_examples.update(
            (int(epoch), int(example)) for epoch, example in pairs
        )


def _map(data: tf.data.Dataset, function: Callable[..., object], calls: int) -> tf.data.Dataset:
    """Maps a function over a dataset in order, with `calls` parallel calls.

    AutoGraph is not used, because it writes temporary files, which a killed rank would leave
    behind.
    """
    return data.map(
        tf.autograph.experimental.do_not_convert(function),
        num_parallel_calls=calls,
        deterministic=True,
    )


def _call_python(
    function: Callable[[int], tuple[np.ndarray, ...]],
    number: tf.Tensor,
    types: tuple[tf.DType, ...],
    batch: int,
    shapes: tuple[tuple[int, ...], ...],
) -> tuple[tf.Tensor, ...]:
    """Calls a Python function of a micro-batch's number inside tf.data.

    Args:
      function: Returns arrays, each with `batch` entries.
      number: The number, int64 [].
      types: Type of each array.
      batch: Number of entries.
      shapes: Shape of the entries of each array.
    """
    arrays = tf.numpy_function(lambda value: function(int(value)), [number], types)
    for array, shape in zip(arrays, shapes, strict=True):
        array.set_shape((batch, *shape))
    return tuple(arrays)
