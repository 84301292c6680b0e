"""Lists the datasets that `--dataset` accepts. Nothing here needs TensorFlow.

To add a dataset, write a module in `data/sources/` and add a line to `SOURCES`. The module has two
functions: `probe_split(request)` looks for the files of a split without reading them and returns a
`SplitSummary`, and `open_split(request)` returns a `Source`. The flags, the help, the check that
runs before TensorFlow is imported, the default augmentation and the default shuffle window for
URLs all follow from the line in `SOURCES`.
"""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybrid_imagenet.data import directories, listing
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.files import expand_home, is_url
from hybrid_imagenet.schedules import mlperf

if TYPE_CHECKING:
    from hybrid_imagenet.data.sources.source import Source

SPLITS = ("train", "validation")
"""Names of the splits of a dataset, as for `open_source`."""


@dataclasses.dataclass(frozen=True)
class SourceType:
    """Describes a file format or a named dataset that `--dataset` accepts.

    Attributes:
      module: Name of the module in `data/sources/`.
      help_note: Explanation for `--help`, if the name does not explain itself.
      requires_data_dir: Whether `--data_dir` must be set.
      url_shuffle_window: Number of shards that are mixed at a time if they are read from a URL;
        None if the source cannot be read from URLs. The windows hold about 20,000 ImageNet images,
        in 1,024 tar files or in Parquet files of 0.5 GB. Half of the default `--data_memory_gb`
        holds four of these Parquet files (docs/input.md).
      default_augmentation: What `--augmentation=auto` selects. Characters must not be flipped, and
        small pictures are shifted by whole pixels.
      train_images: Number of training images, if it is known without looking at the files.
      default_recipe: The recipe for runs that set neither `--recipe` nor `--flagfile`.
    """

    module: str
    help_note: str = ""
    requires_data_dir: bool = True
    url_shuffle_window: int | None = None
    default_augmentation: str = "alexnet"
    train_images: int | None = None
    default_recipe: str = "hybrid"


_TFDS = SourceType("tfds", requires_data_dir=False)
SOURCES = {
    "folder": SourceType("folder", default_recipe="gradual_warmup"),
    "tfrecord": SourceType("tfrecord"),
    "webdataset": SourceType("webdataset", url_shuffle_window=16),
    "parquet": SourceType("parquet", url_shuffle_window=4),
    "idx": SourceType("idx", default_augmentation="digits"),
    "fashion_mnist": SourceType(
        "idx",
        "IDX files or TFDS",
        requires_data_dir=False,
        default_augmentation="shift",
        train_images=60_000,
    ),
    "digits": SourceType(
        "digits", requires_data_dir=False, default_augmentation="digits", train_images=1500
    ),
    "synthetic": SourceType("synthetic", "JPEGs", requires_data_dir=False),
    "synthetic_tensors": SourceType("synthetic", "nothing to decode", requires_data_dir=False),
    "imagenet2012": dataclasses.replace(_TFDS, train_images=mlperf.TRAIN_IMAGES),
}
_TFDS_AUGMENTATIONS = {
    **dict.fromkeys(("mnist", "kmnist", "emnist", "svhn_cropped"), "digits"),
    **dict.fromkeys(("cifar10", "cifar100", "fashion_mnist"), "shift"),
}
_OTHER_TFDS_NAMES = "or the name of another TFDS image classification dataset"


def _name_with_note(name: str) -> str:
    note = SOURCES[name].help_note
    return f"{name} ({note})" if note else name


NAMES = f"{', '.join(SOURCES)}, {_OTHER_TFDS_NAMES}"
HELP = f"{', '.join(map(_name_with_note, SOURCES))}, {_OTHER_TFDS_NAMES}"
URL_DATASETS = " and ".join(name for name, source in SOURCES.items() if source.url_shuffle_window)
_FLAGS = {
    "num_classes": "num_classes",
    "num_examples": "num_examples",
    "val_fraction": "val_fraction",
    "storage_timeout": "storage_timeout",
    "cache_dir": "data_cache_dir",
}
"""Maps attributes of a `DatasetRequest` to the flags that set them."""


def source_type(name: str) -> SourceType:
    """Returns the source type of a dataset.

    A name that is not in `SOURCES` is that of a TFDS dataset, in the form NAME/CONFIG:VERSION.
    """
    if name in SOURCES:
        return SOURCES[name]
    tfds_name = name.partition("/")[0].partition(":")[0]
    augmentation = _TFDS_AUGMENTATIONS.get(tfds_name, _TFDS.default_augmentation)
    return dataclasses.replace(_TFDS, default_augmentation=augmentation)


@dataclasses.dataclass(frozen=True)
class SplitSummary:
    """Summarizes what a directory listing shows about a split.

    Attributes:
      description: Location of the split, for messages.
      num_classes: Number of classes; None if it is unknown until the files are read.
    """

    description: str
    num_classes: int | None = None


@dataclasses.dataclass(frozen=True)
class DatasetRequest:
    """Names one split of a dataset and says how to read it.

    Attributes:
      name: Name of the dataset, as for `--dataset`.
      data_dir: Directory or URL of the dataset. `digits` is written there, by default to the
        user's cache directory. A URL needs `cache_dir`.
      split: "train" or "validation".
      num_classes: Number of classes of synthetic images, or of files that do not state it. For a
        folder, the number of its directories, if some of them have no images.
      num_examples: Number of images in the training split of a synthetic dataset.
      memory_bytes: Limit on the bytes of Parquet row groups that are kept in memory.
      cache_dir: Local directory for copies of the files at a URL.
      val_fraction: Fraction of each class to use for validation, for a folder that has no
        validation split.
      storage_timeout: Seconds for which a failed request to a URL is repeated.
    """

    name: str
    data_dir: str | None = None
    split: str = "train"
    num_classes: int | None = None
    num_examples: int | None = None
    memory_bytes: int = 1 << 30
    cache_dir: str | None = None
    val_fraction: float = 0.0
    storage_timeout: float = 120.0

    @classmethod
    def from_flags(cls, flags: Any, split: str = "train", **options: Any) -> DatasetRequest:
        """Returns the request that the flags of a configuration or of a command describe.

        Args:
          flags: Object that has the flags as attributes: `config.data` of a run, or the arguments
            of a command, which may lack some of them.
          split: "train" or "validation".
          **options: Attributes that no flag sets, or that override their flag.
        """
        attributes = {
            attribute: getattr(flags, flag)
            for attribute, flag in _FLAGS.items()
            if hasattr(flags, flag)
        }
        return cls(flags.dataset, flags.data_dir, split, **attributes | options)

    @property
    def directory(self) -> Path:
        """The path of `data_dir`, for sources that require one."""
        return expand_home(self.data_dir or "")

    def open_directory(self) -> directories.Directory:
        """Returns the dataset's directory, which is on this host or at a URL."""
        # `_check` has made sure that a URL comes with a directory for copies.
        if not self.cache_dir:
            return directories.Directory(str(self.directory))
        from hybrid_imagenet.data.remote import RemoteDirectory

        return RemoteDirectory(
            self.data_dir or "", expand_home(self.cache_dir), self.storage_timeout
        )

    def probe(self) -> SplitSummary:
        """Looks for the files of the split without reading images or asking a server.

        It lists directories only, which takes less than a second.

        Raises:
          UserError: If the dataset is unknown, or its directory or files are missing.
        """
        if is_url(self.data_dir or ""):
            self._check()
            return SplitSummary(without_secrets(f"{self.data_dir} is read when training starts"))
        summary: SplitSummary = self._call_source_module("probe_split")
        return summary

    def open(self) -> Source:
        """Opens the split.

        Raises:
          UserError: If the dataset does not exist or cannot be used.
        """
        source: Source = self._call_source_module("open_split")
        return source

    def _call_source_module(self, function: str) -> Any:
        """Returns the result of `probe_split` or `open_split` of the source's module."""
        try:
            self._check()
            module = importlib.import_module(
                f"hybrid_imagenet.data.sources.{source_type(self.name).module}"
            )
            return getattr(module, function)(self)
        except OSError as error:
            raise UserError(
                f"{error.filename or self.data_dir}: cannot be read ({error.strerror or error})"
            ) from None

    def _check(self) -> None:
        """Raises UserError if the dataset does not support an attribute that is set."""
        kind = source_type(self.name)
        if self.val_fraction and kind.module != "folder":
            raise UserError(
                f"--val_fraction={self.val_fraction:g} needs --dataset=folder, not {self.name}."
                f" Omit it, or use --tuning_split={self.val_fraction:g}."
            )
        if self.num_examples and kind.module != "synthetic":
            raise UserError(
                f"--num_examples={self.num_examples} is for synthetic datasets, not {self.name}."
                " Omit it, or hold out images with --tuning_split."
            )
        if self.num_classes and self.num_classes > listing.MAX_CLASSES:
            raise UserError(
                f"--num_classes={self.num_classes} must be at most {listing.MAX_CLASSES:,},"
                " because the last layer of a network for more classes does not fit into memory."
            )
        if self.cache_dir and not is_url(self.data_dir or ""):
            raise UserError(
                f"--data_cache_dir={self.cache_dir} is for copies of files at a URL, but"
                " --data_dir is not a URL. Omit --data_cache_dir."
            )
        if not self.data_dir:
            if kind.requires_data_dir:
                raise UserError(
                    f"--dataset={self.name} needs the dataset's directory: set --data_dir."
                )
        elif not is_url(self.data_dir):
            if kind.requires_data_dir and not self.directory.is_dir():
                raise UserError(
                    f"--data_dir={self.data_dir} is not a directory. Set it to the directory of the"
                    " dataset."
                )
        elif kind.url_shuffle_window is None:
            raise UserError(
                f"--data_dir={self.data_dir} is a URL, which --dataset={self.name} does not"
                f" support. Only {URL_DATASETS} can be read from URLs."
            )
        elif not self.cache_dir:
            raise UserError(
                f"--data_dir={self.data_dir} is a URL. Set --data_cache_dir to a local directory"
                " for copies of its files."
            )


def open_source(
    name: str, data_dir: str | None = None, split: str = "train", **options: Any
) -> Source:
    """Opens one split of a dataset, as the training program does.

    Args:
      name: Name of the dataset, as for `--dataset`.
      data_dir: Directory or URL of the dataset (default: None, as for `--data_dir`).
      split: "train" or "validation" (default: "train").
      **options: Other attributes of `DatasetRequest`.

    Returns:
      The encoded images of the split, which are not read yet.

    Raises:
      UserError: If there is no such dataset or it cannot be used.
    """
    return DatasetRequest(name, data_dir, split, **options).open()


def probe_splits(request: DatasetRequest, splits: tuple[str, ...] = SPLITS) -> SplitSummary:
    """Looks for the files of several splits, and returns the summary of the first.

    Args:
      request: The dataset; its own split is ignored.
      splits: The splits to look for.

    Raises:
      UserError: See `DatasetRequest.probe`.
    """
    summaries = [dataclasses.replace(request, split=split).probe() for split in splits]
    return summaries[0]
