"""The exact order of examples for any training loop: each example once per epoch, resumed at the
very next one.

The order is a function of (seed, epoch), so its whole state is two integers: the epoch, and how
many of its examples are trained. All ranks have the same state. A run continues from it on any
number of ranks and with any batch size.

`ExactBatchSampler` serves `torch.utils.data.DataLoader(batch_sampler=...)` and loops without a
framework, `keras_dataset` serves Keras's `fit`, and `evaluation_batches` counts each example once.
This module needs NumPy only.
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
    """Yields this rank's batches of example numbers.

    One iteration yields the batches that start in the rest of the current epoch, each a list of
    `batch_size` integers. Rank r has the r-th contiguous share of each global batch. Only `advance`
    moves the state, so batches that a loader has read ahead are not counted:

        for images, labels in loader:
            train(images, labels)
            sampler.advance()

    An iterator that was made before a state was loaded raises; it never yields batches of another
    epoch. There is no `set_epoch`.
    """

    def __init__(
        self,
        num_examples: int,
        batch_size: int,
        *,
        rank: int = 0,
        size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        remainder: str = "wrap",
    ) -> None:
        """Starts at the first example of epoch 0.

        Args:
          num_examples: size of the dataset, at least 1.
          batch_size: examples per rank and batch, at least 1.
          rank: of this process, from 0.
          size: number of ranks.
          seed: non-negative; the same on all ranks.
          shuffle: False gives the examples in their stored order.
          remainder: `wrap` fills the last batch of an epoch from the next epoch, so each example
            occurs exactly once per epoch. `drop` omits the examples that do not fill a global
            batch.

        Raises:
          UserError: for values outside these ranges, or a global batch that `drop` can never fill.
        """
        _check_rank(batch_size, rank, size)
        self._batch_size, self._rank, self._size = batch_size, rank, size
        try:
            self._order = SampleOrder(num_examples, seed, remainder, shuffle=shuffle)
            self._start = self._after(Cursor(), 0)
        except ValueError as problem:
            raise UserError(str(problem)) from None
        facts = {
            "the number of examples": num_examples,
            "the batch size": batch_size,
            "the seed of the order": seed,
            "shuffle": shuffle,
            "remainder": remainder,
        }
        notes.add(notes.Note(rank, size, facts))
        self._read = self._trained = 0  # batches of the pass that starts at _start
        self._repeats = False
        self._pass = object()

    @property
    def epoch(self) -> int:
        """The current epoch, from 0."""
        return self._cursor.epoch

    @property
    def position(self) -> float:
        """Epochs trained, with the fraction: what a schedule of the learning rate takes, also after
        a resume.
        """
        return self._order.position(self._cursor)

    def position_after(self, batches: int) -> float:
        """The `position` after `batches` batches of the current pass; nothing is changed."""
        return self._order.position(self._after(self._start, batches))

    @property
    def longest(self) -> int:
        """The largest number of batches that a pass can have."""
        return self._order.batches_in_epoch(self._batch_size * self._size)

    def __len__(self) -> int:
        """Counts the batches of the current pass; after its last batch is trained, those of the
        next one.
        """
        start = self._start if self.epoch == self._start.epoch else self._cursor
        return self._order.batches_in_epoch(self._batch_size * self._size, start.offset)

    def __iter__(self) -> Iterator[list[int]]:
        """Starts a pass at the current state.

        Raises:
          UserError: if the last pass was read to its end and none of it was counted by `advance`;
            and while reading, if another pass or `load_state_dict` came in between.
        """
        if self._repeats and not self._trained:
            raise UserError(
                "a second pass without advance() would repeat the first: call it after each batch"
            )
        self.start_pass()
        return self._batches(self._pass)

    def _batches(self, current: object) -> Iterator[list[int]]:
        for index in range(len(self)):
            if current is not self._pass:
                raise UserError(
                    "this iterator is of an earlier pass or state: make a new one, after"
                    " load_state_dict()"
                )
            yield self.batch(index).tolist()
        if current is self._pass:
            self._repeats = True

    def start_pass(self) -> None:
        """Starts a pass at the current state, for a loop that takes its batches by `batch`."""
        self._set(self._cursor)

    def batch(self, index: int) -> Indices:
        """The example numbers (int64 [batch_size]) of this rank in batch `index` of the current
        pass, from 0.
        """
        count = self._batch_size * self._size
        examples, _ = self._order.share(
            self._after(self._start, index), count, self._rank, self._size
        )
        self._read = max(self._read, index + 1)
        return examples

    def advance(self, batches: int = 1) -> None:
        """Counts batches as trained; call it after each step, with the number of batches that the
        step took.

        Raises:
          UserError: if that is more than the current pass has given.
        """
        if not 0 <= batches <= self._read - self._trained:
            raise UserError(
                f"advance({batches}): {self._read} batches of this pass were read, {self._trained}"
                " of them already counted; call it once for each batch"
            )
        self._trained += batches

    def state_after(self, batches: int) -> dict[str, int]:
        """The state after `batches` batches of the current pass, as `state_dict` gives it; nothing
        is changed.
        """
        cursor = self._after(self._start, batches)
        return {"epoch": cursor.epoch, "offset": cursor.offset}

    def state_dict(self) -> dict[str, int]:
        """The state: `epoch`, and `offset`, the number of its examples that are trained on all
        ranks together.

        It counts what `advance` counted, not what was read ahead. It is the same on all ranks.
        """
        return self.state_after(self._trained)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at a state, of a run with any number of ranks and any batch size.

        Call it before the loader's iterator is made; an earlier iterator raises at its next batch.
        Seed, dataset and `shuffle` must be those of the run: two integers cannot show that they are
        not.

        Raises:
          UserError: for a state of another form, or an offset that the dataset does not have.
        """
        try:
            cursor = Cursor(operator.index(state["epoch"]), operator.index(state["offset"]))
        except (KeyError, TypeError):
            raise UserError(
                f"{state!r} is no state: give the epoch and offset of state_dict()"
            ) from None
        if cursor.epoch < 0 or not 0 <= cursor.offset < self._order.num_examples:
            raise UserError(
                f"{dict(state)} is not a place in {self._order.num_examples} examples: check the"
                " dataset"
            )
        self._set(self._after(cursor, 0))

    @property
    def _cursor(self) -> Cursor:
        return self._after(self._start, self._trained)

    def _after(self, start: Cursor, batches: int) -> Cursor:
        return self._order.advance(start, self._batch_size * self._size, batches)

    def _set(self, start: Cursor) -> None:
        self._start, self._read, self._trained, self._repeats, self._pass = (
            start,
            0,
            0,
            False,
            object(),
        )


def evaluation_batches(
    num_examples: int, batch_size: int, *, rank: int = 0, size: int = 1
) -> list[tuple[Indices, Weights]]:
    """Returns this rank's batches of one pass in which each example counts once, on any number of
    ranks.

    The sum over all ranks of weight times result, divided by `num_examples`, is the exact mean. All
    ranks have the same number of batches, so none waits for another in a collective.

    Args:
      num_examples: size of the dataset, at least 1.
      batch_size: examples per rank and batch, at least 1.
      rank: of this process, from 0.
      size: number of ranks.

    Returns:
      Pairs of example numbers (int64 [batch_size]) and weights (float32 [batch_size]): 1, or 0 for
      padding, which holds example 0.

    Raises:
      UserError: for values outside these ranges.
    """
    _check_rank(batch_size, rank, size)
    if num_examples < 1:
        raise UserError(f"num_examples={num_examples}: a dataset needs at least one example")
    steps = -(-num_examples // (batch_size * size))
    return [
        sampling.padded_share(num_examples, step, batch_size, rank, size) for step in range(steps)
    ]


def keras_dataset(sampler: ExactBatchSampler, load: Callable[[Indices], Any]) -> ExactDataset:
    """A `keras.utils.PyDataset` with which `fit` resumes inside an epoch; Keras is imported here.

        batches = keras_dataset(sampler, lambda examples: (images[examples], labels[examples]))
        model.fit(batches, initial_epoch=sampler.epoch, epochs=90, shuffle=False,
        callbacks=[batches.counter])

    Save `sampler.state_dict()` together with the model, in a callback behind `counter`.

    Args:
      sampler: at the state from which `fit` shall continue.
      load: gives the batch of example numbers int64 [batch_size], in a form that `fit` takes;
        called by one thread.

    Returns:
      The dataset. `fit` refuses, with `UserError`, `shuffle=True`, a missing `counter`, and
      `steps_per_epoch`.
    """
    from hybrid_imagenet.order.for_keras import ExactDataset

    return ExactDataset(sampler, load)


def _check_rank(batch_size: int, rank: int, size: int) -> None:
    if batch_size < 1 or not 0 <= rank < size:
        raise UserError(
            f"batch_size={batch_size}, rank={rank}, size={size}: give at least 1, and 0 <= rank <"
            " size"
        )
