"""Saves and resumes what `model.fit` trains, in this package's checkpoints."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any

import keras

from hybrid_imagenet import files, private_api
from hybrid_imagenet.checkpoints.run_state import RunState, restore_arrays
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.comm import Communicator, process
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.library import compiled_model
from hybrid_imagenet.library.broadcast import (
    broadcast_model,
    build,
    built_on,
    require_weights,
    set_scalars,
)
from hybrid_imagenet.optimizers.grouped import hyperparameters_of
from hybrid_imagenet.optimizers.lars import LayerScaledOptimizer
from hybrid_imagenet.order import ExactBatchSampler
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.training.checkpoint_saver import CheckpointSaver

_LOCKS: dict[pathlib.Path, IO[bytes]] = {}  # of the folders that this process writes to


_COUNTING = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
"""Callbacks that count epochs and remember the best value."""


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _forgotten(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """Returns lines about callbacks that start from the beginning in a resumed run, because nothing
    saves their state.

    Keras's callbacks cannot be asked for their state. Of a user's own classes nothing is known.
    """
    stateful = [
        type(callback).__name__
        for callback in callbacks
        if isinstance(callback, _COUNTING) or getattr(callback, "save_best_only", False)
    ]
    lines = []
    if stateful:
        names = " and ".join(dict.fromkeys(stateful))
        verb = "starts" if len(set(stateful)) == 1 else "start"
        lines.append(
            f"warning: {names} {verb} from zero in this resumed run, because Checkpoint does not"
            " save the state of callbacks: epochs of patience are counted from zero, and the best"
            " value so far is forgotten"
        )
    lines += [
        f"warning: {type(callback).__name__} has overwritten the epochs before this resumed run in "
        f"{callback.filename}: pass append=True"
        for callback in callbacks
        if isinstance(callback, keras.callbacks.CSVLogger) and not callback.append
    ]
    return lines


class Checkpoint(keras.callbacks.Callback):
    """Saves weights, optimizer state and position after epochs; a new `fit` continues from the
    newest good checkpoint.

    Files are written by rank 0 in the background, checksummed and replaced atomically, by the
    program's `CheckpointSaver`; a damaged one is set aside and the one before is taken. Every rank
    has this callback, behind `default_callbacks()`. The folder need not be shared by all hosts.

    The state of other callbacks is not saved. A resumed run prints a warning for those of Keras
    that count epochs or remember a best value, because they start from zero.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_epochs: int = 1,
        keep: int = 2,
        order: ExactBatchSampler | None = None,
    ):
        """Takes the folder.

        Args:
          directory: holds nothing else; its parent must exist. One run at a time may use it.
          every_epochs: epochs between checkpoints; the last epoch is always saved.
          keep: the newest good ones that stay.
          order: of `hybrid_imagenet.order.keras_dataset`; saved and restored too.
        """
        super().__init__()
        self._directory = files.output_path("directory", directory).absolute()
        self._every_epochs, self._keep, self._order = every_epochs, keep, order
        self._state = RunState()
        self._saver: CheckpointSaver | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the newest good checkpoint on all ranks, and lets `fit` begin with the epoch
        after it.

        Raises:
          UserError: on all ranks, if the folder is in use, or belongs to another model or order.
        """
        ranks = process.communicator()
        require_weights(self.model)
        for optimizer in compiled_model.optimizers(self.model).values():
            build(self.model, optimizer, ranks)
        store, meta, place = None, None, None
        with ranks.raise_on_all_ranks():
            if ranks.rank == 0:
                store = CheckpointStore(self._directory, self._keep, log=_report)
                self._lock()
                meta, place = self._restore(store)
        meta, place = ranks.broadcast_object([meta, place])
        self._state = RunState.from_dict(meta) if meta else RunState()
        if meta:
            if ranks.rank == 0:
                for line in _forgotten(private_api.running_callbacks()):
                    _report(line)
            private_api.set_initial_epoch(self.model, self._state.finished_epochs)
            if self._order is not None:
                self._order.load_state_dict(place)
                # The order also knows the position after `stop_training` has cut an epoch.
                private_api.set_initial_epoch(self.model, self._order.epoch)
            broadcast_model(self.model, ranks)
        self._saver = CheckpointSaver(
            store=store,
            state=self._state,
            variables=self._variables,
            describe=lambda: self._description(ranks),
            is_last=lambda done: done == (self.params or {}).get("epochs"),
            every_epochs=self._every_epochs,
        )

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._done = batch + 1

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._done = 0

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        assert self._saver is not None
        self._state.step += self._done
        self._state.finished_epochs = epoch + 1
        self._state.recorded_at, self._state.cursor = float(epoch + 1), Cursor(epoch + 1, 0)
        self._saver.after_epoch(epoch + 1, (logs or {}).get("val_top1"))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        assert self._saver is not None
        self._saver.finish()
        private_api.set_initial_epoch(self.model, None)
        self._unlock()

    def _unlock(self) -> None:
        if (lock := _LOCKS.pop(self._directory, None)) is not None:
            lock.close()

    def _lock(self) -> None:
        """Locks the folder; a lock that an earlier `fit` of this process has left is taken over."""
        self._unlock()
        try:
            self._directory.mkdir(exist_ok=True)
            _LOCKS[self._directory] = files.lock(self._directory)
        except BlockingIOError:
            raise UserError(
                f"{self._directory} is in use by another run: wait, or give another folder"
            ) from None
        except OSError as problem:
            raise UserError(
                f"{self._directory}: {problem.strerror}; give a folder that can be written"
            ) from None

    def _restore(
        self, store: CheckpointStore
    ) -> tuple[dict[str, Any] | None, dict[str, int] | None]:
        """Returns the states of the run and of the order in the newest good checkpoint."""
        found = store.latest_valid()
        if found is None:
            return None, None
        if self._order is not None and "order" not in found.meta:
            raise UserError(f"{found.path} holds no order: omit order=, or give another folder")
        optimizers = compiled_model.optimizers(self.model)
        for name, saved in found.meta.get("optimizers", {}).items():
            if name in optimizers:
                self._ready(optimizers[name], saved)
        restore_arrays(found, self._variables())
        state: dict[str, Any] = found.meta["state"]
        print(
            f"resumed from {found.path}: epoch {state['finished_epochs']} is done",
            file=sys.stderr,
            flush=True,
        )
        return state, found.meta.get("order")

    def _ready(self, optimizer: Any, saved: Mapping[str, Any]) -> None:
        """Builds an optimizer as the saved one was built, and sets its scalars."""
        known = self.model.trainable_variables
        if not optimizer.built and max(saved["built_on"], default=0) < len(known):
            optimizer.build([known[place] for place in saved["built_on"]])
        if saved["hyper"]:
            set_scalars(optimizer, saved["hyper"])
        inner = getattr(optimizer, "inner", optimizer)
        # A coefficient that was passed stays.
        if isinstance(inner, LayerScaledOptimizer) and inner.needs_trust_coefficient:
            coefficient = saved.get("trust_coefficient")
            if coefficient is not None:
                inner.set_trust_coefficient(coefficient)

    def _variables(self) -> Mapping[str, keras.Variable]:
        # By number: Keras counts up the names of layers when a process builds a model twice.
        parts = {"model": self.model.weights}
        optimizers = compiled_model.optimizers(self.model)
        parts |= {
            name: optimizer.variables for name, optimizer in optimizers.items() if optimizer.built
        }
        return {
            f"{part}/{i:04d}": v for part, values in parts.items() for i, v in enumerate(values)
        }

    def _description(self, ranks: Communicator) -> dict[str, Any]:
        """Returns what every checkpoint describes; the sums within an epoch are the program's."""
        optimizers = {}
        for name, optimizer in compiled_model.optimizers(self.model).items():
            hyperparameters = hyperparameters_of(optimizer)
            values = {}
            if hyperparameters is not None:
                values = {key: hyperparameters[key] for key in hyperparameters.names}
            inner = getattr(optimizer, "inner", optimizer)
            optimizers[name] = {
                "built_on": built_on(self.model, optimizer) or [],
                "hyper": values,
                # A new start may have another batch, so it would derive another one.
                "trust_coefficient": getattr(inner, "trust_coefficient", None),
            }
        order = {} if self._order is None else {"order": self._order.state_dict()}
        return {
            "world_size": ranks.size,
            "epoch_sums": [[0.0] * 4] * ranks.size,
            "optimizers": optimizers,
            **order,
        }
