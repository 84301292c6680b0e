"""Records a run on rank 0, in its directory and on the screen. Other ranks write nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import pathlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_imagenet import __version__, files
from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.checkpoints.run_state import RunState
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.cluster import job_lines
from hybrid_imagenet.config import stored
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.models import keras_families
from hybrid_imagenet.run_plan import RunPlan
from hybrid_imagenet.runlog import jsonl, live, run_dir, summary, trackers
from hybrid_imagenet.runlog import state as run_state
from hybrid_imagenet.runlog.tensorboard import TensorBoard
from hybrid_imagenet.startup import is_terminal_output
from hybrid_imagenet.training import relative_step_advice

if TYPE_CHECKING:
    from hybrid_imagenet.training.evaluation import Validation


class Recording:
    """Writes and prints everything that a run reports.

    Attributes:
      path: The run directory; None on ranks other than 0.
      store: Writes and reads checkpoints; None on ranks other than 0.
      writer: `metrics.jsonl`, open between `start` and `finish`; None on ranks other than 0.
      view: Prints the progress of the run; silent on ranks other than 0.
    """

    def __init__(self, plan: RunPlan, rank: int, size: int):
        """Creates or reopens the run directory on rank 0.

        Args:
          plan: Plan of the run.
          rank: Rank of this process.
          size: Number of ranks.

        Raises:
          UserError: If the directory cannot be used.
        """
        self._plan = plan
        recording = plan.recording
        path = run_dir.choose_directory(
            recording.run_dir, recording.recipe, plan.data.dataset, resume=recording.resume
        )
        self._directory = None
        if rank == 0:
            self._directory = run_dir.RunDirectory(path, resume=recording.resume)
        self.path = self._directory.path if self._directory is not None else None
        self._rank = rank
        # Shows log messages in the view between `start` and `stop_logging`.
        self._handler: logging.Handler | None = None
        # Level of the package's log before `start`.
        self._earlier_level = logging.NOTSET
        # Arguments of `summary.summarize` that describe the run.
        self._summary_arguments: dict[str, Any] = {}
        # Whether no step was left at the start.
        self._was_over = False
        # `RunState.recorded_at` at the start.
        self._recorded_at_start = 0.0
        self.view = live.make_view(
            _view_mode(recording.progress, rank, size), sys.stdout, plan.epochs
        )
        self._tensorboard: TensorBoard | None = None
        self._tracker: trackers.TrackerLog | None = None
        self.writer: jsonl.MetricsWriter | None = None
        self.store: CheckpointStore | None = None
        if self._directory is not None:
            self.store = CheckpointStore(
                self._directory.path / "checkpoints",
                plan.checkpoints.keep_latest,
                keep_best=plan.checkpoints.keep_best,
                log=self.view.message,
            )
            if recording.tensorboard:
                self._tensorboard = TensorBoard(
                    str(self._directory.path / "tensorboard"), self.view.message
                )

    def announce(self, text: str) -> None:
        """Prints a message that all ranks have, on rank 0 only."""
        if self._directory is not None:
            self.view.message(text)

    def find_checkpoint(self) -> CheckpointArchive | None:
        """Returns the latest valid checkpoint with --resume, on rank 0; otherwise None.

        Raises:
          UserError: If there are checkpoints, but none is valid.
        """
        if self.store is None or self._directory is None or not self._plan.recording.resume:
            return None
        checkpoint = self.store.latest_valid()
        if checkpoint is None and (self.store.paths() or self.store.damaged_paths()):
            raise UserError(
                f"--run_dir={self._directory.path}: none of its checkpoints can be used. Copy a"
                " valid one there as step-*.npz, or start a new run."
            )
        if checkpoint is None:
            self.view.message(
                f"no checkpoint in {self._directory.path}: starting from the beginning"
            )
        return checkpoint

    def divergence(self, step: int, seconds: float, loss: float) -> None:
        """Records that training has diverged.

        Args:
          step: Step whose loss was too high, from 1.
          seconds: Wall time of the run until then.
          loss: Loss of that step, in nats.
        """
        if self.writer is not None:
            record = {"kind": "diverged", "step": step, "seconds": seconds, "train_loss": loss}
            self.writer.write(record)
            if self._tracker is not None:
                self._tracker.log(record)

    def failure(self, state: RunState, reason: str) -> None:
        """Records why training has failed.

        Args:
          state: Position at which it failed.
          reason: The line that is printed, without "error:".
        """
        if self.writer is None:
            return
        record = {
            "kind": "failed",
            "step": state.step,
            "seconds": state.seconds,
            "error": reason,
        }
        # The error that ended training is the one to report, even if the disk is full.
        with contextlib.suppress(UserError):
            self.writer.write(record)

    def start(
        self,
        facts: Mapping[str, Any],
        info: Mapping[str, Any],
        state: RunState,
        *,
        is_over: bool = False,
    ) -> None:
        """Starts the log, writes config.json and opens metrics.jsonl.

        config.json stays as it is if the run is over, because no step uses the present flags.

        Args:
          facts: World size, precision, hosts, hardware, versions and numbers of images, for
            config.json.
          info: The `info` of `runlog.progress.RunStatus`.
          state: Position of the run; `seconds` is the wall time of earlier sessions.
          is_over: Whether no step is left.
        """
        self._start_logging()
        if self._directory is None:
            return
        self._was_over = is_over
        self._recorded_at_start = state.recorded_at
        epochs_planned = self._plan.epochs
        if is_over:
            # The summary describes the run of config.json, which stays as it is.
            stored_flags = stored.read(self._directory.path)["flags"]
            epochs_planned = stored_flags.get("epochs", epochs_planned)
        self._summary_arguments = {
            "world_size": facts["world_size"],
            "images_per_epoch": facts["train_images"],
            "epochs_planned": epochs_planned,
            "target_asked": self._plan.recording.target_was_set,
            "num_classes": facts.get("num_classes"),
            "gpus": facts.get("gpu", "none") != "none",
        }
        if not is_over:
            self._start_tracker(self._write_config(facts, state.seconds))
        earlier_records = self._open_records(state)
        self._start_view(facts, info, state, earlier_records)

    def _start_logging(self) -> None:
        """Shows log messages of the package in the view: all on rank 0, warnings on others."""
        log = logging.getLogger("hybrid_imagenet")
        self._earlier_level = log.level
        level = logging.WARNING
        if self._rank == 0:
            level = logging.DEBUG if self._plan.recording.verbose else logging.INFO
        log.setLevel(level)
        self._handler = _ViewHandler(self.view, self._rank)
        log.addHandler(self._handler)

    def _start_tracker(self, config: Mapping[str, Any]) -> None:
        """Starts or continues the run of the tracker, if there is one.

        Args:
          config: Content of config.json.
        """
        assert self._directory is not None
        recording = self._plan.recording
        if recording.tracker:
            self._tracker = trackers.TrackerLog(
                recording.tracker,
                name=self._directory.path.name,
                config=config,
                print_message=self.view.message,
                project=recording.tracker_project,
                directory=self._directory.path,
            )

    def _open_records(self, state: RunState) -> list[dict[str, Any]]:
        """Opens metrics.jsonl, and makes TensorBoard continue at the same position.

        Args:
          state: Position of the run. Later records of an earlier session are removed.

        Returns:
          The records of earlier sessions; none for a new run.
        """
        assert self._directory is not None
        path = self._directory.path / "metrics.jsonl"
        if not self._directory.resumed:
            self.writer = jsonl.MetricsWriter(path)
            return []
        self.writer = jsonl.MetricsWriter(path, resume_from=(state.step, state.recorded_at))
        records = jsonl.read_records(path)
        if self._tensorboard is not None:
            self._tensorboard.hide_events_from(state.step)
            for record in records:
                # The events of this step are hidden too, or were never written.
                if record.get("step") == state.step:
                    self._tensorboard.log(record)
        return records

    def _start_view(
        self,
        facts: Mapping[str, Any],
        info: Mapping[str, Any],
        state: RunState,
        earlier_records: Sequence[Mapping[str, Any]],
    ) -> None:
        """Prints what is known before the first step."""
        assert self._directory is not None and self.writer is not None
        validated = [
            (record["epoch"], record["val_top1"])
            for record in earlier_records
            if record.get("kind") == "epoch" and record.get("val_top1") is not None
        ]
        self.view.run_started({**info, "validated": validated})
        lost = summary.lost_epochs(earlier_records, state.finished_epochs)
        if lost:
            self.view.message(
                f"{self.writer.path} has no records of {len(lost)} of the {state.finished_epochs}"
                f" finished epochs (the first is {lost[0]}), so summary and report do not include"
                " them. Put the complete file back to include them."
            )
        # In other modes the title has been printed at the start.
        title = f"{self._plan.title}, " if self._plan.recording.progress == "none" else ""
        self.view.message(
            f"{title}{facts['train_images']:,} training and {facts['validation_images']:,}"
            f" validation images, {facts['precision']}, results in {self._directory.path}"
        )
        warning = relative_step_advice.warning(self._plan) if info.get("imagenet") else None
        if warning:
            self.view.message(f"warning: {warning}")

    def _write_config(self, facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Writes config.json and returns its content.

        Args:
          facts: See `start`.
          seconds: Wall time of earlier sessions.
        """
        assert self._directory is not None
        config = {
            "format": stored.FORMAT,
            **self._plan.recording.settings,
            "version": __version__,
            "started": time.time() - seconds,
            "peak_learning_rate": self._plan.peak_learning_rate(),
            **facts,
        }
        self._directory.write_json("config.json", config)
        job_lines.notify_run(str(self._directory.path))
        return config

    def step(self, step: int, position: float, record: Mapping[str, Any] | None) -> None:
        """Advances the view, and writes the record of a step whose metrics were fetched.

        Args:
          step: Number of steps done.
          position: Fractional epochs done.
          record: Values of the step; None if they were not fetched.
        """
        if self.writer is None:
            return
        self.view.advance(step, position)
        if record is not None:
            self._write_record({"kind": "step", **record}, self.view.step)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Writes and prints the record of an epoch."""
        self._write_record({"kind": "epoch", **record}, self.view.epoch)

    def finish(self, state: RunState) -> None:
        """Closes metrics.jsonl, then writes and prints the summary.

        A session that neither trained nor recorded anything leaves summary.json as it is.

        Args:
          state: Position at which the run ends.
        """
        if self._directory is None or self.writer is None:
            return
        self.writer.close()
        records = jsonl.read_records(self.writer.path)
        values = summary.summarize(
            records,
            targets=self._plan.validation.target_top1,
            workers=self._plan.workers,
            wall_seconds=state.seconds,
            steps=state.step,
            single_gpu_images_per_second=self._plan.recording.single_gpu_images_per_second,
            stop=state.stop or "finished",
            run_dir=str(self._directory.path),
            **self._summary_arguments,
        )
        if self._was_over and state.recorded_at == self._recorded_at_start:
            values |= self._complete_summary(records, values)
        else:
            self._directory.write_json("summary.json", values)
        self._close_view(values)
        if self.store is not None:
            self.store.wait()
            lines = closing_lines(
                self._plan,
                self._directory.path,
                self.store.paths(),
                state.stop,
                is_complete=values["epochs"] >= self._plan.epochs,
            )
            for line in lines:
                self.view.message(line)
        self._directory.release()

    def _complete_summary(
        self, records: Sequence[Mapping[str, Any]], values: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Returns the summary of the session that ended the run; writes it if it is missing.

        Args:
          records: Records of the run.
          values: Their summary.
        """
        assert self._directory is not None
        written_summary = summary.read_summary(self._directory.path)
        if written_summary and run_state.describes_last_session(written_summary, records):
            return written_summary
        # A run that was killed before its planned end is not finished because this start asks for
        # fewer epochs than it has trained.
        if self._plan.epochs >= values["epochs_planned"]:
            self._directory.write_json("summary.json", values)
        return values

    def keep_image_results(self, validation: Validation) -> None:
        """Writes the results of the last validation for each image to image_results.npz.

        Raises:
          UserError: If the file cannot be written.
        """
        if self._directory is None:
            return
        path = self._directory.path / "image_results.npz"
        try:
            with files.atomic_replace(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **validation.image_results())
        except FileNotFoundError:
            raise UserError(
                f"{path.parent} was deleted during the run, so nothing more can be recorded. Start"
                " a new run."
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}. Free some disk space, then run hybrid-imagenet resume"
                f" {shlex.quote(str(path.parent))}."
            ) from None

    def stop_logging(self) -> None:
        """Stops showing log messages, because the view ends with the session."""
        if self._handler is not None:
            log = logging.getLogger("hybrid_imagenet")
            log.removeHandler(self._handler)
            log.setLevel(self._earlier_level)
            self._handler = None

    def interrupt(self) -> None:
        """Closes the files of the run without a summary, because training has failed."""
        self.stop_logging()
        if self._directory is None:
            return
        self._close_view()
        if self.writer is not None:
            # On a full disk, closing fails like the write that is the error to report.
            with contextlib.suppress(OSError):
                self.writer.close()
        if self.store is not None:
            # The error that ended training is the one to report. A start that resumes the run
            # reports a disk that cannot be written.
            with contextlib.suppress(UserError):
                self.store.wait()
        self._directory.release()

    def _close_view(self, values: Mapping[str, Any] | None = None) -> None:
        self.view.run_finished(values)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._tracker is not None:
            stop = None if values is None else values["stop"]
            self._tracker.close(trackers.STATUSES.get(stop, trackers.FINISHED))

    def _write_record(
        self, record: Mapping[str, Any], show: Callable[[Mapping[str, Any]], None]
    ) -> None:
        """Writes a record to all logs, and calls `show` to print it."""
        if self.writer is None:
            return
        self.writer.write(record)
        show(record)
        if self._tensorboard is not None:
            self._tensorboard.log(record)
        if self._tracker is not None:
            self._tracker.log(record)


class _ViewHandler(logging.Handler):
    """Prints log messages in the view; those of other ranks than 0 with their rank."""

    def __init__(self, view: live.PlainView, rank: int):
        super().__init__()
        self._view = view
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._view.message(f"rank {self._rank}: {text}" if self._rank else text)


def _view_mode(progress: str, rank: int, size: int) -> str:
    """Returns the kind of view for --progress on a rank.

    `auto` depends on the user's terminal, with which a rank may be connected by a launcher.
    """
    if rank:
        return "none"
    if progress == "auto":
        return "live" if is_terminal_output(progress, size) else "plain"
    return progress


def closing_lines(
    plan: RunPlan,
    run_dir: pathlib.Path,
    checkpoints: Sequence[pathlib.Path],
    stop: str,
    *,
    is_complete: bool = False,
) -> list[str]:
    """Returns lines with the results of a run and the commands to run next.

    Args:
      plan: Plan of the run.
      run_dir: Directory of the run.
      checkpoints: Their files, the newest first.
      stop: Why the run ended, see `RunState`.
      is_complete: Whether all epochs are done.
    """
    results = f"{_reason_of_stop(stop)}results: {run_dir}"
    if not checkpoints:
        return [results]
    results += f", newest checkpoint: {checkpoints[0].relative_to(run_dir)}"
    resume = ["hybrid-imagenet", "resume", str(run_dir)]
    report = ["hybrid-imagenet", "report", str(run_dir)]
    commands = [report, _evaluate_command(plan, run_dir), _export_command(plan, run_dir)]
    if stop == "preempted":
        commands = [resume, report]
    elif plan.max_steps is not None and not stop and not is_complete:
        commands = [resume, *commands]
    return [results, *(f"next: {shlex.join(command)}" for command in commands)]


def _reason_of_stop(stop: str) -> str:
    """Returns why a run ended, as the beginning of a line; empty if other lines say it."""
    if stop in ("", "target"):
        return ""
    if stop == "preempted":
        return "stopped on request; "
    return f"stopped by a callback ({stop}); "


def _evaluate_command(plan: RunPlan, run_dir: pathlib.Path) -> list[str]:
    """Returns the command that evaluates the result of a run on its validation images."""
    command = ["hybrid-imagenet", "evaluate", str(run_dir)]
    if plan.checkpoints.keep_best:
        command.append("--best")
    stated_data_dir = plan.recording.data_dir or ""
    data_dir = without_secrets(stated_data_dir)
    if data_dir != stated_data_dir:
        # The run does not store the password.
        command.append(f"--data_dir={data_dir}")
    return command + _model_argument(plan.network.model)


def _export_command(plan: RunPlan, run_dir: pathlib.Path) -> list[str]:
    """Returns the command that exports the result of a run, to a format that works here."""
    # A Keras file needs no package that this environment may lack.
    suffix = ".keras"
    if all(importlib.util.find_spec(name) for name in ("onnx", "tf2onnx", "onnxruntime")):
        suffix = ".onnx"
    command = ["hybrid-imagenet", "export", str(run_dir)]
    if plan.checkpoints.keep_best:
        command.append("--best")
    command.append(f"--to={run_dir / 'network'}{suffix}")
    return command + _model_argument(plan.network.model)


def _model_argument(model: str) -> list[str]:
    """Returns the flag without which other commands do not import the user's function."""
    return [f"--model={model}"] if keras_families.is_user_function(model) else []
