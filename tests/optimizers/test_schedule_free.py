import numpy as np
import pytest

from hybrid_imagenet import config
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.optimizers.kinds import ParameterKind
from hybrid_imagenet.optimizers.schedule_free import ScheduleFreeSGD
from tests.optimizers.support import Problem, Runner, assert_close
from tests.references.optimizers_reference import ScheduleFreeReference


def warmup(step):
    return 0.5 * min(1.0, step / 20)  # the first learning rate is 0


def falling(step):
    return warmup(step) * min(1.0, 1.0 - (step - 20) / 180)


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**15])
@pytest.mark.parametrize(("beta", "rate"), [(0.9, warmup), (0.5, warmup), (1.0, warmup), (0.9, falling)])
def test_200_steps_follow_the_oracle(beta, rate, loss_scale):
    problem = Problem()
    runner = Runner(ScheduleFreeSGD(0.5, beta=beta, weight_decay=0.01), problem, loss_scale)
    layers = problem.layers()
    oracle = ScheduleFreeReference(layers, beta=beta, decay=0.01)
    average = runner.optimizer.evaluated()
    for step in range(200):
        runner.step({"learning_rate": rate(step)})
        oracle.step(problem.grads([layer["w"] for layer in layers], step), rate(step))
        if step in (0, 1, 2, 199):
            assert_close(runner.weights(), layers)
            average.refresh()
            assert_close([x.numpy() for x in average.variables.values()], [{"w": x} for x in oracle.x])
    assert [float(t.numpy()) for t in runner.optimizer.totals] == pytest.approx([oracle.weight_sum, 0.5], rel=1e-5)


def test_two_steps_by_hand():
    # lr 1, g = 1 twice, beta 0.9: z = 0, -1; x = 0, then the mean of 0 and -1; y = .1 z + .9 x.
    runner = Runner(ScheduleFreeSGD(1.0, weight_decay=0.0), Problem(shapes=((1, 1),)), kinds=[ParameterKind.KERNEL])
    runner.variables[0].assign([[1.0]])
    for z, x in ((0.0, 0.0), (-1.0, -0.5)):
        runner.step(grads=[np.array([[1.0]])])
        np.testing.assert_allclose(runner.optimizer.fast[0].numpy(), [[z]], atol=1e-7)
        np.testing.assert_allclose(runner.weights()[0], [[0.1 * z + 0.9 * x]], rtol=1e-6)


def test_the_average_takes_the_place_of_the_weights_and_gives_it_back():
    runner = Runner(ScheduleFreeSGD(0.3), Problem())
    average = runner.optimizer.evaluated()
    start = runner.weights()
    average.refresh()
    for x, w in zip(average.variables.values(), start, strict=True):
        np.testing.assert_array_equal(x.numpy(), w)  # before the first update
    for _ in range(3):
        runner.step()
    trained = runner.weights()
    average.refresh()
    average.exchange()
    expected = [(y - 0.1 * z.numpy()) / 0.9 for y, z in zip(trained, runner.optimizer.fast, strict=True)]
    for variable, x, y in zip(runner.variables, expected, trained, strict=True):
        np.testing.assert_allclose(variable.numpy(), x, rtol=1e-5, atol=1e-7)
        assert np.abs(variable.numpy() - y).max() > 1e-4
    average.exchange()
    for variable, y in zip(runner.variables, trained, strict=True):
        np.testing.assert_array_equal(variable.numpy(), y)


def test_it_goes_on_from_its_state_in_another_optimizer():
    whole, first, second = (Runner(ScheduleFreeSGD(0.3), Problem()) for _ in range(3))
    for step in range(6):
        whole.step({"learning_rate": 0.1 * (step + 1)})
    for step in range(3):
        first.step({"learning_rate": 0.1 * (step + 1)})
    for a, b in zip(second.optimizer.variables, first.optimizer.variables, strict=True):
        a.assign(b.numpy())
    for a, b in zip(second.variables, first.weights(), strict=True):
        a.assign(b)
    second.count = 3
    for step in range(3, 6):
        second.step({"learning_rate": 0.1 * (step + 1)})
    for a, b in zip(whole.weights(), second.weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_that_are_loaded_after_the_state_was_made_are_where_it_starts():
    runner = Runner(ScheduleFreeSGD(0.0), Problem())
    loaded = [w + 1 for w in runner.weights()]
    for variable, w in zip(runner.variables, loaded, strict=True):
        variable.assign(w)
    runner.step()
    for z, y, w in zip(runner.optimizer.fast, runner.weights(), loaded, strict=True):
        np.testing.assert_array_equal(z.numpy(), w)
        np.testing.assert_allclose(y, w, rtol=1e-6)


def test_what_does_not_go_with_it():
    for flag in ("--ema_decay=0.9", "--model=module:function"):
        with pytest.raises(UserError, match=r"--optimizer=schedule_free"):
            config.resolve(["--optimizer=schedule_free", flag])
    with pytest.raises(ValueError, match="beta=0"):
        ScheduleFreeSGD(beta=0.0)
