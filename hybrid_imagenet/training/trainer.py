"""Does what a run needs around its steps, from the restored state to the summary; `Loop` calls
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from hybrid_imagenet.checkpoints import run_state
from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.checkpoints.run_state import check_epoch_order, restore_arrays
from hybrid_imagenet.config import derived, relative_step_advice
from hybrid_imagenet.data import class_sizes
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.schedules import run_length
from hybrid_imagenet.training import accumulators, build, same_data, warm_start
from hybrid_imagenet.training.checkpoint_saver import CheckpointSaver
from hybrid_imagenet.training.divergence import DivergedError, DivergenceGuard
from hybrid_imagenet.training.epoch_values import Costs, NumericsGuard, TrustRatios, WeightCheck
from hybrid_imagenet.training.inputs import ExampleCount, all_replaced
from hybrid_imagenet.training.parts import Parts
from hybrid_imagenet.training.profiler import Profiler

Values = Callable[[int], Mapping[str, Any]]
"""Gives values of an epoch, counted from 0, for its record; every rank calls it."""


class Trainer:
    """Restores a run, does what is due at each step and epoch of the loop, and sums up.

    Attributes:
      parts: what it trains with.
      saver: of checkpoints, once the run is restored.
    """

    def __init__(self, parts: Parts):
        self.parts = parts

    def restore(self) -> None:
        """Gives all ranks the state of the newest good checkpoint, else of --init_from, else of
        rank 0's start.

        Raises:
          UserError: on all ranks, if a checkpoint, file or directory cannot be used.
        """
        parts, lines = self.parts, list[str]()
        parts.watchdog.start()
        with parts.communicator.raise_on_all_ranks():
            checkpoint = parts.recording.find_checkpoint()
            if checkpoint is None and parts.config.init_from and parts.communicator.rank == 0:
                lines = warm_start.load(parts.config.init_from, parts.model)
                if parts.optimizer.average is not None:
                    parts.optimizer.average.restart()
        self._share_position(checkpoint)
        with parts.communicator.raise_on_all_ranks():
            if checkpoint is not None:
                same_data.check_resumed(checkpoint, parts.sources)
                restore_arrays(checkpoint, parts.variables())
                check_epoch_order(checkpoint, parts.data.order)
                self._check_phase()
                scale = parts.optimizer.loss_scale
                if (
                    not scale.dynamic
                    or checkpoint.meta.get("precision") != parts.facts["precision"]
                ):
                    scale.scale.assign(scale.initial)
            over = parts.data.length.is_over(parts.state.cursor, parts.state.step)
            parts.recording.start(parts.facts, self._info(), parts.state, over=over)
        # before the ranks meet: once one says that it compiles, a signal saves on all of them
        REQUESTS.begin()
        parts.communicator.broadcast_variables(
            [v.value for v in parts.variables().values()]
        )  # Lu et al. §2.2.3
        factory.set_rank_seeds(parts.model, parts.communicator.rank)
        self._prepare()
        for line in (*(f"--init_from: {line}" for line in lines), *self._notes()):
            parts.recording.announce(line)

    def _check_phase(self) -> None:
        """Raises UserError if a run that is past its AdaBound warmup would begin another, with
        SGD's velocity in it.
        """
        if self.parts.state.hyper.get("phase", 0.0) > self._scheduled().get("phase", 1.0):
            raise UserError(
                "--warmup_epochs: the run is past its warmup; resume with the number of epochs that"
                " it had"
            )

    def _scheduled(self) -> Mapping[str, float]:
        """The scalars of a step at the present position."""
        data, cursor = self.parts.data, self.parts.state.cursor
        start = data.order.position(cursor)
        return self.parts.schedule(start, start, data.global_batch(cursor.epoch))

    def finish(self) -> str:
        """Writes the summary; returns why the run ended: "" (all epochs), "target" or
        "preempted".
        """
        parts = self.parts
        parts.watchdog.stop()
        parts.recording.finish(parts.state)
        return parts.state.stop

    def close(self) -> None:
        """Ends the watchdog, the log and the wait for signals, also of a run that an error has
        ended.
        """
        REQUESTS.end()
        self.parts.watchdog.stop()
        self.parts.recording.stop_logging()

    # What the loop calls.

    def step_begins(self, start: float, end: float, global_batch: int) -> None:
        """Readies a step that covers the fractional epochs `start` to `end`."""
        if self._profiler is not None:
            self._profiler.after(self.parts.state.step)
        self.parts.state.hyper = dict(self.parts.schedule(start, end, global_batch))
        self.parts.optimizer.inner.hyperparameters.assign(self.parts.state.hyper)
        self.parts.updates.step_begins(start, end)

    def step_ends(self, position: float, record: dict[str, Any] | None, save: bool) -> None:
        """Completes a record, if metrics were fetched, and saves if it is due or `save` asks for
        it.

        Raises:
          NumericsError: if training has diverged, or only skips steps.
        """
        parts, step = self.parts, self.parts.state.step
        parts.updates.step_ends()
        parts.watchdog.record_progress(step)
        if record is not None:
            record |= self._hyperparameters()
            record |= self._numerics.check(step, record["train_loss"])
            self._divergence.look()
        parts.recording.step(step, position, record)
        self.saver.after_step(position, asked=save)

    def validates(self, position: float) -> bool:
        """Whether to validate where this many fractional epochs are done."""
        config, state = self.parts.config, self.parts.state
        if self.parts.data.length.is_over(state.cursor, state.step):
            return True
        offset = derived.evaluation_offset(config)
        return run_length.is_due(config.eval_every_epochs, offset, state.recorded_at, position)

    def validate(self) -> dict[str, Any]:
        """Returns the results of one pass over the validation images, and a description of these.

        Raises:
          UserError: on all ranks, for images that cannot be used; what was trained is saved.
        """
        parts = self.parts
        self._divergence.look()
        parts.statistics.synchronize()
        try:
            with (
                parts.averaged.in_place()
                if parts.averaged is not None
                else contextlib.nullcontext()
            ):
                values = parts.validation.run(parts.watchdog.record_progress)
        except UserError:
            self.saver.finish()
            raise
        parts.recording.keep_image_results(parts.validation)
        if parts.validation.start_seconds:
            values["validation_start_seconds"] = parts.validation.start_seconds
        return {"val_split": derived.validated_split(parts.config), **values}

    def epoch_ends(self, epoch: int, record: dict[str, Any]) -> None:
        """Completes the record of an epoch, counted from 0, or of a part of one; saves; stops at a
        target.

        Args:
          epoch: the one that is trained.
          record: what is known of it; `sums` are those of its examples on this rank, and leave the
            record.
        """
        parts = self.parts
        parts.watchdog.record_progress()
        self._divergence.look()
        record |= self._hyperparameters()
        record |= accumulators.over_ranks(
            record.pop("sums"), parts.communicator.allreduce_sum
        ).means("train")
        for values in self._epoch_values:
            record |= values(epoch)
        record |= parts.updates.of_epoch(record["epoch"])
        top1 = record.get("val_top1")
        if top1 is not None:
            self._judge(top1, record["epoch"])
        parts.recording.epoch(record)
        self.saver.after_epoch(record["epoch"], top1)

    def loop_ends(self) -> None:
        """Saves what is not saved yet, after the last step.

        Raises:
          DivergedError: on all ranks, if it had diverged.
        """
        self._divergence.look()
        if self._profiler is not None:
            self._profiler.finish()
        self.saver.finish()

    def diverged(self, error: DivergedError) -> None:
        """Records that training has diverged, and closes the run's files."""
        self.parts.recording.diverged(error.step, self.parts.state.seconds, error.loss)
        self.parts.recording.interrupt()

    def _hyperparameters(self) -> dict[str, float]:
        """The scalars of the last step, also of one before a restart, for a record."""
        hyper = self.parts.state.hyper
        relative = relative_step_advice.at_step(self.parts.config, hyper) if hyper else None
        return hyper if relative is None else {**hyper, "relative_step": relative}

    def _judge(self, top1: float, epochs: float) -> None:
        """Keeps the best validation top-1, and stops after the validation that reaches
        --stop_at_top1.
        """
        state, target = self.parts.state, self.parts.config.stop_at_top1
        if top1 > state.best_top1 or not state.best_epoch:
            state.best_top1, state.best_epoch = float(top1), epochs
        if target is not None and top1 >= target:
            state.stop = "target"

    def _prepare(self) -> None:
        """Makes what depends on the restored position, and lists the values of an epoch's
        record.
        """
        parts, config, recording = self.parts, self.parts.config, self.parts.recording
        optimizer, gather, step = parts.optimizer, parts.communicator.allgather_object, parts.step
        weights = parts.model.trainable_variables
        self._numerics = NumericsGuard(optimizer, config.max_skipped_steps, step.copies)
        self._divergence = DivergenceGuard(parts.state, step.alarm, step.copies, gather)
        self._profiler = None
        if config.profile_steps and recording.path is not None:
            self._profiler = Profiler(
                config.profile_steps, recording.path / "profile", step.sums.read, recording.announce
            )
        self.saver = CheckpointSaver(
            store=recording.store,
            state=parts.state,
            variables=parts.variables,
            describe=self._checkpoint_meta,
            is_last=lambda done: parts.data.length.is_over(parts.state.cursor, parts.state.step),
            every_epochs=config.checkpoint_every_epochs,
            every_steps=config.checkpoint_every_steps,
            save_best=config.keep_best,
            begins_at=parts.data.order.position(parts.state.cursor),
        )
        self._epoch_values: tuple[Values, ...] = (
            parts.data.facts,
            ExampleCount(parts.data, parts.state, gather),
            lambda epoch: self._numerics.values(),
            TrustRatios(optimizer.inner, weights),
            WeightCheck(gather, weights),
            Costs(
                parts.communicator,
                parts.data.source.reads,
                self.saver.take_seconds,
                optimizer.reducer.statistics,
            ),
        )

    def _checkpoint_meta(self) -> dict[str, Any]:
        """Readies the statistics for a checkpoint and describes it, or ends a run that has
        diverged.

        Every rank calls it.
        """
        parts = self.parts
        self._divergence.look()
        parts.statistics.synchronize()
        if parts.averaged is not None:
            parts.averaged.refresh()
        sums, gather = parts.step.sums.read(), parts.communicator.allgather_object
        return {
            **build.description(parts.config, parts.data.source),
            "precision": parts.facts["precision"],
            "val_split": derived.validated_split(parts.config),
            "world_size": parts.communicator.size,
            "order": run_state.describe_order(parts.data.order),
            "data": {name: source.identity for name, source in parts.sources.items()},
            "epoch_sums": gather([sums.loss, sums.top1, sums.top5, sums.count]),
            "replaced": all_replaced(parts.data, parts.state.finished_epochs, gather),
        }

    def _share_position(self, checkpoint: CheckpointArchive | None) -> None:
        """Gives every rank the restored position and sums; the variables follow."""
        parts = self.parts
        meta = parts.communicator.broadcast_object(checkpoint.meta if checkpoint else None)
        if meta is None:
            return
        parts.state.restore(meta["state"])
        named = (
            self._scheduled()
        )  # without --hybrid_ramp_epochs it leaves out LARS's share, which then is 1
        parts.state.hyper = {
            name: value for name, value in parts.state.hyper.items() if name in named
        }
        parts.optimizer.inner.hyperparameters.assign(parts.state.hyper)
        rank, size = parts.communicator.rank, parts.communicator.size
        parts.data.restore_replaced(meta.get("replaced"))
        parts.step.sums.restore(accumulators.restore_sums(meta["epoch_sums"], rank, size))

    def _notes(self) -> list[str]:
        """What the user should know of the data and of the position."""
        parts = self.parts
        found = list(
            dict.fromkeys(
                f"data: {note}" for source in parts.sources.values() for note in source.notes
            )
        )
        if parts.class_weights is not None:
            names = parts.data.source.class_names
            found.append(class_sizes.describe_weights(parts.class_weights, names))
        if parts.data.length.is_over(parts.state.cursor, parts.state.step):
            found.append(
                f"the run was over at step {parts.state.step}: raise --epochs or --max_steps to"
                " train further"
            )
        elif parts.state.step:
            start = parts.data.order.position(parts.state.cursor)
            rate = self._scheduled()["learning_rate"]
            found.append(
                f"resumed at epoch {start:.3f}, step {parts.state.step}, learning rate {rate:.4g}"
            )
        return found

    def _info(self) -> dict[str, Any]:
        """What the view shows before training begins, see `runlog.progress.Status`."""
        parts, config = self.parts, self.parts.config
        imagenet = config.model == "resnet50" and parts.data.source.num_classes == 1000
        return {
            "world_size": parts.communicator.size,
            "gpus": parts.facts.get("gpu", "none") != "none",
            "optimizer": config.optimizer,
            "images_per_epoch": parts.data.source.num_examples,
            "num_classes": parts.data.source.num_classes,
            "imagenet": imagenet,
            "step": parts.state.step,
            "finished_epochs": parts.state.finished_epochs,
            "epochs": parts.data.order.position(parts.state.cursor),
            "ends_at": parts.data.length.end_position(parts.data.global_batch),
            "target": config.target_top1[0] if config.target_top1 else None,
            "single_gpu_images_per_second": parts.config.single_gpu_throughput,
        }
