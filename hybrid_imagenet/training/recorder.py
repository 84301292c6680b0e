"""Records a run on rank 0: its directory, records, view and summary. Other ranks have a recording
that is silent.
"""

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
from hybrid_imagenet.config import Origin, RunConfig, derived
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.runlog import jsonl, live, run_dir, summary, trackers
from hybrid_imagenet.runlog.tensorboard import TensorBoard
from hybrid_imagenet.startup import is_terminal_output
from hybrid_imagenet.training import relative_step_advice

if TYPE_CHECKING:
    from hybrid_imagenet.training.evaluation import Validation


class Recording:
    """Keeps the run directory and everything that is written to it or shown.

    Attributes:
      path: the run directory; None on ranks other than 0.
      store: the checkpoints; None on ranks other than 0.
      writer: metrics.jsonl, open between `start` and `finish`; None on ranks other than 0.
      view: shows the run; silent on ranks other than 0.
    """

    def __init__(self, config: RunConfig, rank: int, size: int):
        """Creates or re-opens the run directory on rank 0.

        Args:
          config: names the directory, and what else is recorded and shown.
          rank: of this process.
          size: number of ranks.

        Raises:
          UserError: if it cannot be used.
        """
        self._config = config
        path = run_dir.choose_directory(
            config.run_dir, config.recipe, config.dataset, resume=config.resume
        )
        self._directory = run_dir.RunDirectory(path, resume=config.resume) if rank == 0 else None
        self.path = self._directory.path if self._directory is not None else None
        self._rank = rank
        self._handler: logging.Handler | None = None
        self._meaning: dict[
            str, Any
        ] = {}  # what results are of and are compared with, for the summary
        self._level = logging.NOTSET
        self.view = live.make_view(_view_mode(config, rank, size), sys.stdout, config.epochs)
        self._tensorboard: TensorBoard | None = None
        self._tracker: trackers.TrackerLog | None = None
        self.writer: jsonl.MetricsWriter | None = None
        self.store: CheckpointStore | None = None
        if self._directory is not None:
            self.store = CheckpointStore(
                self._directory.path / "checkpoints",
                config.keep_checkpoints,
                keep_best=config.keep_best,
                log=self.view.message,
            )
            if config.tensorboard:
                self._tensorboard = TensorBoard(
                    str(self._directory.path / "tensorboard"), self.view.message
                )

    def announce(self, text: str) -> None:
        """Shows what all ranks know alike, once: on rank 0."""
        if self._directory is not None:
            self.view.message(text)

    def find_checkpoint(self) -> CheckpointArchive | None:
        """Returns the newest good checkpoint on rank 0, if the run is to be resumed.

        Raises:
          UserError: if there are checkpoints, but none can be read.
        """
        if self.store is None or self._directory is None or not self._config.resume:
            return None
        checkpoint = self.store.latest_valid()
        if checkpoint is None and (self.store.paths() or self.store.damaged_paths()):
            raise UserError(
                f"--run_dir={self._directory.path}: none of its checkpoints can be used; put a"
                " sound one there under its name step-*.npz, or start a new run"
            )
        if checkpoint is None:
            self.view.message(
                f"no checkpoint in {self._directory.path}: starting from the beginning"
            )
        return checkpoint

    def diverged(self, step: int, seconds: float, loss: float) -> None:
        """Records that training has diverged."""
        if self.writer is not None:
            record = {"kind": "diverged", "step": step, "seconds": seconds, "train_loss": loss}
            self.writer.write(record)
            if self._tracker is not None:
                self._tracker.log(record)

    def start(
        self,
        facts: Mapping[str, Any],
        info: Mapping[str, Any],
        state: RunState,
        *,
        over: bool = False,
    ) -> None:
        """Writes config.json, unless there is nothing left to train with it, and opens
        metrics.jsonl.

        Args:
          facts: world size, precision, hosts, hardware, versions and numbers of images, for
          config.json.
          info: what the view needs beforehand, see `runlog.progress.RunStatus`.
          state: where the run stands; `seconds` is the wall time of earlier sessions.
          over: no step is left.
        """
        log = logging.getLogger("hybrid_imagenet")
        self._level = log.level
        shown = logging.DEBUG if self._config.verbose else logging.INFO
        log.setLevel(shown if self._rank == 0 else logging.WARNING)
        self._handler = _ToView(self.view, self._rank)
        log.addHandler(self._handler)
        if self._directory is None:
            return
        self._meaning = {
            "world_size": facts["world_size"],
            "images_per_epoch": facts["train_images"],
            "epochs_planned": self._config.epochs,
            "target_asked": self._config.origins["target_top1"] is not Origin.DEFAULT,
            "num_classes": facts.get("num_classes"),
            "gpus": facts.get("gpu", "none") != "none",
        }
        if not over:
            config = self._write_config(facts, state.seconds)
            if self._config.tracker:
                self._tracker = trackers.TrackerLog(
                    self._config.tracker,
                    name=self._directory.path.name,
                    config=config,
                    print_message=self.view.message,
                    project=self._config.tracker_project,
                    directory=self._directory.path,
                )
        resume_from = (state.step, state.recorded_at) if self._directory.resumed else None
        self.writer = jsonl.MetricsWriter(
            self._directory.path / "metrics.jsonl", resume_from=resume_from
        )
        earlier = jsonl.read_records(self.writer.path) if resume_from else []
        if self._tensorboard is not None and resume_from:
            self._tensorboard.hide_events_from(state.step)
            for record in earlier:
                if record.get("step") == state.step:  # the epoch's record may be lost, or not
                    self._tensorboard.log(record)
        validated = [
            (record["epoch"], record["val_top1"])
            for record in earlier
            if record.get("kind") == "epoch" and record.get("val_top1") is not None
        ]
        self.view.run_started({**info, "validated": validated})
        if lost := summary.lost_epochs(earlier, state.finished_epochs):
            self.view.message(
                f"{self.writer.path} has no records of {len(lost)} of the {state.finished_epochs}"
                f" finished epochs (the first is {lost[0]}): summary and report are of the others;"
                " put the file back to have all"
            )
        title = (
            f"{derived.title(self._config)}, " if self._config.progress == "none" else ""
        )  # else it is printed
        self.view.message(
            f"{title}{facts['train_images']:,} training and {facts['validation_images']:,}"
            f" validation images, {facts['precision']}, results in {self._directory.path}"
        )
        warning = relative_step_advice.warning(self._config) if info.get("imagenet") else None
        if warning:
            self.view.message(f"warning: {warning}")

    def _write_config(self, facts: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Writes config.json, and returns its content."""
        assert self._directory is not None
        flags = dict(self._config.shown())
        for name in ("data_dir", "data_cache_dir"):  # a resume may come from another directory
            if flags[name] and not files.is_url(flags[name]):
                flags[name] = str(files.expand_home(flags[name]).absolute())
        config = {
            "flags": flags,
            "origins": {name: origin.value for name, origin in self._config.origins.items()},
            "version": __version__,
            "started": time.time() - seconds,
            "peak_learning_rate": derived.peak_learning_rate(self._config),
            **facts,
        }
        self._directory.write_json("config.json", config)
        return config

    def step(self, step: int, position: float, record: Mapping[str, Any] | None) -> None:
        """Advances the view; writes and shows the record of a step whose metrics were fetched."""
        if self.writer is None:
            return
        self.view.advance(step, position)
        if record is not None:
            self._show({"kind": "step", **record}, self.view.step)

    def epoch(self, record: Mapping[str, Any]) -> None:
        """Writes and shows the record of an epoch."""
        self._show({"kind": "epoch", **record}, self.view.epoch)

    def finish(self, state: RunState) -> None:
        """Closes metrics.jsonl, writes summary.json, and shows the summary; `state` is where the
        run ends.
        """
        if self._directory is None or self.writer is None:
            return
        self.writer.close()
        values = summary.summarize(
            jsonl.read_records(self.writer.path),
            targets=self._config.target_top1,
            workers=self._config.gpus,
            wall_seconds=state.seconds,
            steps=state.step,
            single_gpu_images_per_second=self._config.single_gpu_throughput,
            stop=state.stop or "finished",
            run_dir=str(self._directory.path),
            **self._meaning,
        )
        self._directory.write_json("summary.json", values)
        self._close_view(values)
        if self.store is not None:
            self.store.wait()
            done = values["epochs"] >= self._config.epochs
            for line in closing_lines(
                self._config, self._directory.path, self.store.paths(), state.stop, done
            ):
                self.view.message(line)
        self._directory.release()

    def keep_image_results(self, validation: Validation) -> None:
        """Writes what the last validation found for each image to image_results.npz, on rank 0.

        Raises:
          UserError: if that fails.
        """
        if self._directory is None:
            return
        path = self._directory.path / "image_results.npz"
        try:
            with files.atomic_replace(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **validation.image_results())
        except FileNotFoundError:
            raise UserError(
                f"{path.parent} was deleted during the run: nothing more can be recorded"
            ) from None
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror}; make room, and start again with --resume"
            ) from None

    def stop_logging(self) -> None:
        """Shows no more of what the parts log: the view ends with the session."""
        if self._handler is not None:
            log = logging.getLogger("hybrid_imagenet")
            log.removeHandler(self._handler)
            log.setLevel(self._level)
            self._handler = None

    def interrupt(self) -> None:
        """Closes the run's files without a summary: training has diverged."""
        self.stop_logging()
        if self._directory is None:
            return
        self._close_view()
        if self.writer is not None:
            self.writer.close()
        if self.store is not None:
            with contextlib.suppress(UserError):  # the next rank 0 meets the same disk
                self.store.wait()
        self._directory.release()

    def _close_view(self, values: Mapping[str, Any] | None = None) -> None:
        self.view.run_finished(values)
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._tracker is not None:
            stop = None if values is None else values["stop"]
            self._tracker.close(trackers.STATUSES.get(stop, trackers.FINISHED))

    def _show(self, record: Mapping[str, Any], view: Callable[[Mapping[str, Any]], None]) -> None:
        if self.writer is not None:
            self.writer.write(record)
            view(record)
            if self._tensorboard is not None:
                self._tensorboard.log(record)
            if self._tracker is not None:
                self._tracker.log(record)


class _ToView(logging.Handler):
    """Shows the log messages of the parts, once: those of rank 0, and warnings of the others with
    their rank.
    """

    def __init__(self, view: live.PlainView, rank: int):
        super().__init__()
        self._view = view
        self._rank = rank

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self._view.message(f"rank {self._rank}: {text}" if self._rank else text)


def _view_mode(config: RunConfig, rank: int, size: int) -> str:
    """Resolves `auto` where a launcher stands between us and the user's terminal."""
    if rank:
        return "none"
    if config.progress == "auto":
        return "live" if is_terminal_output(config.progress, size) else "plain"
    return config.progress


def closing_lines(
    config: RunConfig,
    run_dir: pathlib.Path,
    checkpoints: Sequence[pathlib.Path],
    stop: str,
    done: bool = False,
) -> list[str]:
    """Returns where `checkpoints` lie, newest first, and the next commands; for `stop` see
    `RunState`.
    """
    found = [f"{'stopped on request; ' if stop == 'preempted' else ''}results: {run_dir}"]
    if not checkpoints:
        return found
    found[0] += f", newest checkpoint: {checkpoints[0].relative_to(run_dir)}"
    report = ["hybrid-imagenet", "report", str(run_dir)]
    resume = ["hybrid-imagenet", "resume", str(run_dir)]
    if stop == "preempted":
        return [*found, f"next: {shlex.join(resume)}", f"next: {shlex.join(report)}"]
    best = ["--best"] if config.keep_best else []
    evaluate = ["hybrid-imagenet", "evaluate", str(run_dir), *best, f"--dataset={config.dataset}"]
    evaluate += [f"--data_dir={without_secrets(config.data_dir)}"] if config.data_dir else []
    evaluate += (
        [f"--data_cache_dir={config.data_cache_dir}"] if files.is_url(config.data_dir or "") else []
    )
    evaluate += [f"--val_fraction={config.val_fraction:g}"] if config.val_fraction else []
    if config.bad_records == "skip":
        evaluate += ["--bad_records=skip", f"--max_bad_records={config.max_bad_records}"]
    # A Keras file needs no package that this environment may lack.
    suffix = (
        ".onnx"
        if all(map(importlib.util.find_spec, ("onnx", "tf2onnx", "onnxruntime")))
        else ".keras"
    )
    export = [
        "hybrid-imagenet",
        "export",
        str(run_dir),
        *best,
        f"--to={run_dir / 'network'}{suffix}",
    ]
    if config.max_steps is not None and not stop and not done:
        found.append(f"next: {shlex.join(resume)}")
    return [*found, *(f"next: {shlex.join(words)}" for words in (report, evaluate, export))]
