"""Saves and resumes what `model.fit` trains, in this package's checkpoints."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet import files, private_api
from hybrid_imagenet.callbacks import callback_state, epoch_data, rank_values
from hybrid_imagenet.callbacks.broadcast import (
    broadcast_model,
    build,
    require_weights,
    set_hyperparameters,
    variable_indices,
)
from hybrid_imagenet.callbacks.save_checkpoints import SaveCheckpoints
from hybrid_imagenet.callbacks.training_callback import print_to_stderr
from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.checkpoints.run_state import RunState, array_name, restore_arrays
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.comm.request_sum import RequestSum
from hybrid_imagenet.errors import (
    EXIT_PREEMPTED,
    RESTART_SCRIPT,
    SharedError,
    UserError,
    pluralize,
)
from hybrid_imagenet.models import random_state
from hybrid_imagenet.optimizers import compiled_model, restored_loss_scale, restored_rate
from hybrid_imagenet.optimizers.distributed import DistributedOptimizer
from hybrid_imagenet.optimizers.grouped import hyperparameters_of
from hybrid_imagenet.optimizers.layer_scaled import LayerScaledOptimizer
from hybrid_imagenet.order import ExactBatchSampler
from hybrid_imagenet.order.sampling import Cursor
from hybrid_imagenet.resilience.exit_code import notify_exit
from hybrid_imagenet.resilience.stacks import FrameWatch
from hybrid_imagenet.resilience.step_requests import StepRequests
from hybrid_imagenet.resilience.stop_signals import REQUESTS, exit_by_signal
from hybrid_imagenet.training_run import FitRun

# Beginning of the names of arrays with a row for each rank.
_RANK_ARRAYS = "ranks/"

# The open lock file of each directory that this process writes to.
_LOCKS: dict[pathlib.Path, IO[bytes]] = {}


class Checkpoint(SaveCheckpoints):
    """Saves weights, optimizer, random state and position, and continues from there.

    A new `fit` continues where the latest valid checkpoint was saved. Files are checksummed and
    replaced atomically, as in the program; a damaged one is renamed, and the one before is used.
    Every rank has this callback, after `default_callbacks()`. The directory need not be shared by
    all hosts.

    A checkpoint is saved

    * after epochs, when all callbacks have done their work at the end of the epoch;
    * inside an epoch, every `every_seconds`;
    * when a process gets SIGTERM or SIGUSR1. All ranks save after the same step, and the process
      exits with code 75. Start the same command again to continue.

    A checkpoint has the weights of each rank that are not trained, such as the statistics of batch
    normalization, and the states of recurrent layers with `stateful=True`. Inside an epoch, it also
    has the number of batches that are done, and the metrics of the epoch. The epoch continues with
    the batches that are left, as if it had not been interrupted, if the data are

    * arrays, or a `keras.utils.PyDataset` without its own `on_epoch_begin` and `on_epoch_end`, on
      the same number of ranks and with the same batch size. `fit(shuffle=True)` then shuffles in an
      order that follows from the seed of `keras.utils.set_random_seed`, the rank and the epoch; or
    * `hi.order.keras_dataset` with `order=`, on any number of ranks.

    With other data, such as a tf.data.Dataset, the epoch begins again with the weights of the
    checkpoint, and a line says so. If they come in the same order every time, pass
    `skip_batches=True`. With `steps_per_epoch`, the data begin again with their first batch, also
    after a whole epoch.

    An epoch that continues, or begins again, keeps its learning rate. `on_epoch_begin` of other
    callbacks is called for it a second time.

    An epoch that `stop_training` has ended early is not saved, unless there is an exact order.

    If a callback such as `EarlyStopping` sets `stop_training` and the epoch is whole, the training
    is finished, and a new `fit` with the same number of epochs trains none. With another number it
    continues.

    The state of `EarlyStopping`, `ReduceLROnPlateau` and `ModelCheckpoint` is saved too, and that
    of every callback with `state_dict()`, which returns values that JSON can represent, and
    `load_state_dict(state)`, or with `variables()`, see `TrainingCallback`. Other callbacks start
    from zero in a resumed run.

    Example:
      callbacks = [*hi.callbacks.default_callbacks(), hi.callbacks.Checkpoint("checkpoints")]
      model.fit(data, epochs=90, callbacks=callbacks)

    Args:
      directory: Directory that contains nothing else; its parent must exist. One run at a time may
        use it.
      every_epochs: Epochs from one checkpoint to the next; the last epoch is always saved
        (default: 1).
      every_seconds: Seconds from one checkpoint inside an epoch to the next; None saves none there,
        unless a signal asks for it (default: 600.0).
      keep: Number of latest valid checkpoints to keep (default: 2).
      order: Sampler of `hi.order.keras_dataset`, which is saved and restored too (default: None).
      skip_batches: Whether to read and skip the batches that were trained before an interruption,
        with data that are in the same order every time (default: False).
    """

    # `fit` has made it.
    run: FitRun

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_epochs: int = 1,
        every_seconds: float | None = 600.0,
        keep: int = 2,
        order: ExactBatchSampler | None = None,
        skip_batches: bool = False,
    ):
        if keep < 1:
            raise SharedError(f"keep={keep!r} must be 1 or more: it is the number of checkpoints.")
        if every_epochs < 1:
            raise SharedError(f"every_epochs={every_epochs!r} must be 1 or more.")
        if every_seconds is not None and not every_seconds > 0:
            raise SharedError(f"every_seconds={every_seconds!r} must be more than 0, or None.")
        super().__init__(every_epochs=every_epochs)
        self._directory = files.output_path("directory", directory).absolute()
        self._keep = keep
        self._every_seconds = every_seconds
        self._order = order
        self._skip_batches = skip_batches
        # Values of all ranks, by name, for the checkpoint that is being saved or was restored, and
        # the states of metrics that the first step creates.
        self._rank_values: dict[str, np.ndarray] = {}
        self._metric_states: dict[str, np.ndarray] = {}
        # Whether a callback has set `stop_training` at the end of the latest batch, and whether the
        # latest whole epoch ends `fit`.
        self._stopped_at_batch = False
        self._ends_fit = False
        # Whether the checkpoint that is being saved is inside an epoch, and whether one that was
        # requested in the last batch is due at the end of the epoch.
        self._is_inside_epoch = False
        self._save_at_epoch_end = False
        # Best weights of callbacks by name.
        self._restored_weights: dict[str, list[np.ndarray]] = {}
        # Learning rate and momentum with which each optimizer was created, by its name.
        self._created_with: dict[str, dict[str, float]] = {}
        # Learning rates, by name of the optimizer, with which an interrupted epoch goes on.
        self._restored_rates: dict[str, float] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Restores the latest valid checkpoint on all ranks, and the epoch that `fit` begins with.

        Raises:
          UserError: On all ranks, if the directory is in use or belongs to another model, or if
            none of its checkpoints can be used.
        """
        communicator = self.communicator
        require_weights(self.model)
        for optimizer in compiled_model.optimizers(self.model).values():
            build(self.model, optimizer, communicator)
        self._created_with = {
            name: restored_rate.values_of(optimizer)
            for name, optimizer in compiled_model.optimizers(self.model).items()
        }
        self._all_callbacks = private_api.running_callbacks()
        callback_state.check_ranks(self._all_callbacks, communicator)
        self._follow_other_callbacks()
        store = None
        meta: dict[str, Any] | None = None
        # An earlier `fit` with this callback may have been interrupted.
        self._restored_weights = {}
        self._restored_rates = {}
        self._rank_values = {}
        with communicator.raise_on_all_ranks():
            if communicator.rank == 0:
                store = CheckpointStore(
                    self._directory, self._keep, log=print_to_stderr, restart=RESTART_SCRIPT
                )
                self._lock()
                try:
                    meta = self._restore(store)
                except UserError:
                    self._unlock()
                    raise
        meta = communicator.broadcast_object(meta)
        self._first_batch = 0
        self._continues_epoch = False
        self._data_seed = communicator.broadcast_object(
            meta["data_seed"] if meta else epoch_data.choose_seed()
        )
        self._data = epoch_data.open_epoch_data(
            self._data_seed, communicator.rank, has_order=self._order is not None
        )
        if meta is None:
            self.run.state.restore(RunState().to_dict())
        else:
            self._continue_from(meta)
        self.start(store, self._all_callbacks, meta["callbacks"] if meta else {})
        super().on_train_begin(logs)
        self._requests = StepRequests(
            self._request_sum(), self._every_seconds if communicator.rank == 0 else None
        )
        _keep_signals()

    def _request_sum(self) -> RequestSum | None:
        """Returns what sums the requests of all ranks in each step."""
        if self.communicator.size == 1:
            return None
        request_sum = compiled_model.request_sum(self.model)
        if request_sum is None:
            raise SharedError(
                "Checkpoint needs callbacks=[*hi.callbacks.default_callbacks(), ...] on several"
                " ranks, before it."
            )
        return request_sum

    def _continue_from(self, meta: Mapping[str, Any]) -> None:
        """Sets position and variables from what rank 0 has restored; every rank calls it.

        Args:
          meta: Returned by `_restore` on rank 0.
        """
        communicator = self.communicator
        self.run.state.restore(meta["state"])
        self._broadcast_callback_weights(meta["callback_weights"])
        own_arrays = list(self._rank_values.values())
        shapes = meta["rank_values"]
        arrays = _broadcast_arrays(own_arrays, shapes.values(), communicator)
        self._rank_values = dict(zip(shapes, arrays, strict=True))
        if communicator.rank == 0:
            for line in _warnings(self._all_callbacks, meta["callbacks"]):
                print_to_stderr(line)
        self._drop_states_of_other_monitors(meta["callbacks"])
        if meta["finished_fit"] is not None and not self._is_finished(meta):
            self._renew_patience(meta["callbacks"])
        first_epoch = self.run.state.finished_epochs
        if self._order is not None:
            self._order.load_state_dict(meta["order"])
            # If `stop_training` has ended an epoch early, only the order knows that the epoch is
            # not complete.
            first_epoch = self._order.epoch
        if self._is_finished(meta):
            first_epoch = self.params["epochs"]
        private_api.set_initial_epoch(self.model, first_epoch)
        callback_variables = callback_state.saved_variables(self._all_callbacks).values()
        restored = {id(variable) for variable in callback_variables}
        for optimizer in compiled_model.distributed(self.model).values():
            if optimizer.average is not None:
                # Without `SwapAveragedWeights` no checkpoint contains it, and it begins again.
                averages = optimizer.average.variables
                optimizer.average.follows_weights = any(id(v) in restored for v in averages)
        broadcast_model(self.model, communicator)
        communicator.broadcast_variables([v.value for v in callback_variables])
        rank_values.restore_variables(self.model, self._rank_values, communicator)
        has_states = rank_values.restore_recurrent_states(
            self.model, self._rank_values, communicator
        )
        has_epochs_left = first_epoch < self.params["epochs"]
        if communicator.rank == 0 and has_epochs_left:
            self._report_what_begins_again(has_states)
        if meta["batches"]:
            self._continue_inside_epoch(meta["batches"], meta["world_size"], meta["epoch_batches"])
        if meta["batches"] or (self._order is not None and meta["order"]["offset"]):
            for name, optimizer in compiled_model.optimizers(self.model).items():
                values = restored_rate.values_of(optimizer)
                if "learning_rate" in values:
                    self._restored_rates[name] = values["learning_rate"]

    def _continue_inside_epoch(
        self, batches: int, saved_ranks: int, saved_batches: Sequence[int | None]
    ) -> None:
        """Begins the first epoch after the batches that are done, if that is possible.

        Args:
          batches: Batches of the epoch that were trained.
          saved_ranks: Ranks that trained them.
          saved_batches: `EpochData.batches` of the `fit` that trained them.
        """
        reason = ""
        if self._order is not None:
            batches = self._order.longest - len(self._order)
        elif not self._data.is_exact and not (
            self._skip_batches and not self._data.continues_over_epochs
        ):
            reason = "the order of its data is not known (see skip_batches)"
        elif saved_batches != self._data.batches:
            reason = "the size or number of its batches has changed"
        elif saved_ranks != self.communicator.size:
            reason = f"it was saved on {pluralize(saved_ranks, 'rank')}"
        if not reason:
            self._first_batch = batches
            self._continues_epoch = True
        elif self.communicator.rank == 0:
            epoch = self.run.state.finished_epochs + 1
            print_to_stderr(
                f"epoch {epoch} begins again, because {reason}: its first {batches} batches are"
                " trained a second time"
            )

    def _report_what_begins_again(self, has_states: bool) -> None:
        """Prints a line for states and data that do not continue from the checkpoint."""
        if not has_states:
            print_to_stderr(
                "the states of recurrent layers with stateful=True begin at zero, because the"
                " checkpoint has none for this batch and number of ranks"
            )
        if self._data.continues_over_epochs and self._order is None:
            print_to_stderr(
                "with steps_per_epoch, the data continue over epochs; they begin again with their"
                " first batch"
            )

    def _drop_states_of_other_monitors(self, states: dict[str, Any]) -> None:
        """Removes restored states whose best value is not comparable, so that they begin again.

        Args:
          states: States of callbacks by name.
        """
        for name, callback in callback_state.stateful_callbacks(self._all_callbacks).items():
            if name in states and callback_state.has_other_monitor(callback, states[name]):
                monitor = states.pop(name)["monitor"]
                self._restored_weights.pop(name, None)
                if self.communicator.rank == 0:
                    print_to_stderr(
                        f"{name.partition('#')[0]} begins again, because it monitors"
                        f" {callback.monitor} instead of {monitor}"
                    )

    def _renew_patience(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Lets `EarlyStopping` wait again in a training that it has ended and that goes on.

        Args:
          states: States of callbacks by name.
        """
        for name, callback in callback_state.stateful_callbacks(self._all_callbacks).items():
            if isinstance(callback, keras.callbacks.EarlyStopping) and "wait" in states.get(
                name, {}
            ):
                states[name]["wait"] = 0

    def _is_finished(self, description: Mapping[str, Any]) -> bool:
        """Returns whether a callback has ended this `fit` at the position of a checkpoint.

        Args:
          description: Description of the checkpoint.
        """
        return bool(description["finished_fit"] == self.params["epochs"])

    def _follow_other_callbacks(self) -> None:
        """Inserts a callback that saves when the others have done their work at the epoch's end.

        They may still change their state or the learning rate there. It comes before
        `SwapEMAWeights(swap_on_epoch=True)`, which replaces the weights by their averages.

        Another one, after all others, keeps the learning rate of an epoch that was interrupted, and
        notices at the end of a batch whether one of them has ended the epoch.
        """
        position = 0
        for callback in self._all_callbacks:
            if isinstance(callback, keras.callbacks.SwapEMAWeights) and callback.swap_on_epoch:
                break
            position += 1
        at_epoch_end = keras.callbacks.LambdaCallback(on_epoch_end=self._end_epoch)
        after_others = keras.callbacks.LambdaCallback(
            on_epoch_begin=self._keep_rates, on_train_batch_end=self._end_batch
        )
        private_api.insert_callback(at_epoch_end, position)
        private_api.insert_callback(after_others, len(self._all_callbacks) + 1)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the data of the epoch; in the first one also metrics and states of callbacks."""
        # `fit` has read it. If training is interrupted, a later `fit` must not begin there.
        private_api.set_initial_epoch(self.model, None)
        self._epoch = epoch
        self._stopped_at_batch = False
        self._save_at_epoch_end = False
        if self._order is None:
            # `fit` may begin at its argument initial_epoch.
            self.run.state.finished_epochs = epoch
        self._data.begin_epoch(epoch, self._first_batch)
        self.run.begin_epoch(epoch, self._first_batch)
        self._metric_states = {}
        if self._continues_epoch:
            self._metric_states = rank_values.restore_metrics(
                self.model, self._rank_values, self.communicator
            )
        self._continues_epoch = False
        self._first_batch = 0
        super().on_epoch_begin(epoch, logs)

    def _keep_rates(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Sets the learning rates of an interrupted epoch again.

        Callbacks such as `LearningRateScheduler` have set them when the epoch began the first time.
        If the new rate follows from the old one, it would otherwise change twice.
        """
        optimizers = compiled_model.optimizers(self.model)
        for name, rate in self._restored_rates.items():
            if float(optimizers[name].learning_rate) != rate:
                set_hyperparameters(optimizers[name], {"learning_rate": rate})
        self._restored_rates = {}

    def restore_callback(
        self, callback: keras.callbacks.Callback, name: str, state: Mapping[str, Any]
    ) -> None:
        super().restore_callback(callback, name, state)
        if name in self._restored_weights:
            callback.best_weights = self._restored_weights.pop(name)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Posts the requests of this rank, which the next step sums."""
        self._requests.post()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing, because a step is saved after all callbacks, by `_end_batch`."""

    def _end_batch(self, batch: int, logs: dict[str, Any] | None) -> None:
        """Saves inside an epoch if ranks have asked for it, and exits if one got a signal to stop.

        Raises:
          SystemExit: On all ranks, with code 75, after a signal.
        """
        self._stopped_at_batch = self.model.stop_training
        if self._metric_states:
            rank_values.add_metrics(self.model, self._metric_states, self.communicator)
            self._metric_states = {}
        self._requests.follow()
        if not (self._requests.save or self._requests.stop):
            return
        # The end of the epoch saves after its last batch.
        if self._stopped_at_batch or self._is_epoch_done():
            self._save_at_epoch_end = True
            return
        self._is_inside_epoch = True
        try:
            self.save()
        finally:
            self._is_inside_epoch = False
        if self._requests.stop:
            self._exit_preempted()

    def _exit_preempted(self) -> None:
        """Waits for the disk and exits with code 75; every rank calls it."""
        self.wait()
        self._unlock()
        REQUESTS.ignore()
        if self.communicator.rank == 0:
            print_to_stderr(
                f"preempted: saved in {self._directory}. Start the same command again to continue."
            )
        notify_exit(EXIT_PREEMPTED)
        raise SystemExit(EXIT_PREEMPTED)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Does nothing, because the epoch is saved after all callbacks, by `_end_epoch`."""

    def _end_epoch(self, epoch: int, logs: dict[str, Any] | None) -> None:
        """Advances the position and saves.

        An epoch that `stop_training` has ended early is not saved, because a resumed `fit` trains
        it from its beginning. An exact order continues within it.
        """
        state = self.run.state
        is_whole = self._is_whole()
        if is_whole:
            state.finished_epochs = epoch + 1
            state.recorded_at = float(epoch + 1)
        elif self._order is not None:
            state.finished_epochs = epoch
            state.recorded_at = self._order.position
        else:
            self._report_unsaved_epoch(epoch)
            return
        state.cursor = Cursor(state.finished_epochs, 0)
        self._ends_fit = is_whole and self.model.stop_training
        super().on_epoch_end(epoch, {**(logs or {}), "epoch": state.recorded_at})
        # A signal may have come in the last step or during validation.
        is_stopping = any(self.communicator.allgather_object(REQUESTS.stop))
        if self._save_at_epoch_end or is_stopping:
            self.save()
        if is_stopping and not self.run.is_at_end():
            self._exit_preempted()

    def _is_whole(self) -> bool:
        """Returns whether all batches of the epoch were trained.

        If `stop_training` ends an epoch whose number of batches is not known, there may have been
        more of them.
        """
        if self._order is None and not self._stopped_at_batch:
            return True
        return self._is_epoch_done()

    def _is_epoch_done(self) -> bool:
        """Returns whether the last batch of the epoch is known to be trained."""
        if self._order is not None:
            return self._order.epoch > self._epoch
        return bool(self.run.batches == self.params["steps"])

    def _report_unsaved_epoch(self, epoch: int) -> None:
        """Prints that the epoch is not saved, and where a resumed `fit` begins."""
        if self.communicator.rank:
            return
        num_batches = self.params["steps"]
        batches = f"{self.run.batches} of {num_batches}" if num_batches else f"{self.run.batches}"
        # Earlier epochs need not be saved either, see `every_epochs`.
        next_epoch = int(self._saved[1]) + 1
        print_to_stderr(
            f"epoch {epoch + 1} ended after {batches} batches and is not saved: a resumed fit"
            f" continues in epoch {next_epoch}"
        )

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Waits for the disk. The last epoch is saved already, unless it was cut short.

        The weights may be others now, such as averages or the best ones.
        """
        # If no epoch was left to train, the callbacks after this one still need their states.
        self._restore_callbacks(self._all_callbacks)
        private_api.set_initial_epoch(self.model, None)
        try:
            self.wait()
        finally:
            # The script may go on with another `fit`.
            REQUESTS.end(keep_request=True)
            self._unlock()

    def _unlock(self) -> None:
        lock = _LOCKS.pop(self._directory, None)
        if lock is not None:
            lock.close()

    def _lock(self) -> None:
        """Locks the directory; a lock of an earlier `fit` of this process is taken over."""
        self._unlock()
        try:
            self._directory.mkdir(exist_ok=True)
            _LOCKS[self._directory] = files.lock(self._directory)
        except BlockingIOError:
            raise UserError(
                f"{self._directory} is in use by another run. Wait, or pass another directory."
            ) from None
        except OSError as error:
            raise UserError(
                f"{self._directory}: {error.strerror}. Pass a directory that can be written."
            ) from None

    def _restore(self, store: CheckpointStore) -> dict[str, Any] | None:
        """Restores variables on rank 0; returns the states for all ranks, or None."""
        checkpoint = store.latest_valid()
        if checkpoint is None and (store.paths() or store.damaged_paths()):
            raise UserError(
                f"None of the checkpoints in {self._directory} can be used. Copy a valid one there"
                " as step-*.npz, or delete the directory to start from the beginning."
            )
        if checkpoint is None:
            return None
        if "finished_fit" not in checkpoint.meta:
            raise UserError(
                f"{checkpoint.path} was saved by the training program, not by fit. Pass another"
                " directory."
            )
        if self._order is not None and "order" not in checkpoint.meta:
            raise UserError(
                f"{checkpoint.path} has no order of examples. Omit order=, or pass another"
                " directory."
            )
        optimizers = compiled_model.optimizers(self.model)
        for name, saved in checkpoint.meta.get("optimizers", {}).items():
            if name in optimizers:
                self._prepare_optimizer(optimizers[name], saved)
        self._rank_values, checkpoint = _take_arrays(checkpoint, _RANK_ARRAYS)
        callback_arrays, checkpoint = _take_arrays(checkpoint, callback_state.CALLBACK_ARRAYS)
        for name, array in sorted(callback_arrays.items()):
            self._restored_weights.setdefault(name.partition("/")[0], []).append(array)
        new_optimizers = [
            name for name, optimizer in optimizers.items() if int(optimizer.iterations) == 0
        ]
        restore_arrays(checkpoint, self.all_variables())
        self._restart_changed_loss_scales(checkpoint.meta["optimizers"])
        self._restart_changed_accumulation(checkpoint.meta["optimizers"])
        job_lines.notify_checkpoint(restored=True)
        print_to_stderr(f"resumed from {checkpoint.path}: {self._describe_position(checkpoint)}")
        self._continue_rates(checkpoint.meta["optimizers"], new_optimizers)
        return {
            "state": checkpoint.meta["state"],
            "order": checkpoint.meta.get("order"),
            "finished_fit": checkpoint.meta["finished_fit"],
            "callbacks": checkpoint.meta["callbacks"],
            "world_size": checkpoint.meta["world_size"],
            "data_seed": checkpoint.meta["data_seed"],
            "batches": checkpoint.meta["batches"],
            "epoch_batches": checkpoint.meta["epoch_batches"],
            "rank_values": {
                name: [array.shape, array.dtype.name] for name, array in self._rank_values.items()
            },
            "callback_weights": {
                name: [[array.shape, array.dtype.name] for array in arrays]
                for name, arrays in self._restored_weights.items()
            },
        }

    def _describe_position(self, checkpoint: CheckpointArchive) -> str:
        finished_epochs = checkpoint.meta["state"]["finished_epochs"]
        if self._is_finished(checkpoint.meta):
            return (
                f"a callback has ended this training after epoch {finished_epochs}. To train it"
                f" further, pass another number than epochs={self.params['epochs']}"
            )
        if self._order is not None and checkpoint.meta["order"]["offset"]:
            return f"within epoch {checkpoint.meta['order']['epoch'] + 1}"
        if checkpoint.meta["batches"]:
            return f"within epoch {finished_epochs + 1}, after {checkpoint.meta['batches']} batches"
        return f"epoch {finished_epochs} is done"

    def _restart_changed_loss_scales(self, saved: Mapping[str, Any]) -> None:
        """Starts the loss scales again that are set differently than in the checkpoint.

        Args:
          saved: Descriptions of the optimizers in the checkpoint, by name.
        """
        for name, optimizer in compiled_model.distributed(self.model).items():
            if name not in saved or saved[name]["loss_scale"] is None:
                continue
            loss_scale = optimizer.loss_scale
            if restored_loss_scale.restart_if_changed(loss_scale, saved[name]["loss_scale"]):
                print_to_stderr(restored_loss_scale.restart_note(loss_scale))

    def _restart_changed_accumulation(self, saved: Mapping[str, Any]) -> None:
        """Starts an accumulation again whose number of micro-batches has changed.

        Args:
          saved: Descriptions of the optimizers in the checkpoint, by name.
        """
        for name, optimizer in compiled_model.distributed(self.model).items():
            counter = optimizer.micro_batches
            steps = saved[name].get("accumulation_steps") if name in saved else None
            if counter is None or steps in (None, counter.steps):
                continue
            pending = counter.read() % steps
            counter.count.assign(0)
            optimizer.accumulator.reset()
            if pending:
                print_to_stderr(
                    f"{name}: the gradients of {pending} of {steps} batches are lost, because"
                    f" gradient_accumulation_steps is {counter.steps} now"
                )

    def _continue_rates(self, saved: Mapping[str, Any], new_optimizers: Sequence[str]) -> None:
        """Sets learning rate and momentum to new values that were passed to new optimizers.

        For an optimizer that this process has trained, those of the checkpoint stay.

        Args:
          saved: Descriptions of the optimizers in the checkpoint, by name.
          new_optimizers: Names of those that had no update before they were restored.
        """
        for name, optimizer in compiled_model.optimizers(self.model).items():
            if name not in saved:
                continue
            created_with = saved[name].get("created_with", {})
            restored = restored_rate.values_of(optimizer)
            now = self._created_with[name]
            if name in new_optimizers:
                changed = restored_rate.changed_values(restored, created_with, now)
                if changed:
                    set_hyperparameters(optimizer, changed)
                for value_name, value in changed.items():
                    print_to_stderr(
                        f"{name}: {value_name} {value:g} instead of {restored[value_name]:g},"
                        f" because it was created with {now[value_name]:g} instead of"
                        f" {created_with[value_name]:g}"
                    )
                continue
            # An earlier `fit` of this process has trained it.
            self._created_with[name] = created_with or now
            for value_name, value in restored.items():
                if value != now[value_name]:
                    print_to_stderr(
                        f"{name}: {value_name} {value:g} as in the checkpoint, instead of"
                        f" {now[value_name]:g}"
                    )

    def _prepare_optimizer(self, optimizer: Any, saved: Mapping[str, Any]) -> None:
        """Builds an optimizer as the saved one was built, and sets its scalars."""
        variables = self.model.trainable_variables
        indices = saved["built_on"]
        # It is empty if the saved optimizer was not built.
        if indices and not optimizer.built and max(indices) < len(variables):
            optimizer.build([variables[index] for index in indices])
        if saved["hyper"]:
            set_hyperparameters(optimizer, saved["hyper"])
        inner = getattr(optimizer, "inner", optimizer)
        # A coefficient that was passed to the optimizer is kept.
        if isinstance(inner, LayerScaledOptimizer) and inner.needs_trust_coefficient:
            coefficient = saved["trust_coefficient"]
            if coefficient is not None:
                inner.set_trust_coefficient(coefficient)

    def _broadcast_callback_weights(self, shapes: Mapping[str, Sequence[Any]]) -> None:
        """Sends the best weights that callbacks of rank 0 remember to all ranks.

        Args:
          shapes: [shape, dtype] of each array, by name of the callback.
        """
        for name, arrays in shapes.items():
            weights = self._restored_weights.get(name, [])
            self._restored_weights[name] = _broadcast_arrays(weights, arrays, self.communicator)

    def trained_variables(self) -> Mapping[str, keras.Variable]:
        variables_by_part = {
            "model": self.model.weights,
            # Only the states of rank 0 are saved. The other ranks derive theirs from them.
            "random": random_state.random_states(self.model),
        }
        for name, optimizer in compiled_model.optimizers(self.model).items():
            if optimizer.built:
                variables_by_part[name] = optimizer.variables
        named_variables = {}
        for part, variables in variables_by_part.items():
            for number, variable in enumerate(variables):
                named_variables[array_name(part, number, variable.path)] = variable
        return named_variables

    def extra_arrays(self) -> dict[str, np.ndarray]:
        arrays = {f"{_RANK_ARRAYS}{name}": array for name, array in self._rank_values.items()}
        callbacks = callback_state.stateful_callbacks(self._all_callbacks)
        for name, callback in callbacks.items():
            for number, array in enumerate(callback_state.best_weights(callback)):
                arrays[f"{callback_state.CALLBACK_ARRAYS}{name}/{number:04d}"] = array
        return arrays

    def describe(self) -> dict[str, Any]:
        optimizers = {}
        for name, optimizer in compiled_model.optimizers(self.model).items():
            hyperparameters = hyperparameters_of(optimizer)
            values = {}
            if hyperparameters is not None:
                values = {key: hyperparameters[key] for key in hyperparameters.names}
            inner = getattr(optimizer, "inner", optimizer)
            optimizers[name] = {
                "built_on": variable_indices(self.model, optimizer) or [],
                "hyper": values,
                "created_with": self._created_with[name],
                "accumulation_steps": getattr(optimizer, "accumulation_steps", None),
                # A later `fit` may have another batch, for which it would derive another value.
                "trust_coefficient": getattr(inner, "trust_coefficient", None),
                "loss_scale": None,
            }
            if isinstance(optimizer, DistributedOptimizer):
                optimizers[name]["loss_scale"] = restored_loss_scale.describe(optimizer.loss_scale)
        description = {
            "world_size": self.communicator.size,
            # Every checkpoint has the sums of an unfinished epoch. `fit` does not continue them.
            "epoch_sums": [[0.0] * 4] * self.communicator.size,
            "optimizers": optimizers,
            # `epochs` of the `fit` that a callback has ended here.
            "finished_fit": self.params["epochs"] if self._ends_fit else None,
            "data_seed": self._data_seed,
            # Batches of an unfinished epoch that are done.
            "batches": self.run.batches if self._is_inside_epoch else 0,
            "epoch_batches": self._data.batches,
        }
        own = rank_values.own_variables(self.model)
        recurrent = rank_values.recurrent_states(self.model)
        states = {name: np.asarray(state.numpy()) for name, state in recurrent.items()}
        if self._is_inside_epoch:
            states |= rank_values.metric_states(self.model)
        self._rank_values = rank_values.gather_differing(own, self.communicator)
        self._rank_values |= rank_values.gather(states, self.communicator)
        if self._order is not None:
            description["order"] = self._order.state_dict()
        return description


def _keep_signals() -> None:
    """Keeps SIGTERM and SIGUSR1 as requests to stop, until `fit` ends or fails."""
    is_running = FrameWatch("fit").is_running

    def exit_if_fit_has_failed() -> None:
        if not is_running():
            exit_by_signal(REQUESTS.first_signal)

    REQUESTS.begin(
        on_stop=exit_if_fit_has_failed,
        announcement="fit saves after the next step and exits with code 75",
        # Ctrl-C raises KeyboardInterrupt, as in every `fit`.
        signals=(signal.SIGTERM, signal.SIGUSR1),
    )


def _take_arrays(
    checkpoint: CheckpointArchive, prefix: str
) -> tuple[dict[str, np.ndarray], CheckpointArchive]:
    """Returns the arrays whose names begin with a prefix, and the checkpoint without them.

    Args:
      checkpoint: Checkpoint with the arrays.
      prefix: Beginning of their names, which is removed.
    """
    taken = {}
    others = {}
    for name, array in checkpoint.arrays.items():
        if name.startswith(prefix):
            taken[name.removeprefix(prefix)] = array
        else:
            others[name] = array
    return taken, dataclasses.replace(checkpoint, arrays=others)


def _broadcast_arrays(
    arrays: Sequence[np.ndarray], shapes: Iterable[Sequence[Any]], communicator: Communicator
) -> list[np.ndarray]:
    """Returns the arrays of rank 0 on all ranks; every rank calls it.

    Args:
      arrays: Arrays of rank 0; other ranks may pass none.
      shapes: Shape and dtype of each array.
      communicator: Connects the ranks.
    """
    if not arrays:
        # Rank 0 has the values, and these are overwritten.
        arrays = [np.zeros(shape, dtype) for shape, dtype in shapes]
    variables = [tf.Variable(array) for array in arrays]
    communicator.broadcast_variables(variables)
    return [variable.numpy() for variable in variables]


def _warnings(
    callbacks: Sequence[keras.callbacks.Callback], states: Mapping[str, Any]
) -> list[str]:
    """Returns lines about callbacks that do not continue as if training had not stopped."""
    lines = []
    for name in callback_state.stateful_callbacks(callbacks):
        if name not in states:
            lines.append(
                f"warning: {name.partition('#')[0]} starts from zero in this resumed run, because"
                " the checkpoint has no state of it"
            )
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.CSVLogger) and not callback.append:
            lines.append(
                f"warning: {type(callback).__name__} has overwritten the epochs before this resumed"
                f" run in {callback.filename}. Pass append=True."
            )
    return lines
