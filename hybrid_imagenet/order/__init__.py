"""The exact order of examples for any training loop.

Each example is used once per epoch, and an interrupted run continues with the next one. The
order is a function of (seed, epoch), so its state is only two integers: the epoch, and how many of
its examples are trained. All ranks have the same state. A run continues from it on any number of
ranks and with any batch size.

`ExactBatchSampler` is for `torch.utils.data.DataLoader(batch_sampler=...)` and for loops without a
framework, `keras_dataset` is for Keras's `fit`, and `evaluation_batches` counts each example once.
This module needs only NumPy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import notes, sampling
from hybrid_imagenet.order.sampling import Cursor, Indices, SampleOrder, Weights

if TYPE_CHECKING:
    from hybrid_imagenet.order.for_keras import ExactDataset

__all__ = ["ExactBatchSampler", "evaluation_batches", "keras_dataset"]


class ExactBatchSampler:
    """Yields this rank's batches of example numbers, in an order that can be resumed.

    One iteration is a pass: it yields the batches that start in the rest of the current epoch, each
    a list of `batch_size` integers. Rank r has the r-th contiguous slice of each global batch. Only
    `advance` changes the state, so batches that a loader has read ahead are not counted. There is
    no `set_epoch`. The last batch of an epoch is filled from the next epoch, so each example occurs
    exactly once per epoch.

    If a state is loaded, iterators that were created before raise an error instead of yielding
    batches of another epoch.

    Example:
      sampler = ExactBatchSampler(len(dataset), 64, rank=rank, size=size)
      loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)
      for images, labels in loader:
          train(images, labels)
          sampler.advance()

    Args:
      num_examples: Number of examples in the dataset, at least 1.
      batch_size: Examples per rank and batch, at least 1.
      rank: Number of this process, from 0 (default: 0).
      size: Number of ranks (default: 1).
      seed: Seed of the order, not negative; the same on all ranks (default: 0).
      shuffle: Whether each epoch has a new order; False keeps the stored one (default: True).

    Raises:
      UserError: For values outside these ranges.
    """

    # Cursor at the start of the current pass. Only iterators with its `_pass_id` may continue.
    _start: Cursor
    _pass_id: object
    # Batches of the current pass that were read, and how many of them were trained.
    _read: int
    _trained: int
    # Whether an iterator has reached the end of the current pass.
    _pass_was_read: bool

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
    ) -> None:
        _check_rank(batch_size, rank, size)
        self._batch_size = batch_size
        self._rank = rank
        self._size = size
        try:
            self._order = SampleOrder(num_examples, seed, shuffle=shuffle)
        except ValueError as error:
            raise UserError(str(error)) from None
        # These values are shown in an error if they differ between ranks.
        facts = {
            "the number of examples": num_examples,
            "the batch size": batch_size,
            "the seed of the order": seed,
            "shuffle": shuffle,
        }
        notes.add(notes.ShardNote(rank, size, facts))
        self._begin_pass(Cursor())

    @property
    def batch_size(self) -> int:
        """Examples per rank and batch."""
        return self._batch_size

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._cursor.epoch

    @property
    def position(self) -> float:
        """The fractional number of epochs trained, from which a schedule continues."""
        return self._order.position(self._cursor)

    def position_after(self, batches: int) -> float:
        """Returns the `position` after `batches` batches of the current pass.

        The state does not change.
        """
        return self._order.position(self._cursor_after(self._start, batches))

    @property
    def longest(self) -> int:
        """The largest number of batches that a pass can have."""
        return self._order.batches_in_epoch(self._batch_size * self._size)

    def __len__(self) -> int:
        """Returns the number of batches of the current pass.

        After the last batch of a pass was trained, it counts the batches of the next pass.
        """
        start = self._start if self.epoch == self._start.epoch else self._cursor
        return self._order.batches_in_epoch(self._batch_size * self._size, start.offset)

    def __iter__(self) -> Iterator[list[int]]:
        """Starts a pass at the current state.

        Raises:
          UserError: If the last pass was read to its end, but `advance` was never called. Also
            while reading, if another pass or `load_state_dict` has come in between.
        """
        if self._pass_was_read and not self._trained:
            raise UserError(
                "A second pass without advance() would repeat the first. Call advance() after each"
                " batch."
            )
        self.start_pass()
        return self._iterate(self._pass_id)

    def _iterate(self, pass_id: object) -> Iterator[list[int]]:
        for index in range(len(self)):
            if pass_id is not self._pass_id:
                raise UserError(
                    "This iterator belongs to an earlier pass or state. Create a new one, after"
                    " load_state_dict()."
                )
            yield self.batch(index).tolist()
        if pass_id is self._pass_id:
            self._pass_was_read = True

    def start_pass(self) -> None:
        """Starts a pass at the current state, for a loop that gets its batches from `batch`."""
        self._begin_pass(self._cursor)

    def batch(self, index: int) -> Indices:
        """Returns this rank's example numbers of a batch of the current pass.

        Args:
          index: Number of the batch in the pass, from 0.

        Returns:
          int64 [batch_size].
        """
        global_batch = self._batch_size * self._size
        cursor = self._cursor_after(self._start, index)
        examples, _ = self._order.rank_slice(cursor, global_batch, self._rank, self._size)
        self._read = max(self._read, index + 1)
        return examples

    def advance(self, batches: int = 1) -> None:
        """Counts batches as trained. Call it after each step.

        Args:
          batches: Number of batches that the step used (default: 1).

        Raises:
          UserError: If more batches would be counted than were read in the current pass.
        """
        if not 0 <= batches <= self._read - self._trained:
            raise UserError(
                f"advance({batches}): {self._read} batches of this pass were read, and"
                f" {self._trained} of them are already counted. Call it once for each batch."
            )
        self._trained += batches

    def state_after(self, batches: int) -> dict[str, int]:
        """Returns the state, as `state_dict`, after `batches` batches of the current pass.

        The state itself does not change.
        """
        cursor = self._cursor_after(self._start, batches)
        return {"epoch": cursor.epoch, "offset": cursor.offset}

    def state_dict(self) -> dict[str, int]:
        """Returns the state, which is the same on all ranks.

        Returns:
          `epoch`, and `offset`, the number of its examples that all ranks together have trained.
          Both count calls of `advance`, not batches that were read ahead.
        """
        return self.state_after(self._trained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a state of a run with any number of ranks and any batch size.

        Call it before the loader's iterator is created: an earlier iterator raises an error at its
        next batch. Seed, dataset and `shuffle` must be the same as in the run, which two integers
        cannot show.

        Raises:
          UserError: For a state of another form, or an offset that the dataset does not have.
        """
        try:
            cursor = Cursor(operator.index(state["epoch"]), operator.index(state["offset"]))
        except (KeyError, TypeError):
            raise UserError(
                f"{state!r} is not a state. Pass the epoch and offset of state_dict()."
            ) from None
        if cursor.epoch < 0 or not 0 <= cursor.offset < self._order.num_examples:
            raise UserError(
                f"{dict(state)} is not a position in {self._order.num_examples} examples. Check the"
                " dataset."
            )
        self._begin_pass(cursor)

    @property
    def _cursor(self) -> Cursor:
        """The next example to train."""
        return self._cursor_after(self._start, self._trained)

    def _cursor_after(self, start: Cursor, batches: int) -> Cursor:
        return self._order.advance(start, self._batch_size * self._size, batches)

    def _begin_pass(self, start: Cursor) -> None:
        """Begins a pass at a cursor; iterators of earlier passes become invalid."""
        self._start = start
        self._read = 0
        self._trained = 0
        self._pass_was_read = False
        self._pass_id = object()


def evaluation_batches(
    num_examples: int, batch_size: int, *, rank: int = 0, size: int = 1
) -> list[tuple[Indices, Weights]]:
    """Returns this rank's batches of one pass in which each example counts once.

    The sum over all ranks of weight times result, divided by `num_examples`, is the exact mean, for
    any number of ranks. All ranks have the same number of batches, so none waits for another in a
    collective.

    Example:
      correct = 0.0
      for examples, weights in evaluation_batches(len(labels), 64, rank=rank, size=size):
          predictions = predict(images[examples])
          correct += (weights * (predictions == labels[examples])).sum()

    Args:
      num_examples: Size of the dataset, at least 1.
      batch_size: Examples per rank and batch, at least 1.
      rank: Number of this process, from 0 (default: 0).
      size: Number of ranks (default: 1).

    Returns:
      Pairs of example numbers (int64 [batch_size]) and weights (float32 [batch_size]). Weights are
      1, or 0 for padding, which has example number 0.

    Raises:
      UserError: For values outside these ranges.
    """
    _check_rank(batch_size, rank, size)
    if num_examples < 1:
        raise UserError(f"num_examples={num_examples}: a dataset needs at least one example.")
    steps = -(-num_examples // (batch_size * size))
    return [
        sampling.padded_rank_slice(num_examples, step, batch_size, rank, size)
        for step in range(steps)
    ]


def keras_dataset(sampler: ExactBatchSampler, load: Callable[[Indices], Any]) -> ExactDataset:
    """Creates a `keras.utils.PyDataset` with which `fit` can resume inside an epoch.

    `hi.callbacks.Checkpoint(directory, order=sampler)` saves the model and the position, after each
    epoch and inside it. To save with a callback of your own, store `sampler.state_dict()` together
    with the model, in a callback after `counter`.

    Example:
      batches = keras_dataset(sampler, lambda examples: (images[examples], labels[examples]))
      model.fit(
          batches,
          initial_epoch=sampler.epoch,
          epochs=90,
          shuffle=False,
          callbacks=[batches.counter],
      )

    Args:
      sampler: Sampler at the state from which `fit` continues.
      load: Function that returns the batch for example numbers int64 [batch_size], in a form that
        `fit` accepts; called by one thread.

    Returns:
      The dataset. With `shuffle=True`, without `counter`, or with `steps_per_epoch`, `fit` raises a
      `UserError`.
    """
    from hybrid_imagenet.order.for_keras import ExactDataset

    return ExactDataset(sampler, load)


def _check_rank(batch_size: int, rank: int, size: int) -> None:
    if batch_size < 1 or not 0 <= rank < size:
        raise UserError(
            f"batch_size={batch_size}, rank={rank}, size={size}: use a batch_size of at least 1,"
            " and 0 <= rank < size."
        )
