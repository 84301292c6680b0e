import pytest

from hybrid_imagenet.tools.report import scales


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 90, 6, [0, 20, 40, 60, 80]),
        (0.45, 0.78, 5, [0.5, 0.6, 0.7]),
        (-3, 3, 3, [-2, 0, 2]),
    ],
)
def test_linear_ticks(low, high, count, ticks):
    assert scales.Scale(low, high, 0, 1).ticks(count) == pytest.approx(ticks)


def test_logarithmic_ticks():
    assert scales.Scale(0.05, 2000, 0, 1, log=True).ticks() == pytest.approx([0.1, 1, 10, 100, 1000])
    assert scales.Scale(30, 120, 0, 1, log=True).ticks() == pytest.approx([50, 100])
    assert len(scales.Scale(1e-9, 1e9, 0, 1, log=True).ticks(5)) <= 7


def test_scale_maps_ends_and_middle():
    assert [scales.Scale(0, 10, 100, 200)(v) for v in (0, 5, 10, 20)] == [100, 150, 200, 200]
    assert scales.Scale(1, 100, 0, 2, log=True)(10) == pytest.approx(1)
    flat = scales.fit([3.0, 3.0], 0, 1)
    assert flat.low < 3 < flat.high
    assert scales.fit([], 0, 1).ticks()
    assert scales.fit([0.0, -1.0, 5.0], 0, 1, log=True).low > 0


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1500, "1,500"), (2e-5, "2e-5"), (3e6, "3e6"), (12, "12")]
)
def test_tick_labels(value, text):
    assert scales.label(value) == text
