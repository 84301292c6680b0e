"""Sends the metrics of `model.fit` to an experiment tracker."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hybrid_imagenet import files
from hybrid_imagenet.callbacks.training_callback import TrainingCallback
from hybrid_imagenet.comm import process
from hybrid_imagenet.errors import UserError, did_you_mean
from hybrid_imagenet.optimizers import compiled_model
from hybrid_imagenet.runlog import trackers


class Tracker(TrainingCallback):
    """Sends the logs of each epoch to Weights & Biases, MLflow or Trackio, on rank 0.

    Pass it to `default_callbacks`, which calls it after metrics were averaged over ranks. Values
    have the names of Keras, such as `val_accuracy`, by optimizer step. Records are sent in a
    thread, so a slow server does not delay training.

    Example:
      callbacks = hi.callbacks.default_callbacks(
          hi.callbacks.Tracker("wandb", config={"batch": 256}, directory="runs/first")
      )
      model.fit(data, epochs=10, callbacks=callbacks)

    Args:
      tracker: "wandb", "mlflow" or "trackio"; its package must be installed on rank 0.
      project: Project, or experiment of MLflow (default: None, the environment variable
        WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME or TRACKIO_PROJECT, or else hybrid-imagenet).
      name: Name of the run (default: None, the name of the model).
      config: Hyperparameters to record; class and configuration of the optimizer are added
        (default: None).
      directory: Directory that keeps the identifier of the run, so that a later `fit` with the same
        directory continues the run (default: None, always a new run).

    Raises:
      UserError: If there is no such tracker, or if its package is not installed.
    """

    def __init__(
        self,
        tracker: str,
        *,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        directory: str | os.PathLike[str] | None = None,
    ):
        super().__init__()
        if tracker not in trackers.TRACKERS:
            raise UserError(
                f"Tracker({tracker!r}): choose one of {', '.join(trackers.TRACKERS)}"
                f"{did_you_mean(tracker, trackers.TRACKERS)}."
            )
        if process.rank() == 0:
            trackers.import_package(tracker)
        self._tracker = tracker
        self._project = project
        self._name = name
        self._config = dict(config or {})
        self._directory = None if directory is None else files.output_path("directory", directory)
        self._log: trackers.TrackerLog | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Starts or continues the run.

        Raises:
          UserError: On rank 0, if the tracker cannot start a run.
        """
        if process.rank() != 0:
            return
        self.on_train_end()
        settings = {
            name: {"class": type(optimizer).__name__, **optimizer.get_config()}
            for name, optimizer in compiled_model.optimizers(self.model).items()
        }
        self._log = trackers.TrackerLog(
            self._tracker,
            name=self._name or self.model.name,
            config={**settings, "ranks": process.size(), **self._config},
            print_message=_print,
            project=self._project,
            directory=self._directory,
            option="Tracker",
        )

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if self._log is not None:
            values = {"epoch": epoch + 1, **(logs or {})}
            step = compiled_model.updates_applied(self.model)
            self._log.log_values(trackers.finite_numbers(values), step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        if self._log is not None:
            self._log.close(trackers.FINISHED)
            self._log = None


def _print(text: str) -> None:
    print(text, flush=True)
