"""A run whose position a test sets, for callbacks that are tested without a loop."""

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.training_run import Run


class FakeRun(Run):
    """A run without a loop.

    Attributes:
      values: Values that `read` returns, by name.
    """

    def __init__(
        self,
        state=None,
        *,
        communicator=None,
        model=None,
        position=lambda: 0.0,
        is_at_end=lambda: False,
    ):
        super().__init__(model, state or RunState())
        self.values = {}
        self._communicator = communicator or SingleProcess()
        self._position = position
        self._is_at_end = is_at_end

    @property
    def communicator(self):
        return self._communicator

    @property
    def position(self):
        return self._position()

    def is_at_end(self):
        return self._is_at_end()

    def read(self, name):
        return self.values[name]

    def request_stop(self, reason):
        self.state.stop = reason

    def check_positions(self):
        pass


def attach(callback, run):
    """Makes a callback see a run; returns the callback."""
    callback.set_params({"run": run, "epochs": 1, "steps": None})
    return callback
