"""Runs one session of a training on this rank: restores, trains, validates, sums up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.checkpoints.restore import check_position, restore_arrays
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.comm import Communicator
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.numerics import run_length
from hybrid_imagenet.resilience.preemption import Control
from hybrid_imagenet.resilience.stop_signals import REQUESTS
from hybrid_imagenet.stages import START
from hybrid_imagenet.training import accumulators, build, callback_list, same_data, warm_start
from hybrid_imagenet.training.callbacks.divergence import DivergedError
from hybrid_imagenet.training.loop import Loop
from hybrid_imagenet.training.parts import Parts


@contextlib.contextmanager
def together(communicator: Communicator) -> Iterator[None]:
    """Ends all ranks with one message and exit code if a rank raises UserError inside."""
    found = None
    try:
        yield
    except UserError as error:
        found = error
    communicator.agree(found)


class Session(Parts):
    """Runs one start of a run on this rank, from the restored state to the summary."""

    def run(self) -> str:
        """Restores, trains and sums up."""
        self.watchdog.start()
        try:
            try:
                self._train()
            except DivergedError as error:
                self.recording.diverged(self.state.step, self.state.seconds, error.loss)
                self.recording.interrupt()
                raise
            finally:
                self.watchdog.stop()
            self.recording.finish(
                world_size=self.communicator.size,
                train_images=self.data.source.num_examples,
                seconds=self.state.seconds,
                stop=self.state.stop,
            )
        finally:
            self.recording.stop_logging()
        return self.state.stop

    def _train(self) -> None:
        begins_with: list[str] = []
        with together(self.communicator):
            checkpoint = self.recording.find_checkpoint()
            if checkpoint is None and self.config.init_from and self.communicator.rank == 0:
                begins_with = warm_start.load(self.config.init_from, self.model)
        self._share_state(checkpoint)
        with together(self.communicator):
            if checkpoint is not None:
                same_data.check_resumed(checkpoint, self.sources)
                restore_arrays(checkpoint, self.variables())
                check_position(checkpoint, self.data.order)
            self.recording.start(self.facts, self._info(), self.state)
        for line in begins_with:
            self.recording.announce(f"--init_from: {line}")
        for note in dict.fromkeys((*self.data.source.notes, *self.validation_source.notes)):
            self.recording.announce(f"data: {note}")
        if self.state.step:
            self.recording.announce(self._resumed())
        control = Control(self.config.checkpoint_every_seconds if self.communicator.rank == 0 else None)
        REQUESTS.begin()
        try:
            START.begin("compiling the step")
            self._loop(control).run()
        finally:
            REQUESTS.end()

    def _share_state(self, checkpoint: Checkpoint | None) -> None:
        """Gives every rank the restored position and sums; the variables follow with the initial broadcast."""
        meta = self.communicator.broadcast_object(checkpoint.meta if checkpoint else None)
        if meta is not None:
            self.state = RunState.from_dict(meta["state"])
            if self.state.hyper:
                self.optimizer.inner.hyper.assign(self.state.hyper)
            rank, size = self.communicator.rank, self.communicator.size
            self.data.restore_replaced(meta.get("replaced"))
            self.step.sums.restore(accumulators.restore_sums(meta["epoch_sums"], rank, size))
            if len(meta["square_norms"]) == size:  # on other ranks the estimate of the epoch begins anew
                self.optimizer.square_norms.assign(meta["square_norms"][rank])

    def _info(self) -> dict[str, Any]:
        """Returns the facts that the view shows before training begins."""
        imagenet = self.config.model == "resnet50" and self.data.source.num_classes == 1000
        return {
            "world_size": self.communicator.size,
            "gpus": self.facts.get("gpu", "none") != "none",
            "optimizer": self.config.optimizer,
            "images_per_epoch": self.data.source.num_examples,
            "steps_per_epoch": self.data.order.batches_in_epoch(self.global_batch()),
            "global_batch": self.global_batch(),
            "reference_batch": self.global_batch() if imagenet else None,
            "step": self.state.step,
            "finished_epochs": self.state.finished_epochs,
            "epochs": self.data.order.position(self.state.cursor),
            "ends_at": self.data.length.ends_at(self.data.global_batch),
            "num_classes": self.data.source.num_classes,
            "target": self.config.target_top1[0] if self.config.target_top1 else None,
            "single_gpu_images_per_second": self.recording.single_gpu_throughput,
        }

    def _resumed(self) -> str:
        start = self.data.order.position(self.state.cursor)
        rate = self.schedule(start, start, self.global_batch())["learning_rate"]
        return f"resumed at epoch {start:.3f}, step {self.state.step}, learning rate {rate:.4g}"

    def _loop(self, control: Control) -> Loop:
        config = self.config
        return Loop(
            state=self.state,
            step=self.step,
            length=self.data.length,
            batches=self.data.sizes,
            data=self.data.stream,
            validate=self._validate,
            validate_after=self._validate_after,
            control=control,
            world_size=config.gpus,
            log_every=config.log_every_steps,
            callbacks=self.callbacks(),
        )

    def callbacks(self) -> list[keras.callbacks.Callback]:
        """Returns the callbacks of the run, in the order of calls."""
        return callback_list.in_order(self)

    def _validate(self) -> dict[str, Any]:
        """Returns the results of one pass over the validation images, and a description of these."""
        values = self.validation.run(self.watchdog.note)
        if self.validation.right is not None:
            self.recording.keep_image_results(self.validation.right)
        if self.validation.start_seconds:
            values["validation_start_seconds"] = self.validation.start_seconds
        return {"val_split": build.validated_split(self.config), **values}

    def _validate_after(self, position: float) -> bool:
        every, offset = self.config.eval_every_epochs, self.config.eval_offset_epochs
        if self.data.length.reached(self.state.cursor, self.state.step):
            return True
        return run_length.passed(every, offset, self.state.closed_at, position)
