"""The trust coefficient that `fit` sets for LARS and Hybrid."""

import math
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import hybrid_imagenet as hi
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers import trust_coefficient
from tests.library import models

EXAMPLES = 16
PEAK = 0.4


def tuned(batch, peak, momentum=0.9, factor=1.0):
    """Returns the tuned relative step, divided by lr c / (1 - m).

    MLPerf's smallest tuned point has learning rate 7.4, momentum 0.9 and coefficient 0.001 at 1,632
    images, and smaller batches follow the square root.
    """
    step = 7.4 * 0.001 / (1 - 0.9) * math.sqrt(batch / 1632)
    return step * (1 - momentum) / (peak * factor)


def fit(
    inner,
    data=None,
    *,
    epochs=1,
    callbacks=(),
    batch_size=8,
    shuffle=True,
    run_eagerly=True,
    **wrapped,
):
    """Trains the small model and returns it."""
    optimizer = hi.DistributedOptimizer(inner, **wrapped)
    # The callback sets the coefficient before the first step, so few steps need no graph.
    model = models.compiled(optimizer, run_eagerly=run_eagerly)
    x, y = data if data is not None else (*models.vectors(EXAMPLES),)
    arguments = {"epochs": epochs, "shuffle": shuffle, "verbose": 0}
    if y is not None:
        arguments["batch_size"] = batch_size
    model.fit(x, y, callbacks=[*hi.callbacks.default_callbacks(), *callbacks], **arguments)
    return model


def test_lars_trust_coefficient_gives_the_tuned_step_at_the_peak(capfd):
    schedule = hi.schedules.polynomial(PEAK, 9, warmup_epochs=2.25)
    model = fit(hi.optimizers.LARS(), schedule=schedule)
    inner = model.optimizer.inner
    assert inner.trust_coefficient == pytest.approx(tuned(8, PEAK))
    x, y = models.vectors(EXAMPLES)
    model.fit(x, y, 4, 1, 0, hi.callbacks.default_callbacks())
    assert inner.trust_coefficient == pytest.approx(tuned(8, PEAK))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("lars: ")]
    assert line.startswith(
        f"lars: trust_coefficient={tuned(8, PEAK):.4g} for a global batch of 8 and a learning rate"
        " of 0.4: "
    )


def test_trust_coefficient_of_a_shuffled_py_dataset_with_checkpoint_uses_its_batch_size(tmp_path):
    class Batches(keras.utils.PyDataset):
        batch_size = 8

        def __len__(self):
            return 2

        def __getitem__(self, index):
            x, y = models.vectors(EXAMPLES)
            return x[8 * index : 8 * index + 8], y[8 * index : 8 * index + 8]

    checkpoint = hi.callbacks.Checkpoint(tmp_path / "checkpoints")
    model = fit(hi.optimizers.LARS(PEAK), (Batches(), None), callbacks=[checkpoint])
    assert model.optimizer.inner.trust_coefficient == pytest.approx(tuned(8, PEAK))


def test_lars_trust_coefficient_that_is_passed_is_kept(capfd):
    model = fit(hi.optimizers.LARS(PEAK, trust_coefficient=0.02))
    assert model.optimizer.inner.trust_coefficient == 0.02
    assert "trust_coefficient=" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("inner", "coefficient"),
    [
        # The velocity goes on as an average, in which the gradient has the factor 1 - momentum.
        (lambda: hi.optimizers.Hybrid(), tuned(8, PEAK * 0.7, factor=0.1)),
        (lambda: hi.optimizers.Hybrid(handover="reset"), tuned(8, PEAK * 0.7)),
        (lambda: hi.optimizers.Hybrid(handover="reset", lars_variant="larc"), tuned(8, 1.0)),
        (lambda: hi.optimizers.Hybrid(lars_variant="none"), None),
    ],
    ids=["continuous", "reset", "larc", "none"],
)
def test_hybrid_trust_coefficient_gives_the_tuned_step_after_warmup_and_ramp(inner, coefficient):
    schedule = hi.schedules.hybrid(
        PEAK, 4, warmup_epochs=0.5, lr_decay=0.7, hybrid_ramp_epochs=1.25
    )
    actual = fit(inner(), schedule=schedule).optimizer.inner.trust_coefficient
    assert actual == (coefficient if coefficient is None else pytest.approx(coefficient))


def test_trust_coefficient_without_schedule_uses_learning_rate_and_accumulation():
    model = fit(hi.optimizers.LARS(0.2, momentum=0.5), gradient_accumulation_steps=2)
    assert model.optimizer.inner.trust_coefficient == pytest.approx(tuned(16, 0.2, momentum=0.5))


def test_trust_coefficient_with_a_user_schedule_uses_its_peak():
    def schedule(start, end, batch):
        return {"learning_rate": 0.3 if 1.2 < start < 1.4 else 0.1, "momentum": 0.0}

    model = fit(hi.optimizers.LARS(), epochs=2, schedule=schedule)
    assert model.optimizer.inner.trust_coefficient == pytest.approx(tuned(8, 0.3, momentum=0.0))


def test_trust_coefficient_uses_the_batch_of_a_dataset_and_of_an_exact_order():
    x, y = models.vectors(EXAMPLES)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(5).prefetch(1)
    actual = fit(hi.optimizers.LARS(PEAK), (dataset, None)).optimizer.inner.trust_coefficient
    assert actual == pytest.approx(tuned(5, PEAK))
    order = hi.order.ExactBatchSampler(EXAMPLES, 4)
    ordered = hi.order.keras_dataset(order, lambda indices: (x[indices], y[indices]))
    model = fit(
        hi.optimizers.LARS(PEAK), (ordered, None), callbacks=[ordered.counter], shuffle=False
    )
    assert model.optimizer.inner.trust_coefficient == pytest.approx(tuned(4, PEAK))


def test_trust_coefficient_for_an_unknown_batch_is_rejected_with_a_value():
    x, y = models.vectors(EXAMPLES)

    def batches():
        yield from [(x[:8], y[:8]), (x[8:], y[8:])]

    model = models.compiled(hi.DistributedOptimizer(hi.optimizers.LARS(PEAK)), run_eagerly=True)
    with pytest.raises(UserError, match="do not have a known one") as caught:
        model.fit(
            batches(), steps_per_epoch=2, verbose=0, callbacks=hi.callbacks.default_callbacks()
        )
    assert f"Pass trust_coefficient={tuned(1, PEAK):.3g} * batch**0.5, which suits" in str(
        caught.value
    )


def test_trust_coefficient_for_a_learning_rate_of_zero_is_rejected():
    with pytest.raises(UserError, match=r"learning rate is 0 in all steps.* Raise the learning"):
        fit(hi.optimizers.LARS(0.0))


@pytest.mark.parametrize("wrapped", [True, False])
def test_trust_coefficient_without_the_callbacks_is_rejected_with_a_value(wrapped):
    optimizer = hi.optimizers.Hybrid(PEAK)
    if wrapped:
        optimizer = hi.DistributedOptimizer(optimizer)
    x, y = models.vectors(EXAMPLES)
    with pytest.raises(UserError, match="but other loops do not") as caught:
        models.compiled(optimizer, run_eagerly=True).fit(x, y, verbose=0)
    coefficient = tuned(1, PEAK, factor=0.1)
    assert f"Pass trust_coefficient={coefficient:.3g} * batch**0.5" in str(caught.value)


def test_trust_coefficient_of_a_saved_model_is_kept_at_another_batch(tmp_path):
    fit(hi.optimizers.LARS(PEAK)).save(tmp_path / "model.keras")
    model = hi.load_model(tmp_path / "model.keras")
    x, y = models.vectors(EXAMPLES)
    model.fit(x, y, 2, 1, 0, hi.callbacks.default_callbacks())
    assert model.optimizer.inner.get_config()["trust_coefficient"] == pytest.approx(tuned(8, PEAK))


def test_trust_coefficient_of_a_checkpoint_is_restored_unless_one_is_passed(tmp_path, capfd):
    def trained(epochs, **options):
        checkpoint = hi.callbacks.Checkpoint(tmp_path / "run")
        inner = hi.optimizers.LARS(PEAK, **options)
        fit(inner, epochs=epochs, batch_size=16 // epochs, callbacks=[checkpoint])
        return inner.trust_coefficient

    first = trained(1)
    assert first == pytest.approx(tuned(16, PEAK))
    capfd.readouterr()
    assert trained(2) == first
    assert "trust_coefficient=" not in capfd.readouterr().err
    assert trained(4, trust_coefficient=0.02) == 0.02


def test_trust_coefficient_uses_all_ranks_batches_or_the_value_of_rank_0(capfd):
    def coefficient_on_ranks(*others):
        inner = hi.optimizers.LARS(PEAK)
        ranks = mock.Mock(rank=1, allgather_object=lambda facts: [*others, facts])
        with mock.patch.object(trust_coefficient, "batch_size", return_value=8):
            trust_coefficient.set_trust_coefficient(inner, 1, ranks)
        return inner.trust_coefficient

    assert coefficient_on_ranks([None, 24, PEAK, 0.9]) == pytest.approx(tuned(32, PEAK))
    assert coefficient_on_ranks([0.5, 24, PEAK, 0.9]) == 0.5
    with pytest.raises(UserError, match="known one"):
        coefficient_on_ranks([None, None, PEAK, 0.9])
    # Only rank 0 prints.
    assert "trust_coefficient=" not in capfd.readouterr().err


def test_lars_with_defaults_trains_but_not_with_a_fixed_coefficient():
    random = np.random.default_rng(0)
    x = random.normal(size=(512, 6)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)

    def last_loss(**options):
        keras.utils.set_random_seed(0)
        schedule = hi.schedules.cosine(0.02, 10)
        inner = hi.optimizers.LARS(**options)
        model = fit(inner, (x, y), epochs=10, batch_size=32, schedule=schedule, run_eagerly=False)
        return model.history.history["loss"][-1]

    # The losses were 0.38 and 0.99 when this test was written, and about 1 before training.
    assert last_loss() < 0.5
    assert last_loss(trust_coefficient=0.001) > 0.9
