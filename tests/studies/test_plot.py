"""What the plots show, from made-up results."""

import pytest
from matplotlib import pyplot

from studies import plot
from studies.base import Arm, Claim, Study
from studies.results import ArmResults
from tests.studies import support

SPREAD = (-0.002, 0.001, 0.001)


def arm_results(arm, top1, seeds=3):
    runs = {seed: support.curve(top1 + SPREAD[seed]) for seed in range(seeds)}
    return ArmResults(arm, support.results(runs or {0: "missing"}), 0.9)


def study(arms, claims=()):
    return Study("made_up", "Made up", "", "Which?", tuple(found.arm for found in arms), tuple(claims))


def by_method():
    """Two methods at two batches; the second has a run that went wrong, and nothing at the larger batch."""
    return [
        arm_results(Arm("a_1", "A 1", method="method A", batch=256), 0.92),
        arm_results(Arm("a_2", "A 2", method="method A", batch=1024), 0.91),
        arm_results(Arm("b_1", "B 1", method="method B", batch=256), 0.30),
        arm_results(Arm("b_2", "B 2", method="method B", batch=1024), 0.9, seeds=0),
    ]


@pytest.fixture
def shown(monkeypatch):
    """Figures stay open until the test has looked at them."""
    figures = []
    monkeypatch.setattr(pyplot, "close", figures.append)
    yield lambda: figures[0]
    monkeypatch.undo()
    pyplot.close("all")


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_methods_over_batches_are_lines_with_their_names_at_the_end(tmp_path, shown):
    arms = by_method()
    plot.draw(tmp_path / "plot.png", study(arms), arms)
    axes = shown().axes[0]
    assert (tmp_path / "plot.png").stat().st_size > 5000
    assert set(texts(axes)) == {"method A", "method B", "30.0 %"}  # far below: at the foot, with its number
    low, high = axes.get_ylim()
    assert 80 < low < 91
    assert 92.2 < high <= 95
    assert axes.containers[0].lines[0].get_ydata().tolist() == pytest.approx([92, 91])
    assert axes.containers[0].lines[0].get_xdata().tolist() == pytest.approx([256, 1024], rel=0.05)
    assert "3 seeds" in axes.get_title(loc="left")
    assert axes.get_legend() is None


@pytest.mark.parametrize(("count", "panels"), [(6, 2), (7, 1)])
def test_many_arms_get_a_row_each_instead_of_a_curve(tmp_path, shown, count, panels):
    arms = [arm_results(Arm(f"arm{n}", f"Arm {n}"), 0.9 + n / 1000, seeds=3 if n else 0) for n in range(count)]
    plot.draw(tmp_path / "plot.png", study(arms, [Claim("arm1", "arm3"), Claim("arm2", "arm3")]), arms)
    figure = shown()
    assert len(figure.axes) == panels
    if panels == 1:
        axes = figure.axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == [f"Arm {n}" for n in range(count)]
        assert "no run has finished" in texts(axes)[0]
        assert "dotted: Arm 3" in axes.get_xlabel()
        means = [container.lines[0].get_xdata()[0] for container in axes.containers]
        assert means == pytest.approx([90 + n / 10 for n in range(1, count)])


def test_arms_that_are_validated_at_the_end_alone_get_a_row_each(tmp_path, shown):
    ends = {"a": [0.8] * 9 + [0.78], "b": [0.81, 0.812, 0.81]}  # one run lies outside of the interval of its mean
    arms = [
        ArmResults(Arm(name, name), support.results({seed: [top1] for seed, top1 in enumerate(found)}), 0.9)
        for name, found in ends.items()
    ]
    plot.draw(tmp_path / "plot.png", study(arms), arms)
    axes = shown().axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert axes.get_xlim()[0] < 78
    assert axes.lines[0].get_xdata().min() == 78


@pytest.mark.parametrize("claims", [[("a", "b"), ("c", "b")], [("b", "a"), ("b", "c")]])
def test_the_dotted_line_is_the_arm_of_most_statements_on_either_side(claims):
    arms = [arm_results(Arm(name, name), 0.9) for name in "abc"]
    assert plot._reference(study(arms, [Claim(*names) for names in claims]), arms).arm.name == "b"


def test_a_study_without_results_is_drawn(tmp_path, shown):
    arms = [arm_results(Arm("a", "A", method="A", batch=256), 0.5, seeds=0)]
    plot.draw(tmp_path / "plot.png", study(arms), arms)
    assert "0 seeds" in shown().axes[0].get_title(loc="left")


def test_labels_are_kept_apart_and_in_order():
    places = plot._spread([90.0, 90.1, 85.0, 90.05], 0.5)
    assert places[2] == 85.0
    assert places[0] < places[3] < places[1]
    assert min(places[3] - places[0], places[1] - places[3]) == pytest.approx(0.5, abs=1e-3)
    assert plot._spread([], 1.0) == []
