"""Decoupled weight decay in each optimizer that supports it."""

import pytest

from hybrid_imagenet.optimizers.hybrid import Hybrid
from hybrid_imagenet.optimizers.lars import LARS
from hybrid_imagenet.optimizers.sgd import SGD
from tests.optimizers.support import Problem, Runner, assert_close, follow
from tests.references import optimizers_reference as reference
from tests.references.short_reference import decay_decoupled

PEAK = 0.1
DECAY = 0.02
STEPS = {
    "sgd": (SGD, {}, reference.sgd_step),
    "nesterov": (
        SGD,
        {"nesterov": True},
        lambda *a, **k: reference.sgd_step(*a, nesterov=True, **k),
    ),
    "lars": (
        LARS,
        {"trust_coefficient": 0.02},
        lambda *a, **k: reference.lars_step(*a, trust_coefficient=0.02, **k),
    ),
}


@pytest.mark.parametrize("case", STEPS)
def test_decoupled_decay_200_steps_follow_the_oracle(case):
    cls, options, oracle = STEPS[case]

    def decays_first(layer, grad, step, rate):
        decay_decoupled(layer, DECAY, rate, PEAK)
        oracle(layer, grad, rate, 0.9, decay=0.0)

    optimizer = cls(PEAK, 0.9, weight_decay=DECAY, decoupled_decay=True, **options)
    follow(
        Runner(optimizer, Problem(), loss_scale=2.0**15),
        lambda step: PEAK * (1 - step / 250),
        decays_first,
    )


@pytest.mark.parametrize("in_warmup", [False, True])
def test_decoupled_decay_of_hybrid_applies_in_the_same_phases(in_warmup):
    problem = Problem()
    optimizer = Hybrid(
        PEAK,
        weight_decay=DECAY,
        decoupled_decay=True,
        decay_in_warmup=in_warmup,
        trust_coefficient=0.001,
    )
    runner = Runner(optimizer, problem)
    layers = problem.layers()
    oracle = reference.HybridReference(layers, warmup_steps=20, epoch_steps=5, peak=PEAK, decay=0.0)
    for step in range(60):
        warmup = step < 20
        rate = PEAK if warmup else PEAK * 0.95 ** (step - 20)
        lower, upper = reference.lu_bounds((step + 1) / 5, 4, PEAK) if warmup else (PEAK, PEAK)
        runner.step(
            {
                "learning_rate": rate,
                "lower_bound": lower,
                "upper_bound": upper,
                "phase": float(not warmup),
            }
        )
        grads = problem.grads([layer["w"] for layer in layers], step)
        if in_warmup or not warmup:
            for layer in layers:
                decay_decoupled(layer, DECAY, rate, PEAK)
        oracle.step(grads, rate)
    assert_close(runner.weights(), layers)
