"""The hybrid optimizer follows an oracle written from the paper, in both phases."""

import numpy as np
import pytest

from hybrid_imagenet.optimizers.hybrid import Hybrid, hybrid_step
from hybrid_imagenet.schedules import training_schedule
from tests.optimizers.support import KERNELS, Problem, Runner, assert_close, one_kernel_runner
from tests.references.optimizers_reference import HybridReference, layers_of, lu_bounds

EPOCH_STEPS = 25
WARMUP = 4
PEAK = 0.4
# The first step of the second phase.
SWITCH = EPOCH_STEPS * WARMUP


def schedule(ramp_epochs=0.0):
    return training_schedule.create(
        lr_schedule="exponential",
        lr=0.1,
        workers=4,
        base_batch=64,
        epochs=8,
        warmup_epochs=WARMUP,
        bounded_warmup=True,
        hybrid_ramp_epochs=ramp_epochs,
    )


def run_both(
    steps, optimizer_arguments, reference_arguments, ramp_epochs=0.0, momentum=0.9, excluded=None
):
    """Runs optimizer and oracle, and compares their weights at some of the steps.

    The weights at the position `excluded` are excluded from weight decay.
    """
    problem = Problem()
    options = {"weight_decay": 1e-4, "trust_coefficient": 0.001} | optimizer_arguments
    optimizer = Hybrid(PEAK, **options)
    layers = problem.layers()
    if excluded is not None:
        optimizer.exclude_from_weight_decay(var_names=[f"w{excluded}"])
        layers[excluded]["excluded"] = True
    runner = Runner(optimizer, problem, loss_scale=1024.0)
    oracle = HybridReference(
        layers,
        warmup_steps=SWITCH,
        epoch_steps=EPOCH_STEPS,
        peak=PEAK,
        **reference_arguments,
    )
    values = schedule(ramp_epochs)
    for step in range(steps):
        epoch_after = max(0, step - SWITCH) // EPOCH_STEPS
        runner.step(
            values(step / EPOCH_STEPS, (step + 1) / EPOCH_STEPS, 64) | {"momentum": momentum}
        )
        oracle.step(
            problem.grads([layer["w"] for layer in oracle.layers], step), PEAK * 0.9**epoch_after
        )
        if step + 1 in (1, 2, SWITCH - 1, SWITCH, SWITCH + 1, SWITCH + 25, steps):
            assert_close(runner.weights(), oracle.layers)
    return runner


# These three have each value of both once.
ALWAYS_RUN = [("continuous", "you"), ("reset", "larc"), ("rescale", "none")]
OTHERS = [
    (handover, lars)
    for handover in ("continuous", "reset", "rescale")
    for lars in ("you", "larc", "none")
    if (handover, lars) not in ALWAYS_RUN
]


@pytest.mark.parametrize(
    ("handover", "lars"),
    [*ALWAYS_RUN, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
)
def test_hybrid_200_steps_follow_the_oracle_through_the_switch(handover, lars):
    runner = run_both(
        200, {"handover": handover, "lars_variant": lars}, {"handover": handover, "lars": lars}
    )
    assert runner.function.experimental_get_tracing_count() == 1
    assert int(runner.optimizer.iterations) == 200


def test_hybrid_kernel_without_decay_follows_the_oracle_with_its_own_coefficient():
    run_both(SWITCH + 50, {"weight_decay": 0.5}, {"decay": 0.5}, excluded=3)


@pytest.mark.parametrize(("handover", "lars"), [("continuous", "you"), ("reset", "larc")])
def test_hybrid_lars_that_ramps_up_follows_the_oracle(handover, lars):
    """Uses eta 0.001, with which the rates of LARS are far from the peak."""
    arguments = (
        {"handover": handover, "lars_variant": lars},
        {"handover": handover, "lars": lars, "ramp_steps": 50},
    )
    run_both(SWITCH + 70, *arguments, ramp_epochs=2.0)


def sizes_of_updates(optimizer, steps, ramp_epochs=0.0, **hyper):
    """Returns the norm of each update with a constant gradient."""
    problem = Problem(shapes=((6, 5),))
    runner = one_kernel_runner(optimizer, problem.start[0])
    grads = problem.grads(problem.start, 0)
    values = schedule(ramp_epochs)
    sizes = []
    for step in range(steps):
        before = runner.weights()[0].astype(np.float64)
        runner.step(values(step / EPOCH_STEPS, (step + 1) / EPOCH_STEPS, 64) | hyper, grads)
        sizes.append(np.linalg.norm(runner.weights()[0] - before))
    return sizes


def test_hybrid_update_with_a_ramp_does_not_jump_after_the_warmup():
    """Compares the last AdaBound step with the first SGD step for a constant gradient."""
    growth = {}
    for ramp_epochs in (0.0, 2.0):
        optimizer = Hybrid(PEAK, momentum=0.0, trust_coefficient=1.0, weight_decay=0.0)
        sizes = sizes_of_updates(optimizer, SWITCH + 1, ramp_epochs, momentum=0.0)
        growth[ramp_epochs] = sizes[SWITCH] / sizes[SWITCH - 1]
    assert growth[2.0] == pytest.approx(1.0, rel=1e-3)
    assert abs(growth[0.0] - 1) > 0.5


@pytest.mark.parametrize(
    ("arguments", "reference_arguments"),
    [
        ({"bias_correction": False}, {"corrected": False}),
        ({"momentum": 0.0}, {"momentum": 0.0}),
        ({"decay_in_warmup": True, "weight_decay": 0.01}, {"decay_in_warmup": True, "decay": 0.01}),
        ({"decay_all": True, "weight_decay": 0.01}, {"decay_all": True, "decay": 0.01}),
        ({"adabound_lr": 4e-3}, {"alpha": 4e-3}),
    ],
)
def test_hybrid_options_for_open_points_of_the_paper_follow_the_oracle(
    arguments, reference_arguments
):
    run_both(SWITCH + 30, arguments, reference_arguments, momentum=arguments.get("momentum", 0.9))


def test_hybrid_first_step_equals_a_calculation_by_hand():
    # At t = 1/10 epoch of T = 1, with lr N = 2.4, the bounds are 0.24 and 2.4 + 10000 - 1000.
    # With g = 2: m = 0.2, v = 0.004, and s = 0.001 sqrt(0.001) / 0.1 = 3.1623e-4. Then
    # s / sqrt(v) = 0.005 is raised to 0.24, so w = 1 - 0.24 * 0.2.
    lower, upper = lu_bounds(0.1, 1.0, 2.4)
    # An upper bound below the lower one is raised to it.
    for highest in (upper, 0.1):
        runner = one_kernel_runner(Hybrid(2.4, trust_coefficient=0.001), [[1.0]])
        runner.step({"lower_bound": lower, "upper_bound": highest}, [np.array([[2.0]])])
        np.testing.assert_allclose(runner.weights()[0], [[1.0 - 0.24 * 0.2]], rtol=1e-6)
    runner.step({"phase": 1.0}, [np.array([[2.0]])])
    np.testing.assert_allclose(runner.optimizer.second_moment[0], [[0.004]], rtol=1e-6)


def test_hybrid_sgd_step_equals_a_calculation_by_hand():
    # From m = 0, the update is u = 0.1 * lr * ratio * g' with ratio = 0.001 |w| / (|g| + 0.5 |w|).
    # With a decay of 0.5, g' = 2 + 0.5 * 4 = 4.
    runner = one_kernel_runner(Hybrid(2.4, weight_decay=0.5, trust_coefficient=0.001), [[4.0]])
    runner.step({"phase": 1.0, "learning_rate": 100.0}, [np.array([[2.0]])])
    np.testing.assert_allclose(
        runner.weights()[0], [[4.0 - 0.1 * 100 * 0.001 * 4 / (2 + 2) * 4]], rtol=1e-6
    )


def test_hybrid_continuous_handover_does_not_jump():
    growth = {}
    for handover in ("continuous", "reset", "rescale"):
        optimizer = Hybrid(PEAK, handover=handover, lars_variant="none", weight_decay=0.0)
        sizes = sizes_of_updates(optimizer, SWITCH + 30, learning_rate=PEAK)
        last = sizes[SWITCH - 1]
        growth[handover] = (sizes[SWITCH] / last, sizes[-1] / last)
    np.testing.assert_allclose(growth["continuous"], (1.0, 1.0), rtol=1e-3)
    np.testing.assert_allclose(growth["rescale"], (10.0, 10.0), rtol=1e-3)
    assert growth["reset"][0] == pytest.approx(1.0, rel=1e-3)
    assert growth["reset"][1] == pytest.approx(10.0 * (1 - 0.9**30), rel=1e-3)


def test_hybrid_skipped_step_at_the_switch_keeps_the_handover():
    problem = Problem()
    plain = Runner(Hybrid(PEAK, trust_coefficient=0.001), problem)
    skipping = Runner(Hybrid(PEAK, trust_coefficient=0.001), problem)
    values = schedule()
    for step in range(SWITCH + 5):
        hyper = values(step / EPOCH_STEPS, (step + 1) / EPOCH_STEPS, 64)
        grads = problem.grads(problem.start, step)
        plain.step(hyper, grads)
        if step == SWITCH:
            before = skipping.weights()
            skipping.step(hyper, [g * np.nan for g in grads])
            for a, b in zip(before, skipping.weights(), strict=True):
                np.testing.assert_array_equal(a, b)
        skipping.step(hyper, grads)
    for a, b in zip(plain.weights(), skipping.weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_hybrid_zero_gradients_and_weights_give_finite_updates():
    problem = Problem()
    runner = Runner(Hybrid(PEAK, trust_coefficient=0.001), problem)
    runner.variables[0].assign(np.zeros(problem.start[0].shape))
    zeros = [np.zeros_like(w, np.float64) for w in problem.start]
    before = runner.weights()
    runner.step({"lower_bound": 0.0, "upper_bound": np.inf}, zeros)
    for a, b in zip(before, runner.weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    runner.step({"phase": 1.0, "lower_bound": PEAK, "upper_bound": PEAK}, zeros)
    grads = problem.grads(problem.start, 0)
    layers = layers_of(runner.weights(), KERNELS)
    runner.step({}, grads)
    assert all(np.isfinite(w).all() for w in runner.weights())
    # With |w| = 0 the ratio is 1, so the layer moves by (1 - momentum) lr g.
    np.testing.assert_allclose(
        runner.weights()[0], layers[0]["w"] - 0.1 * PEAK * grads[0], rtol=1e-5
    )


def test_hybrid_state_is_float32():
    optimizer = Hybrid(0.3, 0.8)
    assert optimizer.learning_rate == pytest.approx(0.3)
    runner = Runner(optimizer, Problem())
    assert {v.dtype for v in optimizer.first_moment + optimizer.second_moment} == {"float32"}
    assert runner.optimizer.hyperparameters["momentum"] == pytest.approx(0.8)


def test_hybrid_step_function_equals_the_optimizer():
    """Readers learn the method from `hybrid_step`, so it must equal the optimizer."""
    start = np.random.default_rng(0).normal(0, 0.5, (5, 4))
    runner = one_kernel_runner(Hybrid(PEAK, weight_decay=1e-4, trust_coefficient=0.001), start)
    options = runner.optimizer.options
    values = schedule()
    w = np.asarray(runner.weights()[0], np.float64)
    m = np.zeros_like(w)
    v = np.zeros_like(w)
    for step in range(SWITCH + 30):
        hyperparameters = values(step / EPOCH_STEPS, (step + 1) / EPOCH_STEPS, 64)
        warms_up = step < SWITCH
        (grad,) = runner.problem.grads([w], step)
        w, m, v = hybrid_step(
            w,
            grad,
            m,
            v,
            t=step + 1,
            warms_up=warms_up,
            lower=hyperparameters["lower_bound"],
            upper=hyperparameters["upper_bound"],
            handover=PEAK if step == SWITCH else 1.0,
            learning_rate=hyperparameters["learning_rate"],
            momentum=hyperparameters["momentum"],
            options=options,
        )
        runner.step(hyperparameters)
    np.testing.assert_allclose(runner.weights()[0], w, rtol=1e-5, atol=1e-6)
