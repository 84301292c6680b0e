"""Commits the state of every elastic rank to memory, so that it can go on when others are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm.elastic import RanksChangeError
from hybrid_imagenet.resilience.elastic_state import Memory


class CommitCallback(keras.callbacks.Callback):
    """Commits the state of this rank to memory: when training begins, every so many steps and after each epoch.

    Every rank does so after the same steps, because statistics are merged first. Ranks may be lost in between, so that
    some have committed and others not; all go on from what the first of those that are left has.
    """

    def __init__(
        self,
        memory: Memory,
        *,
        state: RunState,
        variables: Callable[[], Mapping[str, keras.Variable]],
        description: Callable[[], Mapping[str, Any]],
        synchronize: Callable[[], None],
        every_steps: int,
        world_size: int,
    ):
        """Takes what to commit and when; `state` to `synchronize` as for `CheckpointCallback`."""
        super().__init__()
        self._memory = memory
        self._state = state
        self._variables = variables
        self._description = description
        self._synchronize = synchronize
        self._every_steps = every_steps
        self._world_size = world_size

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Commits what training starts from."""
        self._commit()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits where it is due.

        Raises:
          RanksChangeError: if the ranks have agreed to connect anew.
        """
        self._memory.last_step = batch
        regroup = (logs or {}).get("regroup", False)
        if regroup or batch % self._every_steps == 0:
            self._commit()
        if regroup:
            raise RanksChangeError

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commits the finished epoch."""
        self._commit()

    def _commit(self) -> None:
        self._synchronize()
        meta = {**self._description(), "state": self._state.to_dict()}
        arrays = {name: np.array(variable.numpy()) for name, variable in self._variables().items()}
        self._memory.commit(arrays, meta, self._world_size)
