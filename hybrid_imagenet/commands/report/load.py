"""Reads run directories for a report."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import io
import os
import pathlib
import zipfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files
from hybrid_imagenet.commands import command_line
from hybrid_imagenet.config import stored
from hybrid_imagenet.runlog import jsonl, state, summary
from hybrid_imagenet.schedules import mlperf

# A record of a step takes less than a kilobyte, so a larger file is not a metrics.jsonl. Reading it
# could fill the memory.
_MAX_METRICS_BYTES = 512 << 20
# The results for a validation set of ten million images take 200 MB.
_MAX_IMAGE_RESULTS_BYTES = 512 << 20
# Keys of config.json that the report does not show as versions and hardware.
_NOT_ENVIRONMENT = ("format", "flags", "origins", "started", "peak_learning_rate")
# Accuracies to report if a run has no --target_top1: those of Lu et al. and MLPerf.
_DEFAULT_TARGETS = (0.75, 0.759)


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run as its directory records it.

    Attributes:
      name: Name in the report.
      path: Absolute path of the run directory.
      flags: Settings by flag.
      environment: Versions and hardware.
      steps: Step records of metrics.jsonl.
      epochs: Epoch records of metrics.jsonl.
      summary: The `summary.json` of the last session, or a summary of the records if there is none.
      state: One of the states in `runlog.state`.
      origins: What set each flag (default, recipe, command line ...).
      divergence_record: The last record of a run that ended because it diverged; else None.
      error: The error that ended a run that failed; else empty.
    """

    name: str
    path: pathlib.Path
    flags: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    epochs: list[dict[str, Any]]
    summary: dict[str, Any]
    state: str
    origins: dict[str, str]
    divergence_record: dict[str, Any] | None
    error: str

    @functools.cached_property
    def image_results(self) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of image_results.npz; None if the file is absent or cannot be read."""
        return files.read_or_none(lambda: _read_image_results(self.path / "image_results.npz"))

    @property
    def next_step(self) -> str:
        """The command that stops or continues the run, after its purpose and a colon.

        Empty if the run is finished.
        """
        relative = os.path.relpath(self.path)
        # An absolute path is easier to read than one that leads upward.
        directory = self.path if relative.startswith("..") else pathlib.Path(relative)
        command = state.next_command(self.state, directory)
        if not command:
            return ""
        purpose = "To stop it" if self.state == state.RUNNING else "To continue it"
        return f"{purpose}: {command}"

    @property
    def has_gpus(self) -> bool:
        """Whether the ranks had GPUs."""
        return self.environment.get("gpu", "none") != "none"

    @property
    def is_imagenet(self) -> bool:
        """Whether the run trained on ImageNet, so that published results compare."""
        if "imagenet" in str(self.flags.get("dataset", "")).lower():
            return True
        return self.summary.get("images_per_epoch") == mlperf.TRAIN_IMAGES

    @property
    def targets(self) -> list[float]:
        """The values of --target_top1, as fractions."""
        return [float(target) for target in self.flags.get("target_top1") or ()]

    @property
    def target_requested(self) -> bool:
        """Whether the user or the recipe set --target_top1."""
        return self.origins.get("target_top1", "") != "default"

    @property
    def has_meaningful_targets(self) -> bool:
        """Whether to assess the run by its targets.

        The default targets are accuracies on ImageNet, which mean nothing on other datasets.
        """
        return self.target_requested or self.is_imagenet

    @property
    def epochs_planned(self) -> float | None:
        """The planned number of epochs (--epochs), or None if it is unknown."""
        return self.flags.get("epochs")

    def series(
        self, key: str, *, by: str = "epoch", from_steps: bool = False
    ) -> tuple[list[float], list[float]]:
        """Returns the values of a key over epochs, steps or hours.

        Records without the key, or without their epoch, step or time, are skipped.

        Args:
          key: Name of a value in the records.
          by: `epoch` (fractional if a record has `position`), `step` or `hours`.
          from_steps: Read the step records instead of the epoch records.

        Returns:
          The x coordinates and the values, both of the same length.
        """
        xs = []
        ys = []
        for record in self.steps if from_steps else self.epochs:
            x = _coordinate(record, by)
            value = record.get(key)
            if x is not None and value is not None:
                xs.append(float(x))
                ys.append(float(value))
        return xs, ys


def _coordinate(record: dict[str, Any], by: str) -> float | None:
    """Returns the epoch, step or hours of a record; None if it has none."""
    if by == "hours":
        seconds = record.get("seconds")
        return None if seconds is None else seconds / 3600
    if by == "step":
        return record.get("step")
    return record.get("position", record.get("epoch"))


def load_runs(paths: Sequence[str]) -> list[LoadedRun]:
    """Reads several runs; a directory that is listed twice is read once.

    A run is named after its directory. If two directories have the same name, all names get as many
    parent directories as it takes to distinguish them.

    Raises:
      UserError: If a run cannot be read.
    """
    runs = {run.path: run for run in map(load_run, paths)}
    depth = 1
    while len({path.parts[-depth:] for path in runs}) < len(runs):
        depth += 1
    return [
        dataclasses.replace(run, name="/".join(path.parts[-depth:])) for path, run in runs.items()
    ]


def load_run(path: str | os.PathLike[str]) -> LoadedRun:
    """Reads a run directory in any state, even before its first record.

    Raises:
      UserError: If there is no run, or a file of it is damaged, has values of a wrong type or is
        not a regular file.
    """
    directory = pathlib.Path(path)
    command_line.check_run(directory)
    config = stored.read(directory)
    flags = dict(config["flags"])
    records = []
    metrics = directory / "metrics.jsonl"
    if os.path.lexists(metrics):
        records = jsonl.read_records(metrics, max_bytes=_MAX_METRICS_BYTES)

    summary_of_records = summary.summarize(
        records,
        world_size=int(config.get("world_size", 1)),
        images_per_epoch=config.get("train_images") or 1,
        targets=flags.get("target_top1") or _DEFAULT_TARGETS,
    )
    written_summary = summary.read_summary(directory)
    # A resumed run leaves the summary of its previous session behind until it ends.
    if not _is_of_last_session(written_summary, records, flags):
        written_summary = {}
    first_host = next(iter(config.get("hosts") or ()), "")
    run_state = state.run_state(directory, records, written_summary, first_host)
    return LoadedRun(
        name=directory.resolve().name,
        path=directory.resolve(),
        flags=flags,
        environment=_environment(config),
        steps=[record for record in records if record.get("kind") == "step"],
        epochs=[record for record in records if record.get("kind") == "epoch"],
        # A summary that somebody has changed may lack some of the keys.
        summary={**summary_of_records, **written_summary},
        state=run_state,
        origins=dict(config["origins"]),
        divergence_record=records[-1] if run_state == state.DIVERGED else None,
        error=(records[-1].get("error") or "") if run_state == state.FAILED else "",
    )


def _is_of_last_session(
    written_summary: dict[str, Any], records: list[dict[str, Any]], flags: dict[str, Any]
) -> bool:
    """Returns whether summary.json describes the last session of the run."""
    if not state.describes_last_session(written_summary, records):
        return False
    return written_summary.get("epochs_planned") in (None, flags.get("epochs"))


def _environment(config: dict[str, Any]) -> dict[str, Any]:
    """Returns versions and hardware from config.json, and when the run was started."""
    environment = {key: value for key, value in config.items() if key not in _NOT_ENVIRONMENT}
    if config.get("started"):
        started = datetime.datetime.fromtimestamp(config["started"], datetime.UTC)
        environment["started"] = f"{started:%Y-%m-%d %H:%M} UTC"
    return environment


def _read_image_results(path: pathlib.Path) -> dict[str, npt.NDArray[Any]]:
    """Reads image_results.npz.

    Raises:
      Exception: An exception of nearly any type, if the file is absent, damaged or something else.
    """
    content = files.read_run_file(path, _MAX_IMAGE_RESULTS_BYTES)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        unpacked_bytes = sum(member.file_size for member in archive.infolist())
    if unpacked_bytes > _MAX_IMAGE_RESULTS_BYTES:
        raise ValueError(f"{path} unpacks to {unpacked_bytes} bytes")
    results = dict(np.load(io.BytesIO(content), allow_pickle=False))
    images = len(results["label"])
    classes = len(results["class_names"])
    for name in ("label", "predicted"):
        _check_indices(results[name], images, classes)
    _check_indices(results["worst"], len(results["worst_files"]), images)
    if results["probability"].shape != (images,) or results["probability"].dtype.kind != "f":
        raise ValueError("`probability` does not have one number per image")
    return results


def _check_indices(values: npt.NDArray[Any], count: int, limit: int) -> None:
    """Raises ValueError unless there are `count` integers from 0 to below `limit`."""
    is_index_vector = values.shape == (count,) and values.dtype.kind == "i"
    if not is_index_vector or not np.all((values >= 0) & (values < limit)):
        raise ValueError(f"expected {count} integers below {limit}")


def differing_flags(runs: Sequence[LoadedRun]) -> list[tuple[str, list[Any]]]:
    """Returns the flags that differ between runs, with the value of each run.

    The value is None if a run does not have the flag.
    """
    names = sorted({name for run in runs for name in run.flags})
    differing = []
    for name in names:
        values = [run.flags.get(name) for run in runs]
        if any(value != values[0] for value in values):
            differing.append((name, values))
    return differing
