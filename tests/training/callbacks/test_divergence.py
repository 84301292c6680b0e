import math

import pytest

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.callbacks.divergence import DivergedError, DivergenceGuard


@pytest.mark.parametrize(("loss", "why"), [(math.nan, "not finite"), (7e31, r"above 100 ln\(classes\) = 230")])
def test_the_alarm_of_any_rank_ends_all_at_the_step_that_went_wrong(loss, why):
    state, alarms = RunState(step=10), [None, (7, 400.0), (4, loss)]
    watch = DivergenceGuard(state, lambda: alarms[0], lambda own: alarms, 230.0)
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
    state.step = 9
    alarms.pop(0)
    with pytest.raises(DivergedError, match="step 7: the loss is nan, not finite"):
        getattr(watch, moment)(*arguments)
