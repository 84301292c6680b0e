"""Where a run ends, and how many updates that takes."""

import itertools

import pytest

from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.schedules.run_length import RunLength, passed


def walked(length, batch, cursor=None, step=0):
    """The spans, found one update at a time."""
    order, found, cursor = length.order, [], cursor or Cursor()
    while not length.reached(cursor, step):
        count, epoch = batch(cursor.epoch), cursor.epoch
        if not order.batches_in_epoch(count, cursor.offset):
            cursor = Cursor(epoch + 1, 0)
            continue
        cursor, step = order.advance(cursor, count), step + 1
        if not found or found[-1][0] != epoch:
            found.append([epoch, 0, None])
        found[-1][1:] = [found[-1][1] + 1, cursor]
    return found


@pytest.mark.parametrize(
    ("examples", "remainder", "epochs", "max_steps", "steps", "end"),
    [
        (60, "wrap", 2, None, 15, 2.0),
        (60, "wrap", 1, None, 8, 64 / 60),
        (60, "drop", 2, None, 14, 2.0),
        (60, "wrap", 0.5, None, 4, 32 / 60),  # the first update after which 30 images are done
        (60, "wrap", 0.4, None, 3, 24 / 60),  # 24 images, exactly
        (60, "drop", 1.5, None, 11, 1 + 32 / 60),
        (60, "drop", 0.95, None, 7, 1.0),  # the 4 images that are left fill no batch
        (60, "wrap", 1e-5, None, 1, 8 / 60),
        (60, "wrap", 90, 5, 5, 40 / 60),
        (60, "wrap", 90, 9, 9, 72 / 60),
        (60, "wrap", 1, 100, 8, 64 / 60),
        (1281167, "wrap", 0.1, None, 16015, 16015 * 8 / 1281167),
    ],
)
def test_the_number_of_updates(examples, remainder, epochs, max_steps, steps, end):
    order = SampleOrder(examples, 0, remainder)
    length = RunLength(order, epochs, max_steps)
    spans = list(length.spans(lambda epoch: 8))
    assert sum(span.steps for span in spans) == steps
    assert order.position(spans[-1].end) == pytest.approx(end)
    assert length.reached(spans[-1].end, steps)
    assert length.ends_at(lambda epoch: 8) == pytest.approx(min(end, epochs))


@pytest.mark.parametrize("remainder", ["wrap", "drop"])
@pytest.mark.parametrize("epochs", [1, 2.3, 3])
@pytest.mark.parametrize("max_steps", [None, 1, 11])
def test_whole_epochs_at_once_are_the_updates_one_by_one(remainder, epochs, max_steps):
    length = RunLength(SampleOrder(61, 0, remainder), epochs, max_steps)
    batch = {0: 8, 1: 20, 2: 7}.get
    for cursor, step in ((Cursor(), 0), (Cursor(0, 56), 7), (Cursor(1, 20), 9)):
        spans = length.spans(batch, cursor, step)
        found = [[span.epoch, span.steps, span.end] for span in spans if span.steps]
        assert found == walked(length, batch, cursor, step)


def test_validations_at_fractions_of_an_epoch():
    positions = [round(0.1 * step, 1) for step in range(1, 31)]

    def due(every, offset=0.0):
        closed, found = 0.0, []
        for position in positions:
            if passed(every, offset, closed, position):
                closed = position
                found.append(position)
        return found

    assert due(1) == [1, 2, 3]
    assert due(0.5) == [0.5, 1, 1.5, 2, 2.5, 3]
    assert due(0.25) == [0.3, 0.5, 0.8, 1, 1.3, 1.5, 1.8, 2, 2.3, 2.5, 2.8, 3]
    assert due(1.5, 0.2) == [1.7]
    assert due(2, 1) == [3]
    assert due(0.01) == positions
    assert not passed(1, 0, 1.02, 1.9)  # a wrapped batch reached into the epoch
    assert all(not passed(4, 1, low, high) for low, high in itertools.pairwise([0, 1, 2, 3, 4]))
