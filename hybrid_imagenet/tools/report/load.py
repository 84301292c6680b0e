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
from hybrid_imagenet.config import stored
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.runlog import jsonl, state, summary
from hybrid_imagenet.schedules import mlperf

# A record of a step has less than a kilobyte. A larger file is another one, whose reading could
# fill the memory.
_MAX_METRICS_BYTES = 512 << 20
_MAX_IMAGE_RESULTS_BYTES = 512 << 20  # a validation set of ten million images has 200 MB
_NOT_ENVIRONMENT = ("flags", "origins", "started", "peak_learning_rate")


@dataclasses.dataclass(frozen=True)
class Run:
    """A run: `flags` are its settings, `environment` versions and hardware, `steps` and `epochs`
    its records.

    `origins` tells what set each flag; `state` is one of `runlog.state`; `diverged` is the record
    of its divergence, if that has ended it.
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
    diverged: dict[str, Any] | None

    @functools.cached_property
    def images(self) -> dict[str, npt.NDArray[Any]] | None:
        """The arrays of `Validation.image_results`; None where there are none, or they cannot be
        read.
        """
        return files.read_or_none(lambda: _image_results(self.path / "image_results.npz"))

    @property
    def following(self) -> str:
        """What to do with it next, and the command; empty for a finished run."""
        here = os.path.relpath(self.path)
        command = state.next_command(
            self.state, self.path if here.startswith("..") else pathlib.Path(here)
        )
        return (
            command
            and f"{'To stop it' if self.state == state.RUNNING else 'To continue it'}: {command}"
        )

    @property
    def on_gpus(self) -> bool:
        """Whether its ranks had GPUs."""
        return self.environment.get("gpu", "none") != "none"

    @property
    def imagenet(self) -> bool:
        """Whether it was trained on ImageNet, so that published results can stand beside it."""
        named = "imagenet" in str(self.flags.get("dataset", "")).lower()
        return named or self.summary.get("images_per_epoch") == mlperf.TRAIN_IMAGES

    @property
    def targets(self) -> list[float]:
        """Its targets, top-1 fractions."""
        return [float(target) for target in self.flags.get("target_top1") or ()]

    @property
    def target_asked(self) -> bool:
        """Whether --target_top1 was given, by whatever; runs that do not tell count as asked."""
        return self.origins.get("target_top1", "") != "default"

    @property
    def epochs_planned(self) -> float | None:
        """Returns the planned number of epochs (--epochs), or None if it is unknown."""
        return self.flags.get("epochs")

    def series(
        self, key: str, *, by: str = "epoch", steps: bool = False
    ) -> tuple[list[float], list[float]]:
        """A key against epochs, steps or hours; points where either is missing are omitted.

        Args:
          key: of the records.
          by: `epoch` (fractional where a record has `position`), `step` or `hours`.
          steps: from the step records rather than the epochs'.
        """
        xs, ys = [], []
        for record in self.steps if steps else self.epochs:
            if by == "hours":
                seconds = record.get("seconds")
                x = None if seconds is None else seconds / 3600
            elif by == "step":
                x = record.get("step")
            else:
                x = record.get("position", record.get("epoch"))
            if x is not None and record.get(key) is not None:
                xs.append(float(x))
                ys.append(float(record[key]))
        return xs, ys


def load(path: str | os.PathLike[str]) -> Run:
    """Reads a run directory, in whatever state the run is, also before its first record.

    Raises:
      UserError: if there is no run, or a file of it is damaged, has values of a wrong kind or is
        not a regular file.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; give the directory of a run")
    config = stored.read(directory)
    metrics = directory / "metrics.jsonl"
    records = (
        jsonl.read_records(metrics, max_bytes=_MAX_METRICS_BYTES)
        if os.path.lexists(metrics)
        else []
    )
    flags = dict(config["flags"])
    environment = {key: value for key, value in config.items() if key not in _NOT_ENVIRONMENT}
    if config.get("started"):
        began = datetime.datetime.fromtimestamp(config["started"], datetime.timezone.utc)
        environment["started"] = f"{began:%Y-%m-%d %H:%M} UTC"
    from_records = summary.summarize(
        records,
        world_size=int(config.get("world_size", 1)),
        images_per_epoch=config.get("train_images") or 1,
        targets=flags.get("target_top1") or (0.75, 0.759),
    )
    values = summary.read_summary(directory)
    of_last_session = state.describes_last_session(values, records) and values.get(
        "epochs_planned"
    ) in (
        None,
        flags.get("epochs"),
    )
    host = next(iter(config.get("hosts") or ()), "")
    name = state.run_state(directory, records, values if of_last_session else {}, host)
    return Run(
        name=directory.resolve().name,
        path=directory.resolve(),
        flags=flags,
        environment=environment,
        steps=[r for r in records if r.get("kind") == "step"],
        epochs=[r for r in records if r.get("kind") == "epoch"],
        # A summary of an older version may lack keys that the records can tell.
        summary={**from_records, **values} if of_last_session else from_records,
        state=name,
        origins=dict(config.get("origins", {})),
        diverged=records[-1] if name == state.DIVERGED else None,
    )


def _image_results(path: pathlib.Path) -> dict[str, npt.NDArray[Any]]:
    """Reads image_results.npz.

    Raises:
      Exception: of nearly any kind, if the file is absent, damaged or another file.
    """
    content = files.read_run_file(path, _MAX_IMAGE_RESULTS_BYTES)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        unpacked_bytes = sum(member.file_size for member in archive.infolist())
    if unpacked_bytes > _MAX_IMAGE_RESULTS_BYTES:
        raise ValueError(f"{path} unpacks to {unpacked_bytes} bytes")
    results = dict(np.load(io.BytesIO(content), allow_pickle=False))
    images, classes = len(results["label"]), len(results["class_names"])
    for name in ("label", "predicted"):
        _check_indices(results[name], images, classes)
    _check_indices(results["worst"], len(results["worst_files"]), images)
    if results["probability"].shape != (images,) or results["probability"].dtype.kind != "f":
        raise ValueError("not a probability for each image")
    return results


def _check_indices(values: npt.NDArray[Any], count: int, limit: int) -> None:
    """Raises ValueError unless these are `count` whole numbers from 0 to below `limit`."""
    if (
        values.shape != (count,)
        or values.dtype.kind != "i"
        or not np.all((values >= 0) & (values < limit))
    ):
        raise ValueError(f"not {count} whole numbers below {limit}")


def load_all(paths: Sequence[str]) -> list[Run]:
    """Reads several runs; those of the same name are told apart by as many directories above them
    as it takes.
    """
    runs = {run.path: run for run in map(load, paths)}
    depth = 1
    while len({path.parts[-depth:] for path in runs}) < len(runs):
        depth += 1
    return [
        dataclasses.replace(run, name="/".join(path.parts[-depth:])) for path, run in runs.items()
    ]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[Any]]]:
    """Flags whose values are not the same in all runs, with the value of each run; None where a run
    lacks it.
    """
    names = sorted({name for run in runs for name in run.flags})
    rows = [(name, [run.flags.get(name) for run in runs]) for name in names]
    return [(name, values) for name, values in rows if any(value != values[0] for value in values)]
