import math

import pytest

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.numerics import schedules
from hybrid_imagenet.resilience.rollback import DivergedError
from hybrid_imagenet.training.callbacks.divergence import DivergenceGuard


def guard(state, factor=2.0, others=(), alarm=None):
    """One of several ranks; the others answer with their own alarm and loss."""
    return DivergenceGuard(state, lambda: alarm, lambda own: [own, *others], 230.0, factor)


def look(guard, state, losses):
    for state.step, loss in enumerate(losses, 1):
        guard.on_train_batch_end(state.step, {"train_loss": loss})


def test_the_running_value_follows_and_the_good_step_is_the_one_before():
    state = RunState()
    watch = guard(state)
    watch.on_train_batch_end(1, {"position": 0.1})  # nothing was fetched
    assert state.running_loss is None
    look(watch, state, [4.0, 5.0, 8.0])
    assert state.running_loss == pytest.approx(0.9 * (0.9 * 4 + 0.1 * 5) + 0.1 * 8)
    assert state.good_step == 2
    assert RunState.from_dict(state.to_dict()) == state


@pytest.mark.parametrize("loss", [8.3, math.nan, math.inf])
def test_a_loss_that_is_too_high_or_not_finite_is_divergence(loss):
    state = RunState()
    watch = guard(state)
    look(watch, state, [4.0])
    state.step = 2
    with pytest.raises(DivergedError, match=r"step 2: the loss is .* running value of 4 .*--rollback"):
        watch.on_train_batch_end(2, {"train_loss": loss})
    assert state.good_step == 0


def test_what_counts_is_the_loss_of_all_ranks():
    state = RunState(step=3)
    watch = guard(state, others=[(None, 20.0)])
    look(watch, state, [4.0, 4.0])
    with pytest.raises(DivergedError):
        watch.on_train_batch_end(2, {"train_loss": 40.0})


@pytest.mark.parametrize(("loss", "why"), [(math.nan, "not finite"), (7e31, r"above 100 ln\(classes\) = 230")])
def test_the_alarm_of_any_rank_ends_all_at_the_step_that_went_wrong(loss, why):
    state = RunState(step=10)
    watch = guard(state, None, others=[((7, 400.0), None), ((4, loss), None)], alarm=None)
    watch.on_train_begin()
    watch.on_train_batch_end(15, {"position": 0.5})  # nothing was fetched
    state.step = 19
    with pytest.raises(DivergedError, match=f"step 14: the loss is .*, {why}: training has diverged; lower --lr"):
        watch.on_train_batch_end(19, {"train_loss": 2.0})


@pytest.mark.parametrize("moment", ["on_test_begin", "on_epoch_end", "on_train_end", "look"])
def test_it_looks_wherever_a_run_may_end_or_be_saved(moment):
    state, asked = RunState(step=5), []
    alarms = [None, (2, math.nan)]
    watch = DivergenceGuard(state, lambda: alarms[0], lambda own: asked.append(own) or [own], 230.0)
    watch.on_train_begin()
    arguments = (0,) if moment == "on_epoch_end" else ()
    getattr(watch, moment)(*arguments)
    assert asked == []  # no step was done
    state.step = 8
    for _ in range(2):
        getattr(watch, moment)(*arguments)
    assert len(asked) == 1
    assert state.good_step == 7
    state.step = 9
    alarms.pop(0)
    with pytest.raises(DivergedError, match="step 7: the loss is nan, not finite"):
        getattr(watch, moment)(*arguments)


@pytest.mark.parametrize(("bounded", "epoch"), [(True, 2.0), (False, 2.0), (True, 20.0)])
def test_a_scaled_schedule_differs_in_its_rates_only(bounded, epoch):
    schedule = schedules.create(
        lr_schedule="exponential",
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
