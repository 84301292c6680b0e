"""The loss scale of a run that continues with another setting."""

import pytest

from hybrid_imagenet.training import restoring


@pytest.mark.parametrize(
    ("saved", "facts", "expected"),
    [
        ({"precision": "float32", "loss_scale": "dynamic"}, {"precision": "float32"}, True),
        ({"precision": "float32", "loss_scale": "1"}, {"precision": "float32"}, False),
        ({"precision": "float32", "loss_scale": "dynamic"}, {"precision": "mixed_float16"}, False),
        (
            {"precision": "mixed_float16", "loss_scale": "128"},
            {"precision": "mixed_float16"},
            False,
        ),
        ({"precision": "mixed_float16"}, {"precision": "mixed_float16"}, True),
        ({"precision": "float32"}, {"precision": "float32"}, False),
        ({}, {"precision": "float32"}, False),
    ],
)
def test_had_dynamic_scale_follows_from_precision_and_saved_setting(saved, facts, expected):
    assert restoring.had_dynamic_scale(saved, facts) is expected
