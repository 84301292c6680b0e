"""Position, ranks and values of a run of the program, for its callbacks."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.training.components import RunComponents
from hybrid_imagenet.training_run import Run, StepSpan


class ProgramRun(Run):
    """A run of the program, whose loop plans each step before callbacks see it."""

    def __init__(self, components: RunComponents):
        """Takes the components of the run."""
        super().__init__(components.model, components.state)
        self._components = components

    @property
    def communicator(self) -> Communicator:
        """The communicator of the run."""
        return self._components.communicator

    @property
    def position(self) -> float:
        """Fractional epochs that are done."""
        return self._components.data.order.position(self.state.cursor)

    def is_at_end(self) -> bool:
        """Returns whether --epochs or --max_steps is reached."""
        return self._components.data.length.is_over(self.state.cursor, self.state.step)

    def read(self, name: str) -> npt.NDArray[np.float64]:
        """Returns a value of a step, see `DelayedReadback.read`."""
        return self._components.step.telemetry.read(name)

    def request_stop(self, reason: str) -> None:
        """Ends the loop after this step or epoch; the summary has the reason."""
        self.state.stop = reason

    def check_positions(self) -> None:
        """Does nothing, because the program always knows the position."""

    def plan_step(self, epoch: int) -> Cursor:
        """Sets the span of the next step; returns the position after it."""
        data = self._components.data
        global_batch = data.global_batch(epoch)
        start = self.state.cursor
        end = data.order.advance(start, global_batch)
        self.span = StepSpan(data.order.position(start), data.order.position(end), global_batch)
        return end
