"""Records a run on rank 0: its directory, records, view and summary. Other ranks have a recording that is silent."""

from __future__ import annotations

import contextlib
import json
import logging
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import __version__
from hybrid_imagenet.checkpoints.archive import Checkpoint
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.config import Config, derived, report
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.optimizers.registry import OPTIMIZERS
from hybrid_imagenet.resilience.rollback import Rollback
from hybrid_imagenet.runlog import gaps, jsonl, live, run_dir, standard_logs, summary, trackers
from hybrid_imagenet.stages import on_terminal
from hybrid_imagenet.training import closing

_IMAGENET_CLASSES = 1000


class Recording:
    """Keeps the run directory and everything that is written to it or shown.

    Attributes:
      path: the run directory; None on ranks other than 0.
      store: the checkpoints; None on ranks other than 0.
      writer: metrics.jsonl, open between `start` and `finish`; None on ranks other than 0.
      view: shows the run; silent on ranks other than 0.
      board: TensorBoard's files on rank 0, if they are asked for; else None.
      single_gpu: images per second of one GPU alone (--single_gpu), or None.
    """

    def __init__(self, config: Config, rank: int, size: int, note: str = "", held: pathlib.Path | None = None):
        """Creates or re-opens the run directory on rank 0.

        Args:
          config: names the directory, and what else is recorded and shown.
          rank: of this process.
          size: number of ranks.
          note: shown when the run begins.
          held: the directory of the run under way, when the ranks have changed.

        Raises:
          UserError: if it cannot be used.
        """
        self._config = config
        self._note = note
        self.single_gpu = summary.single_gpu_speed(config.single_gpu) if config.single_gpu else None
        self._directory = _open(config, held) if rank == 0 else None
        self.path = self._directory.path if self._directory is not None else None
        self._rank = rank
        self._handler: logging.Handler | None = None
        self._meaning: dict[str, Any] = {}  # what results are compared with, for the summary
        self._level = logging.NOTSET
        self.board: trackers.Optional | None = None
        self.view = self._make_view(rank, size)
        self.writer: jsonl.MetricsWriter | None = None
        self.store: CheckpointStore | None = None
        if self._directory is not None:
            self.store = CheckpointStore(
                self._directory.path / "checkpoints", config.keep, keep_best=config.keep_best, report=self.view.message
            )

    def announce(self, text: str) -> None:
        """Shows what all ranks know alike, once: on rank 0."""
        if self._directory is not None:
            self.view.message(text)

    def find_checkpoint(self) -> Checkpoint | None:
        """Returns the newest good checkpoint on rank 0, if the run is to be resumed.

        Raises:
          UserError: if there are checkpoints, but none can be read.
        """
        if self.store is None or self._directory is None or not self._config.resume:
            return None
        checkpoint = self.store.newest_good()
        if checkpoint is None and (self.store.paths() or self.store.set_aside()):
            raise UserError(
                f"--run_dir={self._directory.path}: none of its checkpoints can be used; put a sound one there under "
                "its name step-*.npz, or start a new run"
            )
        if checkpoint is None:
            self.view.message(f"no checkpoint in {self._directory.path}: starting from the beginning")
        return checkpoint

    def last_good_checkpoint(self, rollback: Rollback) -> Checkpoint | None:
        """Returns the checkpoint to roll back to, on rank 0; None for the beginning. Later ones are removed."""
        if self.store is None:
            return None
        self.store.remove_after(rollback.good_step)
        return self.store.newest_good()

    def diverged(self, step: int, seconds: float, loss: float) -> None:
        """Records that training has diverged; a rollback removes the record with those of the steps it goes back."""
        if self.writer is not None:
            self.writer.write({"kind": "diverged", "step": step, "seconds": seconds, "train_loss": loss})

    def rolled_back(self, rollback: Rollback, step: int, factor: float) -> None:
        """Records and shows a rollback to `step`, after which all learning rates are `factor` times the schedule's."""
        if self.writer is None:
            return
        self.writer.write(
            {
                "kind": "rollback",
                "step": step,
                "seconds": rollback.seconds,
                "train_loss": rollback.loss,
                "diverged_step": rollback.step,
                "rollbacks": rollback.count,
                "learning_rate_factor": factor,
            }
        )
        self.view.message(
            f"training diverged at step {rollback.step} (loss {rollback.loss:.4g}): back to step {step}, "
            f"learning rates times {factor:g}"
        )

    def start(self, facts: Mapping[str, Any], info: Mapping[str, Any], state: RunState) -> None:
        """Writes config.json and opens metrics.jsonl.

        Args:
          facts: world size, precision, hosts, hardware, versions and numbers of images, for config.json.
          info: what the view needs beforehand, see `metrics.progress.Status`.
          state: where the run stands; `seconds` is the wall time of earlier sessions.
        """
        log = logging.getLogger("hybrid_imagenet")
        self._level = log.level
        log.setLevel(logging.INFO if self._rank == 0 else logging.WARNING)
        self._handler = _ToView(self.view, self._rank)
        log.addHandler(self._handler)
        if self._directory is None:
            return
        self._meaning = {
            "epochs_planned": self._config.epochs,
            "target_asked": self._config.origins.get("target", "default") != "default",
            "imagenet": facts.get("num_classes") == _IMAGENET_CLASSES,
            "gpus": facts.get("gpu", "none") != "none",
        }
        flags = _shown(self._config)
        started = time.time() - state.seconds
        self._directory.write_json(
            "config.json",
            {
                "flags": flags,
                "origins": dict(self._config.origins),
                "version": __version__,
                "started": started,
                **facts,
            },
        )
        resume_from = (state.step, state.closed_at) if self._directory.resumed else None
        self.writer = jsonl.MetricsWriter(self._directory.path / "metrics.jsonl", resume_from=resume_from)
        self.view.run_started(info)
        self._note_missing(self.writer, state)
        if self._note:
            self.view.message(self._note)
        virtual = f"{self._config.virtual_gpus} virtual GPUs x " if self._config.virtual_gpus > 1 else ""
        self.view.message(
            f"{self._config.model}, {self._config.dataset} ({facts['train_images']} training and "
            f"{facts['validation_images']} validation images), {facts['world_size']} ranks x {virtual}"
            f"{self._config.per_gpu_batch} images, {facts['precision']}, results in {self._directory.path}"
        )
        if self._config.warmup_epochs >= self._config.epochs and OPTIMIZERS[self._config.optimizer].bounded_warmup:
            self.view.message(
                f"all {self._config.epochs:g} epochs lie inside of the warmup of {self._config.warmup_epochs:g} "
                "epochs: SGD will not be reached"
            )
        imagenet = info.get("reference_batch") is not None
        workers = derived.workers(self._config, facts["world_size"])
        for text in report.warnings(self._config, workers, imagenet=imagenet):
            self.view.message(text)

    def _note_missing(self, writer: jsonl.MetricsWriter, state: RunState) -> None:
        """Records and shows which finished epochs have lost their records, and what the checkpoint knows of them."""
        missing = gaps.find(jsonl.read(writer.path), state.finished_epochs)
        if not missing:
            return
        best = state.best_top1 if state.best_epoch or state.best_top1 else None
        writer.write(
            {
                "kind": "gap",
                "epoch": state.finished_epochs,
                "step": state.step,
                "seconds": state.seconds,
                "lost_epochs": missing,
                "best_val_top1": best,
                "best_epoch": state.best_epoch or None,
            }
        )
        known = "" if best is None else f"; the checkpoint knows of a best top-1 of {100 * best:.2f} %"
        at = f" in epoch {state.best_epoch}" if state.best_epoch else ""
        self.view.message(
            f"{writer.path} has no records of epoch {gaps.ranges(missing)} of the {state.finished_epochs} finished"
            f"{known}{at}; reports leave out those epochs"
        )

    def finish(self, *, world_size: int, train_images: int, seconds: float, stop: str) -> None:
        """Closes metrics.jsonl, writes summary.json and the standard logs, and shows the summary."""
        if self._directory is None or self.writer is None:
            return
        self.writer.close()
        values = summary.summarize(
            jsonl.read(self.writer.path),
            world_size=world_size,
            images_per_epoch=train_images,
            targets=self._config.target,
            wall_seconds=seconds,
            single_gpu_images_per_second=self.single_gpu,
            stop=stop or "finished",
            run_dir=str(self._directory.path),
            **self._meaning,
        )
        self._directory.write_json("summary.json", values)
        standard_logs.write(self._directory.path)
        self.view.run_finished(values)
        if self.store is not None:
            self.store.wait()
            for line in closing.lines(self._config, self._directory.path, self.store.paths(), stop):
                self.view.message(line)
        self._directory.release()

    def keep_image_results(self, right: npt.NDArray[np.bool_]) -> None:
        """Writes which images the last validation got right, on rank 0.

        Raises:
          UserError: if that fails.
        """
        if self._directory is None:
            return
        path = self._directory.path / "image_results.npy"
        try:
            with path.with_suffix(".tmp").open("wb") as file:
                np.save(file, right)
            path.with_suffix(".tmp").replace(path)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; make room, and start again with --resume") from None

    def stop_logging(self) -> None:
        """Shows no more of what the parts log: the view ends with the session."""
        if self._handler is not None:
            log = logging.getLogger("hybrid_imagenet")
            log.removeHandler(self._handler)
            log.setLevel(self._level)
            self._handler = None

    def interrupt(self) -> None:
        """Lets go of the run's files, so that another process can go on with them as rank 0."""
        self.stop_logging()
        if self._directory is None:
            return
        self.view.run_finished()
        if self.writer is not None:
            self.writer.close()
        if self.store is not None:
            with contextlib.suppress(UserError):  # the next rank 0 meets the same disk
                self.store.wait()
        self._directory.release()

    def _make_view(self, rank: int, size: int) -> live.View:
        view = live.make_view(_view_mode(self._config, rank, size), sys.stdout, self._config.epochs)
        sinks = [view]
        if self._directory is not None and self._config.tensorboard:
            folder = str(self._directory.path / "tensorboard")
            self.board = trackers.Optional("TensorBoard", lambda: trackers.TensorBoard(folder), view.message)
            sinks.append(self.board)
        if self._directory is not None and self._config.tracker != "none":
            flags = _shown(self._config)
            name, run = self._config.tracker, self._directory.path.name
            sinks.append(trackers.Optional(name, lambda: trackers.Tracker(name, run, flags), view.message))
        return trackers.Fanout(sinks) if len(sinks) > 1 else view


def _shown(config: Config) -> dict[str, Any]:
    """Returns the flags as they may be stored and sent: without passwords and tokens."""
    flags = json.loads(config.to_json())
    return {name: without_secrets(value) if isinstance(value, str) else value for name, value in flags.items()}


class _ToView(logging.Handler):
    """Shows the log messages of the parts, once: those of rank 0, and warnings of the others with their rank."""

    def __init__(self, view: live.View, rank: int):
        super().__init__()
        self._view = view
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        """Shows one message."""
        self._view.message(record.getMessage(), self._rank or None)


def _open(config: Config, held: pathlib.Path | None) -> run_dir.RunDirectory:
    if held is not None:
        return run_dir.RunDirectory(held, resume=True)
    path = run_dir.chosen(config.run_dir, config.recipe, config.dataset, resume=config.resume)
    return run_dir.RunDirectory(path, resume=config.resume)


def _view_mode(config: Config, rank: int, size: int) -> str:
    """Resolves `auto` where a launcher stands between us and the user's terminal."""
    if rank:
        return "none"
    if config.progress == "auto" and size > 1:
        return "live" if on_terminal(config.progress, size) else "plain"
    return config.progress
