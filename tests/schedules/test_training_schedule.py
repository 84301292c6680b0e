"""Learning rate schedules follow formulas written from the papers."""

import inspect
import math
from fractions import Fraction

import pytest

from hybrid_imagenet.schedules import for_fit, training_schedule
from tests.references import schedules_reference as reference
from tests.references.optimizers_reference import lu_bounds

# Steps in an epoch.
STEPS = 37


def create(name, **arguments):
    values = {
        "lr": 0.1,
        "epochs": 90,
        "workers": 24,
        "base_batch": 24 * 256,
        "lr_scaling": "workers",
    }
    return training_schedule.create(lr_schedule=name, **(values | arguments))


def boundaries(epochs=90):
    """Yields the step at every epoch boundary and one step on each side."""
    for epoch in range(epochs + 1):
        yield from (
            s
            for s in (epoch * STEPS - 1, epoch * STEPS, epoch * STEPS + 1)
            if 0 <= s < epochs * STEPS
        )


def rate(schedule, step, batch=24 * 256):
    return schedule(step / STEPS, (step + 1) / STEPS, batch)["learning_rate"]


G = {"warmup_epochs": 5, "warmup_start_lr": 0.1, "lr_scaling": "batch", "lr_steps": (30, 60, 80)}
MLPERF = {
    "lr": 17.0,
    "lr_scaling": "none",
    "warmup_epochs": 5,
    "warmup_start_lr": 0.0,
    "epochs": 42,
}
CASES = {
    "gradual warmup": (create("step", **G), lambda e: reference.goyal(e, Fraction(24, 10)), 90),
    "poly": (create("poly", **MLPERF), lambda e: reference.mlperf(e, 17, 5, 42), 42),
    "cosine": (create("cosine", **MLPERF), lambda e: reference.cosine(e, 17, 5, 42), 42),
    "constant": (create("constant"), lambda e: Fraction(24, 10), 90),
    "flash_a": (create("flash_a", warmup_epochs=34), reference.mikami_a, 90),
    "flash_a, 12": (create("flash_a", warmup_epochs=12), lambda e: reference.mikami_a(e, 12), 90),
    "flash_b": (create("flash_b", warmup_epochs=5), reference.mikami_b, 90),
    "mlperf": (create("mlperf", **MLPERF), lambda e: reference.mlperf(e, 17, 5, 42), 42),
}


@pytest.mark.parametrize("case", CASES)
def test_schedule_around_every_epoch_boundary_equals_its_oracle(case):
    schedule, oracle, epochs = CASES[case]
    for step in boundaries(epochs):
        assert rate(schedule, step) == pytest.approx(
            float(oracle(Fraction(step, STEPS))), rel=1e-9, abs=1e-12
        ), step


@pytest.mark.parametrize("exponent", training_schedule.EXPONENTS)
def test_schedule_of_hybrid_in_each_reading_of_the_exponent_equals_its_oracle(exponent):
    schedule = create(
        "exponential", warmup_epochs=10, bounded_warmup=True, lr_decay_exponent=exponent
    )
    for step in boundaries():
        values = schedule(step / STEPS, (step + 1) / STEPS, 24 * 256)
        if step < 10 * STEPS:
            lower, upper = lu_bounds((step + 1) / STEPS, 10, 2.4)
            assert values["phase"] == 0
            assert values["learning_rate"] == pytest.approx(2.4)
            assert values["lower_bound"] == pytest.approx(lower, rel=1e-12)
            assert values["upper_bound"] == pytest.approx(max(upper, lower), rel=1e-9)
        else:
            expected = reference.lu(Fraction(step, STEPS), Fraction(24, 10), 10, exponent)
            assert values["phase"] == 1
            assert values["learning_rate"] == pytest.approx(float(expected), rel=1e-9)
            assert (values["lower_bound"], values["upper_bound"]) == pytest.approx((2.4, 2.4))


def test_schedule_bounds_are_equal_in_the_last_step_of_the_warmup():
    schedule = create("exponential", warmup_epochs=10, bounded_warmup=True)
    for end in (10.0, 10.004):
        values = schedule(9.99, end, 24 * 256)
        assert values["phase"] == 0
        assert values["lower_bound"] == values["upper_bound"] == pytest.approx(2.4)
    assert schedule(10.0, 10.1, 24 * 256)["phase"] == 1


def test_schedule_bounds_with_bound_time_epoch_use_whole_epochs():
    schedule = create(
        "exponential", warmup_epochs=10, bounded_warmup=True, adabound_bound_time="epoch"
    )
    for start, number in ((0.0, 1), (0.99, 1), (4.0, 5), (9.5, 10)):
        expected = lu_bounds(number, 10, 2.4)
        values = schedule(start, start + 0.01, 24 * 256)
        assert (values["lower_bound"], values["upper_bound"]) == pytest.approx(expected, rel=1e-9)


def test_schedule_of_hybrid_without_warmup_begins_with_sgd():
    values = create("exponential", warmup_epochs=0, bounded_warmup=True)(0.0, 0.1, 24 * 256)
    assert values["phase"] == 1
    assert values["learning_rate"] == pytest.approx(2.4)


def test_schedule_after_a_fractional_warmup_counts_epochs_from_its_end():
    schedule = create("exponential", warmup_epochs=2.5, bounded_warmup=True)
    values = [schedule(e, e + 0.1, 24 * 256)["learning_rate"] for e in (2.5, 3.4, 3.5, 4.5)]
    assert values == pytest.approx([2.4, 2.4, 2.16, 1.944])


def test_schedule_rates_and_bounds_scale_with_the_batch():
    hybrid = create("exponential", warmup_epochs=10, bounded_warmup=True)
    doubled = hybrid(3.0, 3.5, 2 * 24 * 256)
    assert doubled["lower_bound"] == pytest.approx(2 * hybrid(3.0, 3.5, 24 * 256)["lower_bound"])
    assert hybrid(10.0, 10.5, 2 * 24 * 256)["learning_rate"] == pytest.approx(4.8)
    goyal = create("step", **G)
    assert goyal(20.0, 20.1, 8192)["learning_rate"] == pytest.approx(3.2)
    unscaled = create("poly", **MLPERF)
    assert (
        unscaled(5.0, 5.1, 999)["learning_rate"]
        == unscaled(5.0, 5.1, 9999)["learning_rate"]
        == 17.0
    )
    flash = create("flash_b", warmup_epochs=5)
    assert flash(6.0, 6.1, 34816)["learning_rate"] == flash(6.0, 6.1, 121856)["learning_rate"]


PRINTED = [
    (32768, 0.9),
    (34816, 0.9059),
    (55296, 0.9407),
    (65536, 0.95),
    (69632, 0.9529),
    (87040, 0.9624),
    (121856, 0.9731),
]


@pytest.mark.parametrize(("batch", "momentum"), PRINTED)
def test_schedule_momentum_by_noise_scale_equals_the_published_values(batch, momentum):
    schedule = create("flash_b", momentum_rule="noise_scale")
    value = schedule(6.0, 6.1, batch)["momentum"]
    assert value == pytest.approx(momentum, abs=5e-5)
    # The noise scale of Smith and Le, g = lr N / (B (1 - m)), equals the one at batch 32768 and
    # momentum 0.9.
    assert 1 / (batch * (1 - value)) == pytest.approx(1 / (32768 * 0.1))


def test_schedule_momentum_by_inverse_noise_scale_and_its_lower_limit():
    schedule = create("flash_b", momentum_rule="noise_scale_inverse")
    assert schedule(6.0, 6.1, 65536)["momentum"] == pytest.approx(0.8)
    assert create("flash_b", momentum_rule="noise_scale")(6.0, 6.1, 1024)["momentum"] == 0.0


def test_schedule_warmup_never_starts_above_its_end():
    schedule = create("constant", lr=0.01, lr_scaling="none", warmup_epochs=2, warmup_start_lr=0.1)
    assert [schedule(e, e, 256)["learning_rate"] for e in (0, 1, 2)] == pytest.approx([0.01] * 3)


FIT_FORMULAS = {
    "constant": (for_fit.constant, {}, lambda e: 2.0),
    "cosine": (
        for_fit.cosine,
        {"final": 0.5},
        lambda e: 0.5 + 1.5 * (1 + math.cos(math.pi * (e - 2) / 8)) / 2,
    ),
    "polynomial": (
        for_fit.polynomial,
        {"power": 3, "final": 0.5},
        lambda e: 0.5 + 1.5 * (1 - (e - 2) / 8) ** 3,
    ),
    "step": (
        for_fit.step,
        {"at": (4, 6), "factor": 0.5},
        lambda e: 2.0 * 0.5 ** ((e >= 4) + (e >= 6)),
    ),
    "exponential": (
        for_fit.exponential,
        {"decay": 0.8},
        lambda e: 2.0 * 0.8 ** math.floor(e - 2),
    ),
}


@pytest.mark.parametrize(("create", "options", "formula"), FIT_FORMULAS.values(), ids=FIT_FORMULAS)
def test_schedule_for_fit_follows_the_formula_of_its_docstring(create, options, formula):
    warmup = {"warmup_epochs": 2, "warmup_start_lr": 0.4, "momentum": 0.8}
    schedule = create(2.0, 10, **options, **warmup)
    for epoch in (0, 1.5):
        assert schedule.learning_rate_at(epoch) == pytest.approx(0.4 + 1.6 * epoch / 2)
    for epoch in (2, 3.99, 4, 5.5, 6, 9.5):
        assert schedule.learning_rate_at(epoch) == pytest.approx(formula(epoch))
        assert schedule(epoch, epoch, 1)["momentum"] == 0.8


@pytest.mark.parametrize("peak", [0.001, 5.0])
def test_schedule_for_fit_rises_to_any_peak(peak):
    schedule = for_fit.cosine(peak, 8, warmup_epochs=2)
    assert [schedule(e, e, 1)["learning_rate"] for e in (0, 1, 2)] == pytest.approx(
        [0, peak / 2, peak]
    )


@pytest.mark.parametrize("name", training_schedule.SCHEDULES)
def test_schedule_rates_are_finite_to_the_last_step_and_beyond(name):
    for bounded in (False, True):
        schedule = create(name, epochs=10, warmup_epochs=10, bounded_warmup=bounded)
        for epoch in (0.0, 9.99, 10.0, 10.01):
            values = schedule(epoch, epoch + 0.01, 6144)
            assert math.isfinite(values["learning_rate"])
            assert values["learning_rate"] >= 0


def test_create_with_unknown_names_raises():
    with pytest.raises(ValueError, match="linear"):
        create("linear")
    with pytest.raises(ValueError, match="T-2"):
        create("exponential", lr_decay_exponent="T-2")


def test_create_records_all_its_arguments():
    arguments = {
        "lr_schedule": "poly",
        "lr": 0.2,
        "epochs": 8.0,
        "workers": 3,
        "base_batch": 96,
        "lr_scaling": "batch",
        "warmup_epochs": 2.0,
        "bounded_warmup": True,
        "warmup_start_lr": 0.01,
        "momentum": 0.8,
        "momentum_rule": "noise_scale",
        "adabound_bound_time": "epoch",
        "adabound_beta2": 0.99,
        "hybrid_ramp_epochs": 1.5,
        "lr_power": 3.0,
    }
    parameters = inspect.signature(training_schedule.create).parameters
    assert set(arguments) - {"lr_power"} == set(parameters) - {"options"}
    schedule = training_schedule.create(**arguments)
    assert list(schedule.arguments.items()) == list(arguments.items())
    copy = training_schedule.create(**schedule.arguments)
    assert copy(3.0, 3.1, 96) == schedule(3.0, 3.1, 96)
