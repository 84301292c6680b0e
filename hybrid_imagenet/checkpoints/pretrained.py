"""Reads a trained network from a checkpoint or from another library's file.

The result has everything that is needed to use the network: weights, class names and the
preprocessing of images.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.checkpoints import archive, store
from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.data import device
from hybrid_imagenet.data.augmentations import EVALUATION_FRACTION
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory, torchvision
from hybrid_imagenet.models.depths import TORCHVISION_EPSILON, WIDTH

_IMAGENET_SIZE = 224
_MODEL_PREFIX = "model/"
_AVERAGES_PREFIX = "average/"


@dataclasses.dataclass(frozen=True)
class TrainedNetwork:
    """Holds a trained network and the preprocessing of its images.

    Attributes:
      origin: The file that it was read from, for messages.
      model: Name of the network, see `factory.create`.
      class_names: One name per class, in the order of the scores.
      image_size: Side of the input in pixels.
      crop_fraction: Side of the central square that is cut out, as a fraction of the shorter side
        of an image.
      batch_norm_epsilon: Added to variances.
      width, stem, blurpool: See `factory.create`.
      loss, eval_flip: Settings of the run with which it was validated.
      averaged: Whether the weights are averages over steps (--ema_decay).
      precision: Compute type of the run; empty if it is unknown. Weights are float32 in any case.
      weights: float32 arrays by path of the variable; None if another rank has them.
    """

    origin: str
    model: str
    class_names: tuple[str, ...]
    image_size: int
    crop_fraction: float
    batch_norm_epsilon: float
    width: int = WIDTH
    stem: str = "imagenet"
    blurpool: bool = False
    loss: str = "softmax"
    eval_flip: bool = False
    averaged: bool = False
    precision: str = ""
    weights: Mapping[str, np.ndarray] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    def description(self) -> dict[str, Any]:
        """Returns everything but the weights, JSON-ready."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "weights"]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_description(cls, values: Mapping[str, Any]) -> TrainedNetwork:
        """Creates the network from `description`, without weights."""
        arguments: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**arguments)

    def build(self, precision: str = "float32") -> keras.Model:
        """Builds the Keras model and assigns the weights, if there are any.

        Args:
          precision: Keras dtype policy; `factory.create` says which types inputs and outputs have.

        Raises:
          UserError: If the weights do not fit the network that is described.
        """
        network = factory.create(
            self.model,
            len(self.class_names),
            self.image_size,
            precision=precision,
            batch_norm_epsilon=self.batch_norm_epsilon,
            width=self.width,
            stem=self.stem,
            blurpool=self.blurpool,
        )
        if self.weights is not None:
            for variable in network.weights:
                variable.assign(self._array(variable))
        return network

    def _array(self, variable: keras.Variable) -> np.ndarray:
        """Returns the array for a variable; raises UserError if it is missing or does not fit."""
        array = (self.weights or {}).get(variable.path)
        expected_shape = tuple(variable.shape)
        if array is None or array.shape != expected_shape:
            problem = "is missing" if array is None else f"has shape {array.shape}"
            raise UserError(
                f"{self.origin}: {variable.path} {problem}, but {self.model} at {self.image_size}"
                f" pixels with {len(self.class_names)} classes needs {expected_shape}. Pass the"
                " image size and the classes that it was trained with."
            )
        return array

    def preprocess(self, images: tf.Tensor, dtype: str = "float32") -> tf.Tensor:
        """Normalizes images exactly as in training.

        Args:
          images: Pixels of 0 to 255, [b, s, s, 3].
          dtype: Type of the result.
        """
        return device.normalize(images, dtype)


def load(
    path: pathlib.Path, log: store.Log, *, weights: str = "auto", best: bool = False
) -> TrainedNetwork:
    """Reads a network.

    Args:
      path: A checkpoint (.npz), the directory of a run, whose latest valid checkpoint is read, or
        weights of torchvision's ResNets (.safetensors, .pth).
      log: Receives a line about each damaged checkpoint that is skipped, and about weights of
        torchvision's format that do not name their network.
      weights: Which weights of a checkpoint to read: `ema` for the averaged ones, which were
        validated; `trained` for those of the last step; `auto` for the averaged ones if there are
        any.
      best: For a run, reads the checkpoint with the best validation top-1 instead of the latest.

    Raises:
      UserError: If there is no such file, if it does not hold a known network or the requested
        weights, or if its weights are not finite.
    """
    network = _read(path.expanduser(), log, weights, best)
    _check_finite(network)
    return network


def _check_finite(network: TrainedNetwork) -> None:
    """Raises UserError for NaN and infinity, which would turn every prediction into NaN."""
    weights = network.weights or {}
    non_finite = [name for name, value in weights.items() if not np.isfinite(value).all()]
    if non_finite:
        raise UserError(
            f"{network.origin}: {len(non_finite)} of its {len(weights)} variables hold NaN or"
            f" infinity, such as {non_finite[0]}, so it cannot predict anything. Pass an earlier"
            " checkpoint."
        )


def _read(path: pathlib.Path, log: store.Log, weights: str, best: bool) -> TrainedNetwork:
    # This raises a UserError that fits the path if nothing there can be read.
    store.find_checkpoint(path)
    if path.is_dir():
        return _from_run(path, log, weights, best)
    if best:
        raise UserError(f"--best: {path} is a file. Pass the directory of a run, or omit the flag.")
    if path.suffix in store.FOREIGN_SUFFIXES:
        return _from_torchvision(path, log, weights)
    try:
        checkpoint = archive.read(path)
    except archive.DamagedCheckpointError as error:
        raise UserError(f"{error}. Pass a checkpoint that is not damaged.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Pass a readable file.") from None
    return _from_checkpoint(checkpoint, weights)


def _from_torchvision(path: pathlib.Path, log: store.Log, weights: str) -> TrainedNetwork:
    if weights == "ema":
        raise UserError(f"--weights=ema: {path} holds only one set of weights. Omit the flag.")
    model, arrays = torchvision.read(path, log)
    class_names = tuple(str(number) for number in range(len(arrays["logits/bias"])))
    return TrainedNetwork(
        str(path),
        model,
        class_names,
        _IMAGENET_SIZE,
        EVALUATION_FRACTION,
        TORCHVISION_EPSILON,
        weights=arrays,
    )


def _from_run(path: pathlib.Path, log: store.Log, weights: str, best: bool) -> TrainedNetwork:
    # The directory of checkpoints itself is accepted too.
    for directory in (path / "checkpoints", path):
        folder = store.CheckpointFolder(directory, log)
        checkpoint = folder.best_valid() if best else folder.latest_valid()
        if checkpoint is not None:
            if best:
                _warn_of_removed_best(checkpoint, log)
            return _from_checkpoint(checkpoint, weights)
    if best:
        raise UserError(
            f"--best: {path} has no usable checkpoint that was validated. Omit the flag for the"
            " latest checkpoint."
        )
    raise UserError(f"{path} has no usable checkpoint (checkpoints/step-*.npz). Pass another run.")


def _warn_of_removed_best(checkpoint: CheckpointArchive, log: store.Log) -> None:
    """Prints a line if the run had a better epoch, whose checkpoint is missing (--nokeep_best)."""
    state = checkpoint.meta.get("state", {})
    best = 100 * state.get("best_top1", 0.0)
    top1 = 100 * checkpoint.meta["val_top1"]
    if best > top1:
        log(
            f"--best: epoch {state['best_epoch']:g} was better ({best:.2f} % top-1), but its"
            f" checkpoint was not kept; using {checkpoint.path.name} ({top1:.2f} %)"
        )


def _from_checkpoint(checkpoint: CheckpointArchive, weights: str) -> TrainedNetwork:
    meta = checkpoint.meta
    arrays = _arrays_with_prefix(checkpoint, _MODEL_PREFIX)
    averages = _arrays_with_prefix(checkpoint, _AVERAGES_PREFIX)
    if weights == "ema" and not averages:
        raise UserError(
            f"--weights=ema: {checkpoint.path} has no averaged weights (--ema_decay). Omit the"
            " flag."
        )
    use_averages = bool(averages) and weights != "trained"
    if use_averages:
        arrays |= averages
    field_names = {field.name for field in dataclasses.fields(TrainedNetwork)}
    stored_names = field_names - {"origin", "weights", "averaged"}
    missing_names = sorted(stored_names - meta.keys())
    if missing_names:
        raise UserError(
            f"{checkpoint.path} does not describe a network: it has no {missing_names[0]}, because"
            " model.fit has saved it, or another program. Pass a checkpoint of"
            " hybrid-imagenet train."
        )
    values = {name: meta[name] for name in stored_names}
    values["origin"] = str(checkpoint.path)
    values["averaged"] = use_averages
    return dataclasses.replace(TrainedNetwork.from_description(values), weights=arrays)


def _arrays_with_prefix(checkpoint: CheckpointArchive, prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays of `model/` or `average/`, by path of the variable."""
    return {
        name.split("/", 2)[-1]: value
        for name, value in checkpoint.arrays.items()
        if name.startswith(prefix)
    }
