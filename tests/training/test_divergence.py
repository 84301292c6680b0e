import math

import pytest

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.training.divergence import DivergedError, DivergenceGuard


@pytest.mark.parametrize(("loss", "why"), [(math.nan, "not finite"), (7e31, r"above 100 ln\(classes\) = 230")])
def test_the_alarm_of_any_rank_ends_all_at_the_step_that_went_wrong(loss, why):
    state, alarms = RunState(step=10), [None, (7, 400.0), (4, loss)]
    watch = DivergenceGuard(state, lambda: alarms[0], lambda own: alarms, 230.0)
    watch.look()  # no step was done
    state.step = 19
    with pytest.raises(DivergedError, match=f"step 14: the loss is .*, {why}: training has diverged; lower --lr"):
        watch.look()


def test_a_step_is_looked_at_once():
    state, asked = RunState(step=5), []
    alarms = [None, (2, math.nan)]
    watch = DivergenceGuard(state, lambda: alarms[0], lambda own: asked.append(own) or [own], 230.0)
    watch.look()
    assert asked == []
    state.step = 8
    watch.look()
    watch.look()
    assert len(asked) == 1
    state.step = 9
    alarms.pop(0)
    with pytest.raises(DivergedError, match="step 7: the loss is nan, not finite"):
        watch.look()
