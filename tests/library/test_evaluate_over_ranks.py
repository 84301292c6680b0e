"""`hi.evaluate` over ranks."""

import keras
import numpy as np
import pytest

import hybrid_imagenet as hi
from hybrid_imagenet.library import metric_sums
from tests.library import evaluated


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
        assert "before evaluate the ranks differ in weights" in rank["other weights"]


def test_evaluate_in_one_process_equals_evaluate_of_keras():
    model = evaluated.compiled("accuracy", evaluated.Largest())
    x, y, _ = evaluated.examples(0, evaluated.EXAMPLES)
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    assert hi.evaluate(model, x, y, verbose=0) == expected


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
