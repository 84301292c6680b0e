"""Sends a run's records to an experiment tracker: Weights & Biases, MLflow or Trackio.

`TrackerLog` is what the program and `hi.callbacks.Tracker` use. It starts a run of the tracker, or
continues the run of an earlier session, and sends records in a thread, so that a slow server never
delays a training step. Each tracker has a class with the methods of `TrackerRun`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from hybrid_imagenet import files
from hybrid_imagenet.errors import EXIT_FAILURE, EXIT_PREEMPTED, UserError, import_optional

DEFAULT_PROJECT = "hybrid-imagenet"
"""The project if neither the user nor an environment variable of the tracker names one."""

NAMES = ("wandb", "mlflow", "trackio")
"""The trackers; the package and the module of each have its name."""

FINISHED = "finished"
STOPPED = "stopped"
FAILED = "failed"
STATUSES: Mapping[str | None, str] = {"preempted": STOPPED, None: FAILED}
"""The status for each way in which a run stops (`RunState.stop`); others are FINISHED."""

# What to do if a tracker cannot start a run.
_REMEDIES = {
    "wandb": "Check wandb login, or set WANDB_MODE=offline.",
    "mlflow": (
        "Set MLFLOW_TRACKING_URI to a server that answers, or to sqlite:///mlflow.db with the"
        " package mlflow (mlflow-skinny has no database)."
    ),
    "trackio": "Check TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, or unset them to record locally.",
}

# The directory of a run keeps in this file which runs of trackers belong to it.
ID_FILE = "tracker.json"
# What all trackers accept in the name of a run: an identifier of this many hexadecimal digits.
_ID_CHARACTERS = 8
# A server that does not answer must not keep the GPUs of a finished run for longer.
_CLOSE_SECONDS = 60.0
_MAX_REASON_CHARACTERS = 300
# Limits of MLflow's log_batch.
_MLFLOW_MAX_METRICS = 1000
_MLFLOW_MAX_PARAMETERS = 100
_MLFLOW_MAX_PARAMETER_CHARACTERS = 6000
# Records are shown by this number, so it is not a value.
_AXIS_KEY = "step"
# Training values of an epoch record have the same names as those of step records. The prefix keeps
# the two curves apart, as in TensorBoard.
_EPOCH_PREFIX = "epoch/"


class TrackerRun(Protocol):
    """A run of a tracker that accepts values.

    Attributes:
      run_id: Identifies the run in the tracker, so that a later session can continue it.
      location: Address at which to look at the run, for a message; "" if the package prints it.
    """

    run_id: str
    location: str

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Records values at an optimizer step."""

    def finish(self, status: str) -> None:
        """Ends the session; `status` is FINISHED, STOPPED (to be resumed) or FAILED."""


@dataclasses.dataclass(frozen=True)
class TrackerRequest:
    """Holds the arguments with which a tracker starts or continues a run.

    Attributes:
      project: Project or experiment; None for the tracker's environment variable or default.
      name: Name of a new run.
      directory: The directory of the run, for trackers that store files there.
      config: JSON-ready configuration of the run.
      run_id: Identifies the run of an earlier session; None for a new one.
    """

    project: str | None
    name: str
    directory: pathlib.Path | None
    config: Mapping[str, Any]
    run_id: str | None


class WandbRun:
    """A run of Weights & Biases.

    Without an API key it is recorded offline, because asking for one on a terminal would block the
    other ranks.

    Reference:
      https://docs.wandb.ai/ref/python/
    """

    def __init__(self, request: TrackerRequest):
        wandb = import_package("wandb")
        self.run_id = request.run_id or _new_id()
        mode = None
        if not os.environ.get("WANDB_MODE") and not wandb.setup().settings.api_key:
            mode = "offline"
        self._run = wandb.init(
            project=request.project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT,
            name=request.name,
            id=self.run_id,
            resume="allow",
            dir=None if request.directory is None else str(request.directory),
            config=dict(request.config),
            mode=mode,
        )
        # A resumed run repeats the steps after its checkpoint. Weights & Biases ignores values
        # whose step is not larger than the last one, unless the step is a value like the others.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self.location = ""
        if mode == "offline":
            self.location = (
                f"{self._run.dir} (there is no API key of Weights & Biases; upload it with"
                " wandb sync)"
            )

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log({**values, "step": step})

    def finish(self, status: str) -> None:
        if status == STOPPED:
            self._run.mark_preempting()
        exit_codes = {FINISHED: 0, STOPPED: EXIT_PREEMPTED, FAILED: EXIT_FAILURE}
        self._run.finish(exit_code=exit_codes[status])


class MlflowRun:
    """A run of MLflow, at MLFLOW_TRACKING_URI or where MLflow stores runs by default.

    Reference:
      https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
    """

    def __init__(self, request: TrackerRequest):
        mlflow = import_package("mlflow")
        self._entities = mlflow.entities
        self._client = mlflow.MlflowClient()
        if request.run_id is None:
            experiment = self._experiment(request.project)
            run = self._client.create_run(experiment, run_name=request.name)
        else:
            run = self._client.get_run(request.run_id)
            self._client.update_run(request.run_id, status="RUNNING")
        self.run_id = run.info.run_id
        self._log_parameters(request.config, recorded=run.data.params)
        self.location = f"run {self.run_id} at {mlflow.get_tracking_uri()}"

    def _experiment(self, project: str | None) -> str:
        """Returns the number of the experiment, which is created if it does not exist."""
        if project is None and os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or DEFAULT_PROJECT
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            return str(self._client.create_experiment(name))
        return str(experiment.experiment_id)

    def _log_parameters(self, config: Mapping[str, Any], recorded: Mapping[str, str]) -> None:
        """Records the configuration; MLflow rejects another value for a recorded parameter."""
        parameters = [
            self._entities.Param(key, str(value)[:_MLFLOW_MAX_PARAMETER_CHARACTERS])
            for key, value in flatten(config, separator=".")
            if key not in recorded
        ]
        for start in range(0, len(parameters), _MLFLOW_MAX_PARAMETERS):
            batch = parameters[start : start + _MLFLOW_MAX_PARAMETERS]
            self._client.log_batch(self.run_id, params=batch)

    def log(self, values: Mapping[str, float], step: int) -> None:
        milliseconds = int(1000 * time.time())
        metrics = [
            self._entities.Metric(key, value, milliseconds, step) for key, value in values.items()
        ]
        for start in range(0, len(metrics), _MLFLOW_MAX_METRICS):
            batch = metrics[start : start + _MLFLOW_MAX_METRICS]
            self._client.log_batch(self.run_id, metrics=batch)

    def finish(self, status: str) -> None:
        statuses = {FINISHED: "FINISHED", STOPPED: "KILLED", FAILED: "FAILED"}
        self._client.set_terminated(self.run_id, statuses[status])


class TrackioRun:
    """A run of Trackio, which stores runs on this machine or in a Space of Hugging Face.

    Trackio finds a run by its name, so the name of a new run gets a random ending.

    Reference:
      https://huggingface.co/docs/trackio/api
    """

    def __init__(self, request: TrackerRequest):
        trackio = import_package("trackio")
        self.run_id = request.run_id or f"{request.name}-{_new_id()}"
        self._run = trackio.init(
            project=request.project or os.environ.get("TRACKIO_PROJECT") or DEFAULT_PROJECT,
            name=self.run_id,
            config=dict(request.config),
            resume="allow",
            embed=False,
        )
        self.location = ""

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, status: str) -> None:
        del status
        self._run.finish()


TRACKERS: Mapping[str, Callable[[TrackerRequest], TrackerRun]] = {
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "trackio": TrackioRun,
}
"""The class of each tracker."""


class TrackerLog:
    """Sends records to a tracker in a thread.

    If values cannot be sent, a message is printed once and training continues, because
    metrics.jsonl has the same values. `close` waits at most a minute for what is left.
    """

    def __init__(
        self,
        tracker: str,
        *,
        name: str,
        config: Mapping[str, Any],
        print_message: Callable[[str], None],
        project: str | None = None,
        directory: pathlib.Path | None = None,
        option: str = "--tracker",
    ):
        """Starts a run of the tracker, or continues the one of an earlier session.

        Args:
          tracker: A key of `TRACKERS`.
          name: Name of the run in the tracker.
          config: JSON-ready configuration of the run.
          print_message: Prints a message.
          project: Project or experiment. None reads the tracker's environment variable
            (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME, TRACKIO_PROJECT), or else is
            `DEFAULT_PROJECT`.
          directory: Keeps the run's identifier for the next session. None always starts a new run.
          option: What the user set, for messages.

        Raises:
          UserError: If the package is not installed, or if it cannot start a run.
        """
        self._name = tracker
        self._print_message = print_message
        self._unsent_records = 0
        run_ids = _read_ids(directory)
        try:
            request = TrackerRequest(project, name, directory, config, run_ids.get(tracker))
            self._run = TRACKERS[tracker](request)
        except UserError:
            raise
        except Exception as error:
            # Each package has its own classes of errors.
            raise UserError(
                f"{option}={tracker} could not start a run: {_reason(error)}. {_REMEDIES[tracker]}"
            ) from None
        if directory is not None:
            _write_ids(directory, {**run_ids, tracker: self._run.run_id})
        if self._run.location:
            print_message(f"{tracker}: {self._run.location}")
        self._queue: queue.SimpleQueue[tuple[dict[str, float], int] | str] = queue.SimpleQueue()
        # The thread is a daemon, because a process that fails must not wait for a server.
        self._thread: threading.Thread | None = threading.Thread(
            target=self._send_all, name="tracker", daemon=True
        )
        self._thread.start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Sends the numbers of a record of metrics.jsonl."""
        self._queue.put((record_values(record), int(record["step"])))

    def log_values(self, values: Mapping[str, float], step: int) -> None:
        """Sends values at an optimizer step."""
        self._queue.put((dict(values), step))

    def close(self, status: str) -> None:
        """Sends what is left and ends the session; a second call does nothing.

        Args:
          status: FINISHED, STOPPED or FAILED.
        """
        if self._thread is None:
            return
        self._queue.put(status)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            self._print_message(
                f"{self._name} did not answer for {_CLOSE_SECONDS:g} s, so it may lack the last"
                " records. metrics.jsonl has all of them."
            )
        elif self._unsent_records:
            self._print_message(
                f"{self._name} lacks {self._unsent_records} records. metrics.jsonl has them."
            )
        self._thread = None

    def _send_all(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, str):
                self._attempt(functools.partial(self._run.finish, item))
                return
            values, step = item
            if not self._attempt(functools.partial(self._run.log, values, step)):
                self._unsent_records += 1

    def _attempt(self, call: Callable[[], None]) -> bool:
        """Returns whether a call of the tracker succeeded."""
        try:
            call()
        except Exception as error:
            # Later records may succeed, because the server may have been away for a moment.
            if not self._unsent_records:
                self._print_message(
                    f"a record could not be sent to {self._name}: {_reason(error)}. The run"
                    " continues, and metrics.jsonl has the same values."
                )
            return False
        return True


def import_package(tracker: str) -> Any:
    """Imports the module of a tracker.

    Raises:
      UserError: If the package is not installed.
    """
    return import_optional(tracker, missing_package(tracker))


def missing_package(tracker: str) -> str:
    """Returns the message for a tracker whose package is not installed."""
    return (
        f"The tracker {tracker} needs the package {tracker}, which is not installed. Run pip"
        f" install {tracker}."
    )


def record_values(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a record by name.

    Names are the keys of metrics.jsonl. Values by layer are `trust_ratios/<layer>`, and training
    values of an epoch record have the prefix `epoch/`.
    """
    is_epoch = record.get("kind") == "epoch"
    values = {}
    for name, value in finite_numbers(record).items():
        if name == _AXIS_KEY:
            continue
        is_prefixed = is_epoch and name != "epoch" and not name.startswith("val_")
        values[f"{_EPOCH_PREFIX}{name}" if is_prefixed else name] = value
    return values


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers among nested values, with their keys joined by a slash."""
    numbers = {}
    for name, value in flatten(values, separator="/"):
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if is_number and math.isfinite(value):
            numbers[name] = float(value)
    return numbers


def flatten(values: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yields the items of nested mappings, with their keys joined."""
    for key, value in values.items():
        # Values may be NumPy's, which trackers do not take for numbers.
        plain = value.item() if getattr(value, "ndim", None) == 0 else value
        if isinstance(plain, Mapping):
            for inner_key, inner_value in flatten(plain, separator):
                yield f"{key}{separator}{inner_key}", inner_value
        else:
            yield key, plain


def _new_id() -> str:
    return uuid.uuid4().hex[:_ID_CHARACTERS]


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:_MAX_REASON_CHARACTERS] or type(error).__name__


def _read_ids(directory: pathlib.Path | None) -> dict[str, str]:
    """Returns the identifier of the run in each tracker that earlier sessions used.

    Raises:
      UserError: If the file is damaged.
    """
    if directory is None or not (directory / ID_FILE).exists():
        return {}
    path = directory / ID_FILE
    try:
        run_ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        run_ids = None
    is_valid = isinstance(run_ids, dict) and all(isinstance(i, str) for i in run_ids.values())
    if not is_valid:
        raise UserError(
            f"{path} cannot be read. Remove it, and the tracker starts a new run, or restore it."
        )
    return run_ids


def _write_ids(directory: pathlib.Path, run_ids: Mapping[str, str]) -> None:
    path = directory / ID_FILE
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with files.atomic_replace(path) as temporary:
            temporary.write_text(json.dumps(run_ids, indent=2, sort_keys=True) + "\n")
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}. Check the free space and the permissions"
            " of the directory."
        ) from None
