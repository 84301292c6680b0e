"""`hi.evaluate` over ranks."""

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.callbacks import distributed_evaluation, metric_sums
from tests.library import evaluated, models


def alone(model, x, y, **arguments):
    return model.evaluate(x, y, return_dict=True, **arguments)


@pytest.mark.filterwarnings("ignore")
def test_evaluate_on_unequal_ranks_equals_one_process_with_all_examples(pools):
    first, second = pools[2].call(evaluated.on_rank)
    for name in ("results", "weighted", "second rank empty"):
        model = evaluated.compiled(*evaluated.vector_metrics(), weighted=name == "weighted")
        expected = evaluated.results(model, 0, evaluated.EXAMPLES, alone)
        assert first[name] == second[name]
        assert list(first[name]) == list(expected)
        for key, value in expected.items():
            np.testing.assert_allclose(first[name][key], value, rtol=1e-6, err_msg=key)
    assert first["declared"] == pytest.approx(first["own largest"] + second["own largest"])
    for rank in (first, second):
        assert rank["one rank fails"].startswith("rank 1 on ")
        assert "evaluate failed: ValueError: " in rank["one rank fails"]
        assert rank["both ranks empty"].startswith("evaluate: no rank has a batch.")
        assert "'largest' of class Largest may not be sums" in rank["not a sum"]
        assert "mean output of the model's test_step is not the result" in rank["not a metric"]
        assert "before evaluate the ranks differ in weights (" in rank["other weights"]
        assert rank["progress"] == [models.STEPS] * 2
    check_merged_statistics(first["statistics"], second["statistics"])


def check_merged_statistics(first, second):
    """Checks that a rank's own statistics are rejected, and that those of all ranks are merged."""
    for rank in (first, second):
        assert "the ranks differ in weights that are not trained (" in rank["error"]
        assert "call hybrid_imagenet.merge_batch_norm_statistics(model)" in rank["error"]
    means, variances = np.array([first["before"], second["before"]]).swapaxes(0, 1)
    assert not np.allclose(means[0], means[1])
    merged = [means.mean(0), (variances + means**2).mean(0) - means.mean(0) ** 2]
    np.testing.assert_allclose(first["after"], merged, rtol=1e-5, atol=1e-7)
    assert first["after"] == second["after"]
    assert first["loss"] == second["loss"]


def test_evaluate_in_one_process_equals_evaluate_of_keras():
    model = evaluated.compiled("accuracy", evaluated.Largest())
    x, y, _ = evaluated.examples(0, evaluated.EXAMPLES)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert hi.evaluate(model, x, y, verbose=0) == expected
    # As with Keras, the batch size is the next argument.
    calls = CountCalls()
    hi.evaluate(model, x, y, 4, 0, callbacks=[calls])
    assert calls.count == -(-evaluated.EXAMPLES // 4)


class CountCalls(keras.callbacks.Callback):
    """Counts the batches of an evaluation."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def on_test_batch_end(self, batch, logs=None):
        self.count += 1


@pytest.mark.parametrize(
    ("inputs", "label", "reason"),
    [
        (2, 0, "Input 0 with name"),
        (6, 9, "Received a label value of 9 which is outside the valid range of [0, 3)."),
    ],
    ids=["Keras", "TensorFlow"],
)
def test_reason_of_an_error_is_the_line_that_says_what_is_wrong(inputs, label, reason):
    model = evaluated.compiled()
    with pytest.raises(Exception) as caught:
        model.evaluate(np.ones((4, inputs), np.float32), np.full(4, label), verbose=0)
    line = distributed_evaluation.reason_of(caught.value)
    assert reason in line
    assert "\x1b" not in line
    assert "\n" not in line


def test_reason_of_a_short_error_is_its_text():
    assert distributed_evaluation.reason_of(ValueError("one line")) == "one line"
    assert distributed_evaluation.reason_of(ValueError()) == ""


@pytest.mark.parametrize(
    ("metric", "is_summable"),
    [
        (keras.metrics.AUC(), True),
        (keras.metrics.R2Score(), True),
        (evaluated.Perplexity(), True),
        (evaluated.Largest(), False),
        (evaluated.Largest(sums_over_ranks=True), True),
    ],
    ids=["Keras", "Keras with several states", "derived", "own", "declared"],
)
def test_has_summable_state_is_false_only_for_metrics_without_sums(metric, is_summable):
    assert metric_sums.has_summable_state(metric) == is_summable


class OwnLoss(keras.Sequential):
    """Records its loss in its own metric, as in Keras's guide to `train_step`."""

    def __init__(self):
        super().__init__([keras.Input((2,)), keras.layers.Dense(1)])
        self.mean_loss = keras.metrics.Mean(name="loss")

    @property
    def metrics(self):
        return [self.mean_loss]


@pytest.mark.parametrize(("losses", "results"), [([], {}), ([1.0, 3.0], {"loss": 2.0})])
def test_loss_that_a_metric_of_the_user_records_is_a_result(losses, results):
    model = OwnLoss()
    model.compile(loss="mse")
    for loss in losses:
        model.mean_loss.update_state(loss)
    assert metric_sums.metric_results(model) == results
