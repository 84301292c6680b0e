"""Reads a trained network, and all that is needed to use it, from a checkpoint or another library's
file.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hybrid_imagenet.checkpoints import archive, store
from hybrid_imagenet.data import device
from hybrid_imagenet.data.augmentations import EVALUATION_FRACTION
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.models import factory, torchvision
from hybrid_imagenet.models.depths import TORCHVISION_EPSILON, WIDTH

_IMAGENET_SIZE = 224
_PART, _AVERAGES = "model/", "average/"
Report = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Trained:
    """Holds a trained network and the preparation of its images.

    Attributes:
      origin: the file it came from, for messages.
      model: its name, see `factory.create`.
      class_names: one name per class, in the order of the scores.
      image_size: pixels.
      crop_fraction: side of the central square that it looks at, as a fraction of an image's
      shorter side.
      batch_norm_epsilon: added to variances.
      width, stem, blurpool: see `factory.create`.
      loss, eval_flip: the run's, with which it was validated.
      averaged: whether they are averages over the last steps (--ema_decay).
      precision: the compute type of the run; empty where it is not known. Weights are float32 in
      any.
      weights: float32 arrays by path of the variable; left out where they come from another rank.
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
        fields = (f.name for f in dataclasses.fields(self) if f.name != "weights")
        return {name: getattr(self, name) for name in fields}

    @classmethod
    def from_description(cls, values: Mapping[str, Any]) -> Trained:
        """Returns the network of a description, without its weights."""
        arguments: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.items()
        }
        return cls(**arguments)

    def build(self, precision: str = "float32") -> keras.Model:
        """Returns the Keras model, with these weights if there are any (see `factory.create` for
        inputs and outputs).

        Raises:
          UserError: if the weights do not fit the network that is described.
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
        value = (self.weights or {}).get(variable.path)
        wanted = tuple(variable.shape)
        if value is None or value.shape != wanted:
            found = "is missing" if value is None else f"has shape {value.shape}"
            raise UserError(
                f"{self.origin}: {variable.path} {found}, {self.model} at {self.image_size} pixels"
                f" with {len(self.class_names)} classes needs {wanted}; give the image size and"
                " classes it was trained with"
            )
        return value

    def preprocess(self, images: tf.Tensor, dtype: str = "float32") -> tf.Tensor:
        """Prepares pixels of 0 to 255, [b, s, s, 3], as the network's input in `dtype`: exactly as
        in training.
        """
        return device.normalize(images, dtype)


def load(
    path: pathlib.Path, report: Report, *, weights: str = "auto", best: bool = False
) -> Trained:
    """Reads a network.

    Args:
      path: a checkpoint (.npz); the directory of a run, for its newest good checkpoint; or weights
        of torchvision's ResNets (.safetensors, .pth).
      report: receives a line about each damaged checkpoint that was passed over.
      weights: of a checkpoint: `ema`, the averaged ones, which validation saw; `trained`, the last
        step's weights; or `auto`, the averaged ones where there are any.
      best: of a run: the checkpoint with the best validation top-1, not the newest.

    Raises:
      UserError: if there is no such file, or it holds no network that is known, or no such weights,
        or weights that are not finite.
    """
    network = _read(path.expanduser(), report, weights, best)
    _check_finite(network)
    return network


def _check_finite(network: Trained) -> None:
    """Raises UserError for a weight that is NaN or infinite: every prediction of such a network is
    NaN.
    """
    spoiled = [
        name for name, value in (network.weights or {}).items() if not np.isfinite(value).all()
    ]
    if spoiled:
        raise UserError(
            f"{network.origin}: {len(spoiled)} of its {len(network.weights or {})} variables hold"
            f" NaN or infinity, such as {spoiled[0]}, so it cannot predict anything; give an"
            " earlier checkpoint"
        )


def _read(path: pathlib.Path, report: Report, weights: str, best: bool) -> Trained:
    store.look(path)
    if path.is_dir():
        return _from_run(path, report, weights, best)
    if best:
        raise UserError(f"--best: {path} is a file; give the directory of a run, or omit the flag")
    if path.suffix not in store.FOREIGN_SUFFIXES:
        try:
            return _from_checkpoint(archive.read(path), weights)
        except archive.DamagedCheckpointError as error:
            raise UserError(f"{error}; give a checkpoint that is not damaged") from None
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; give a file that can be read") from None
    if weights == "ema":
        raise UserError(f"--weights=ema: {path} holds one set of weights only; omit the flag")
    model, arrays = torchvision.read(path)
    classes = tuple(str(number) for number in range(len(arrays["logits/bias"])))
    return Trained(
        str(path),
        model,
        classes,
        _IMAGENET_SIZE,
        EVALUATION_FRACTION,
        TORCHVISION_EPSILON,
        weights=arrays,
    )


def _from_run(path: pathlib.Path, report: Report, weights: str, best: bool) -> Trained:
    for directory in (path / "checkpoints", path):
        folder = store.CheckpointFolder(directory, report)
        found = folder.best_good() if best else folder.newest_good()
        if found is not None:
            return _from_checkpoint(found, weights)
    if best:
        raise UserError(
            f"--best: {path} holds no usable checkpoint with its own validation result; omit the"
            " flag for the newest"
        )
    raise UserError(
        f"{path}: holds no usable checkpoint (checkpoints/step-*.npz); give another run"
    )


def _from_checkpoint(source: archive.Checkpoint, which: str) -> Trained:
    meta = source.meta
    weights, averages = _part(source, _PART), _part(source, _AVERAGES)
    if which == "ema" and not averages:
        raise UserError(
            f"--weights=ema: {source.path} has no averaged weights (--ema_decay); omit the flag"
        )
    averaged = bool(averages) and which != "trained"
    if averaged:
        weights |= averages
    wanted = {f.name for f in dataclasses.fields(Trained)} - {"origin", "weights"}
    values = {name: meta[name] for name in wanted & set(meta)} | {"origin": str(source.path)}
    values["averaged"] = averaged or bool(meta.get("averaged"))
    try:
        return dataclasses.replace(Trained.from_description(values), weights=weights)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{source.path}: does not describe a network ({error}); give another checkpoint"
        ) from None


def _part(source: archive.Checkpoint, prefix: str) -> dict[str, np.ndarray]:
    """Returns the arrays of one part of a checkpoint, by path of the variable."""
    return {
        name.split("/", 2)[-1]: value
        for name, value in source.arrays.items()
        if name.startswith(prefix)
    }
