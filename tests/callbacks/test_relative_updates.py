"""|update| / |weights| in the records: from the last step of an epoch, for any optimizer."""

import keras
import numpy as np
import pytest

from hybrid_imagenet import optimizers
from hybrid_imagenet.callbacks.relative_updates import RelativeUpdates
from hybrid_imagenet.training_run import StepSpan
from tests.support.fake_run import FakeRun, attach


def train(log, inner, variables, epochs, steps):
    """Runs steps with constant gradients.

    Returns the record of each epoch, and the weights before and after its last step.
    """
    records = []
    snapshots = []
    for epoch in range(epochs):
        for step in range(steps):
            log.run.span = StepSpan(epoch + step / steps, epoch + (step + 1) / steps, 1)
            log.on_train_batch_begin(step)
            before = [v.numpy().copy() for v in variables]
            inner.apply(
                [np.full(v.shape, 0.1 * (i + 1), np.float32) for i, v in enumerate(variables)]
            )
            log.on_train_batch_end(step)
        records.append({"epoch": epoch + 1})
        log.on_epoch_end(epoch, records[-1])
        snapshots.append((before, [v.numpy().copy() for v in variables]))
    return records, snapshots


@pytest.mark.parametrize(
    ("name", "options", "phase"),
    [
        ("sgd", {}, 1),
        ("lars", {"trust_coefficient": 0.001}, 1),
        ("hybrid", {"trust_coefficient": 0.001}, 0),
        ("hybrid", {"trust_coefficient": 0.001}, 1),
        ("muon", {}, 1),
    ],
)
def test_relative_updates_record_the_last_step_of_an_epoch(name, options, phase):
    variables = [
        keras.Variable(np.linspace(1, 2, 12, dtype=np.float32).reshape(3, 4), name="first"),
        keras.Variable(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2), name="second"),
        keras.Variable(np.ones(3, np.float32), name="bias"),
    ]
    inner = optimizers.create(name, learning_rate=0.05, **options)
    inner.build(variables)
    inner.hyperparameters.assign({"phase": float(phase), "lower_bound": 0.0, "upper_bound": 1.0})
    log = attach(RelativeUpdates([variables[i] for i in inner.kernel_indices()]), FakeRun())
    records, snapshots = train(log, inner, variables, epochs=2, steps=3)
    for record, (before, after) in zip(records, snapshots, strict=True):
        expected = [
            np.linalg.norm(b - a) / np.linalg.norm(b)
            for b, a in zip(before[:2], after[:2], strict=True)
        ]
        assert list(record) == ["epoch", "relative_updates"]
        assert list(record["relative_updates"]) == [v.path for v in variables[:2]]
        np.testing.assert_allclose(list(record["relative_updates"].values()), expected, rtol=1e-3)
        assert min(expected) > 1e-6
    assert records[0] != records[1]


def test_relative_updates_without_a_measurement_record_nothing():
    kernel = keras.Variable(np.ones((2, 2), np.float32), name="kernel")
    log = attach(RelativeUpdates([kernel]), FakeRun())
    log.run.span = StepSpan(0.0, 0.5, 1)
    log.on_train_batch_begin(0)
    log.on_train_batch_end(0)
    # This is a validation within the epoch, whose last step was not measured.
    logs = {"epoch": 0.5}
    log.on_epoch_end(0, logs)
    assert logs == {"epoch": 0.5}
