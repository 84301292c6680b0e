"""MLPerf's table of settings by batch."""

import pytest

from hybrid_imagenet.schedules import mlperf
from tests.references import mlperf_reference as reference


@pytest.mark.parametrize(
    ("point", "row"), [*zip(mlperf.POINTS, reference.ROWS, strict=True)], ids=range(10)
)
def test_point_at_the_batch_of_a_row_equals_the_reference(point, row):
    batch, epochs, lr, warmup, momentum, decay, end, step, span = row
    computed = mlperf.point_at(int(batch))
    assert computed == point
    assert (point.batch, point.epochs, point.lr, point.warmup_epochs) == (batch, epochs, lr, warmup)
    assert (point.momentum, point.weight_decay) == (momentum, decay)
    assert point.schedule_epochs == pytest.approx(end, abs=0.05)
    assert point.relative_step == pytest.approx(step, abs=6e-4)
    assert point.normalized_images == span
    assert 0.94 < point.epochs / point.schedule_epochs < 1.0001


def test_point_at_between_two_rows_interpolates_the_relative_step():
    middle = mlperf.point_at(round((4096 * 8192) ** 0.5))
    assert middle.relative_step == pytest.approx((0.100 + 0.170) / 2, rel=1e-4)
    assert middle.lr == pytest.approx(13.5, rel=1e-4)
    assert middle.schedule_epochs == pytest.approx((42.0 + 43.97) / 2, abs=0.01)
    # If the momentum changes too, the relative step is interpolated, not the learning rate.
    middle = mlperf.point_at(round((13056 * 32768) ** 0.5))
    assert middle.momentum == pytest.approx(0.92, rel=1e-4)
    step = (12.8 * 1e-3 / 0.1 + 21.2 * 1e-3 / 0.06) / 2
    assert middle.lr == pytest.approx(step * 0.08 / 1e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("images", "batch", "group"), [(204, 32, 6), (204, 256, 1), (128, 32, 4), (64, 48, 1)]
)
def test_normalization_group_has_the_nearest_number_of_images_in_ratio(images, batch, group):
    assert mlperf.normalization_group(images, batch, [1, 2, 3, 4, 6, 12]) == group


def test_point_at_outside_the_rows_has_the_settings_of_the_nearest():
    for batch, row in ((1, 0), (1631, 0), (67841, -1), (10**6, -1)):
        outside = mlperf.point_at(batch)
        assert (outside.batch, outside.lr, outside.epochs) == (
            batch,
            mlperf.POINTS[row].lr,
            mlperf.POINTS[row].epochs,
        )
        assert not mlperf.covers(batch)
