"""The end of a run, and its number of updates."""

import itertools

import pytest

from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from hybrid_imagenet.schedules.run_length import RunLength, is_due


def spans_one_by_one(length, batch, cursor=None, step=0):
    """Returns (epoch, steps, end) of the spans, computed one update at a time."""
    order = length.order
    spans = []
    cursor = cursor or Cursor()
    while not length.is_over(cursor, step):
        epoch = cursor.epoch
        count = batch(epoch)
        cursor = order.advance(cursor, count)
        step += 1
        if not spans or spans[-1][0] != epoch:
            spans.append([epoch, 0, None])
        spans[-1][1] += 1
        spans[-1][2] = cursor
    return spans


@pytest.mark.parametrize(
    ("examples", "epochs", "max_steps", "steps", "end"),
    [
        (60, 2, None, 15, 2.0),
        (60, 1, None, 8, 64 / 60),
        # The run ends with the first update after which 30 images are done.
        (60, 0.5, None, 4, 32 / 60),
        # Three updates take exactly 24 images.
        (60, 0.4, None, 3, 24 / 60),
        (60, 1e-5, None, 1, 8 / 60),
        (60, 90, 5, 5, 40 / 60),
        (60, 90, 9, 9, 72 / 60),
        (60, 1, 100, 8, 64 / 60),
        (1281167, 0.1, None, 16015, 16015 * 8 / 1281167),
    ],
)
def test_run_length_spans_end_at_the_last_update(examples, epochs, max_steps, steps, end):
    order = SampleOrder(examples)
    length = RunLength(order, epochs, max_steps)
    spans = list(length.spans(lambda epoch: 8))
    assert sum(span.steps for span in spans) == steps
    assert order.position(spans[-1].end) == pytest.approx(end)
    assert length.is_over(spans[-1].end, steps)
    assert length.end_position(lambda epoch: 8) == pytest.approx(min(end, epochs))


@pytest.mark.parametrize("epochs", [1, 2.3, 3])
@pytest.mark.parametrize("max_steps", [None, 1, 11])
def test_run_length_spans_equal_the_updates_one_by_one(epochs, max_steps):
    length = RunLength(SampleOrder(61), epochs, max_steps)
    batch = {0: 8, 1: 20, 2: 7}.get
    for cursor, step in ((Cursor(), 0), (Cursor(0, 56), 7), (Cursor(1, 20), 9)):
        spans = length.spans(batch, cursor, step)
        actual = [[span.epoch, span.steps, span.end] for span in spans if span.steps]
        assert actual == spans_one_by_one(length, batch, cursor, step)


def test_is_due_finds_periodic_events_within_epochs():
    positions = [round(0.1 * step, 1) for step in range(1, 31)]

    def due(every, offset=0.0):
        last = 0.0
        due_positions = []
        for position in positions:
            if is_due(every, offset, last, position):
                last = position
                due_positions.append(position)
        return due_positions

    assert due(1) == [1, 2, 3]
    assert due(0.5) == [0.5, 1, 1.5, 2, 2.5, 3]
    assert due(0.25) == [0.3, 0.5, 0.8, 1, 1.3, 1.5, 1.8, 2, 2.3, 2.5, 2.8, 3]
    assert due(1.5, 0.2) == [1.7]
    assert due(2, 1) == [3]
    assert due(0.01) == positions
    # The last event was at 1.02, because a wrapped batch reached into the epoch.
    assert not is_due(1, 0, 1.02, 1.9)
    assert all(not is_due(4, 1, low, high) for low, high in itertools.pairwise([0, 1, 2, 3, 4]))
