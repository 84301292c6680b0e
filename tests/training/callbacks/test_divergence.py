import math

import pytest

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.numerics import schedules
from hybrid_imagenet.resilience.rollback import DivergedError
from hybrid_imagenet.training.callbacks.divergence import DivergenceGuard


def look(guard, losses):
    for step, loss in enumerate(losses, 1):
        guard.on_train_batch_end(step, {"train_loss": loss})


def test_the_running_value_follows_and_the_good_step_is_the_one_before():
    state = RunState()
    guard = DivergenceGuard(state, 2.0, lambda own: own)
    guard.on_train_batch_end(1, {"position": 0.1})  # nothing was fetched
    assert state.running_loss is None
    look(guard, [4.0, 5.0, 8.0])
    assert state.running_loss == pytest.approx(0.9 * (0.9 * 4 + 0.1 * 5) + 0.1 * 8)
    assert state.good_step == 2
    assert RunState.from_dict(state.to_dict()) == state


@pytest.mark.parametrize("loss", [8.3, math.nan, math.inf])
def test_a_loss_that_is_too_high_or_not_finite_is_divergence(loss):
    state = RunState()
    guard = DivergenceGuard(state, 2.0, lambda own: own)
    look(guard, [4.0])
    with pytest.raises(DivergedError, match=r"step 2: the loss is .* running value of 4 .*--rollback"):
        guard.on_train_batch_end(2, {"train_loss": loss})
    assert state.good_step == 0


def test_what_counts_is_the_loss_of_all_ranks():
    guard = DivergenceGuard(RunState(), 2.0, lambda own: (own + 20.0) / 2)
    look(guard, [4.0, 4.0])
    with pytest.raises(DivergedError):
        guard.on_train_batch_end(3, {"train_loss": 40.0})


@pytest.mark.parametrize(("bounded", "epoch"), [(True, 2.0), (False, 2.0), (True, 20.0)])
def test_a_scaled_schedule_differs_in_its_rates_only(bounded, epoch):
    schedule = schedules.create(
        schedule="exponential",
        lr=0.1,
        epochs=30,
        workers=8,
        base_batch=256,
        warmup_epochs=5,
        warmup_start_lr=0.1,
        bounded_warmup=bounded,
    )
    plain, half = schedule(epoch, epoch + 0.1, 256), schedules.scaled(schedule, 0.5)(epoch, epoch + 0.1, 256)
    assert half["learning_rate"] == pytest.approx(plain["learning_rate"] / 2)
    assert half["lower_bound"] == pytest.approx(plain["lower_bound"] / 2)
    assert (half["momentum"], half["phase"]) == (plain["momentum"], plain["phase"])
    # Bu = lr N + a term of t alone, so that it falls by as much as lr N does.
    assert plain["upper_bound"] - half["upper_bound"] == pytest.approx(0.4)
    assert schedules.scaled(schedule, 1.0) is schedule
