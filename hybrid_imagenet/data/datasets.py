"""Lists the data sets that --dataset takes, in plain values: nothing here needs TensorFlow.

A new one is a module in `data/sources/` and a line in `SOURCES`. The module has two functions:
`find(request)` looks for the files of a split by a listing alone and returns a `Glance`,
`open_split(request)` returns a `Source`. Flags, help, the check before TensorFlow is loaded, the
default augmentation and the window at a URL follow from the line.
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


@dataclasses.dataclass(frozen=True)
class SourceType:
    """A form in which data sets lie.

    Attributes:
      module: in `data/sources/`.
      note: what --help says of it, if its name does not.
      directory: whether --data_dir must be given.
      url_window: shards that are mixed at a time at a URL: some 20,000 images of ImageNet, in 1,024
        tar files or in Parquet files of 0.5 GB, of which half of the default --data_memory_gb holds
        four (docs/input.md); None for what is not read from URLs.
      augmentation: what --augmentation=auto means: no flips for characters, shifts by whole pixels
      for small pictures.
      images: training images, where these are known without a look at the files.
      recipe: what is trained without --recipe and without a flag file.
    """

    module: str
    note: str = ""
    directory: bool = True
    url_window: int | None = None
    augmentation: str = "alexnet"
    images: int | None = None
    recipe: str = "hybrid"


_TFDS = SourceType("tfds", directory=False)
SOURCES = {
    "folder": SourceType("folder", recipe="gradual_warmup"),
    "tfrecord": SourceType("tfrecord"),
    "webdataset": SourceType("webdataset", url_window=16),
    "parquet": SourceType("parquet", url_window=4),
    "idx": SourceType("idx", augmentation="digits"),
    "fashion_mnist": SourceType(
        "idx", "IDX files or TFDS", directory=False, augmentation="shift", images=60_000
    ),
    "digits": SourceType("digits", directory=False, augmentation="digits", images=1500),
    "synthetic": SourceType("synthetic", "JPEGs", directory=False),
    "synthetic_tensors": SourceType("synthetic", "nothing to decode", directory=False),
    "imagenet2012": dataclasses.replace(_TFDS, images=mlperf.TRAIN_IMAGES),
}
_TFDS_AUGMENTATIONS = {
    **dict.fromkeys(("mnist", "kmnist", "emnist", "svhn_cropped"), "digits"),
    **dict.fromkeys(("cifar10", "cifar100", "fashion_mnist"), "shift"),
}
_OTHERS = "or the name of another TFDS image classification dataset"
NAMES = f"{', '.join(SOURCES)}, {_OTHERS}"
HELP = (
    f"{', '.join(name + f' ({known.note})' * bool(known.note) for name, known in SOURCES.items())},"
    f" {_OTHERS}"
)
AT_URLS = " and ".join(name for name, source in SOURCES.items() if source.url_window)
_FLAGS = {
    **{name: name for name in ("num_classes", "num_examples", "val_fraction", "storage_timeout")},
    "cache": "data_cache",
    "cache_dir": "data_cache_dir",
}
"""The flags that give the attributes of a `Request`."""


def of(name: str) -> SourceType:
    """Returns what is known of a data set; a name that is not listed is one of TFDS:
    NAME/CONFIG:VERSION.
    """
    base = name.partition("/")[0].partition(":")[0]
    other = dataclasses.replace(_TFDS, augmentation=_TFDS_AUGMENTATIONS.get(base, "alexnet"))
    return SOURCES.get(name, other)


@dataclasses.dataclass(frozen=True)
class Glance:
    """What a listing shows of a data set.

    Attributes:
      text: where it was found, for people.
      classes: their number; None where only reading can tell.
    """

    text: str
    classes: int | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """One split of a data set, and how it is read.

    Attributes:
      name: of `SOURCES`, or of a TFDS set.
      data_dir: where it lies; for `digits` where it is written, by default the user's cache. A URL
      needs `cache_dir`.
      split: "train" or "validation".
      num_classes: of synthetic images, or of files that do not tell.
      num_examples: of the training split of a synthetic set.
      memory_bytes: bound on what is kept in memory: Parquet row groups, or the cache.
      cache: "encoded" keeps what was read in memory; "none" keeps nothing.
      cache_dir: local directory for copies of the files of a URL.
      val_fraction: of a folder without a validation split: the part of each class that is
      validated.
      storage_timeout: seconds for which a URL that fails is tried again.
    """

    name: str
    data_dir: str | None = None
    split: str = "train"
    num_classes: int | None = None
    num_examples: int | None = None
    memory_bytes: int = 1 << 30
    cache: str = "none"
    cache_dir: str | None = None
    val_fraction: float = 0.0
    storage_timeout: float = 120.0

    @classmethod
    def from_flags(cls, flags: Any, split: str = "train", **options: Any) -> Request:
        """Returns what the flags of a configuration, or those that another command has of them, ask
        for.

        Args:
          flags: the values by name.
          split: "train" or "validation".
          options: attributes that no flag has, or that go before its flag.
        """
        found = {
            field: getattr(flags, name) for field, name in _FLAGS.items() if hasattr(flags, name)
        }
        return cls(flags.dataset, flags.data_dir, split, **found | options)

    @property
    def directory(self) -> Path:
        """The directory that was given, where one must be."""
        return expand_home(self.data_dir or "")

    def files(self) -> directories.Directory:
        """Opens the directory, at a path or a URL."""
        if not self.cache_dir:  # which a URL must have
            return directories.Directory(str(self.directory))
        from hybrid_imagenet.data.remote import RemoteDirectory

        return RemoteDirectory(
            self.data_dir or "", expand_home(self.cache_dir), self.storage_timeout
        )

    def look(self) -> Glance:
        """Looks for the split by listings alone, within a second; no image is read, no server
        asked.

        Raises:
          UserError: for a data set that is unknown, or whose directory or files are missing.
        """
        if is_url(self.data_dir or ""):
            self._check()
            return Glance(without_secrets(f"{self.data_dir} is read when training starts"))
        found: Glance = self._ask("find")
        return found

    def open(self) -> Source:
        """Opens the split.

        Raises:
          UserError: if there is no such data set or it cannot be used.
        """
        source: Source = self._ask("open_split")
        if (
            self.cache == "none" or source.ready or source.side is not None
        ):  # the last has all pixels in memory
            return source
        from hybrid_imagenet.data.sources.wrappers import CachedSource

        return CachedSource(source, self.memory_bytes)

    def _ask(self, function: str) -> Any:
        """Returns the result of a function of the data set's module."""
        try:
            self._check()
            module = importlib.import_module(f"hybrid_imagenet.data.sources.{of(self.name).module}")
            return getattr(module, function)(self)
        except OSError as error:
            raise UserError(
                f"{error.filename or self.data_dir}: cannot be read ({error.strerror or error})"
            ) from None

    def _check(self) -> None:
        kind = of(self.name)
        if self.val_fraction and kind.module != "folder":
            raise UserError(
                f"--val_fraction={self.val_fraction:g} needs --dataset=folder, not {self.name}:"
                f" omit it, or use --tuning_split={self.val_fraction:g}"
            )
        if self.num_examples and kind.module != "synthetic":
            raise UserError(
                f"--num_examples={self.num_examples} is for synthetic datasets, not {self.name}:"
                " omit it, or hold images back by --tuning_split"
            )
        if self.num_classes and self.num_classes > listing.MOST_CLASSES:
            raise UserError(
                f"--num_classes={self.num_classes}: must be at most {listing.MOST_CLASSES:,},"
                " because the last layer of a network for more classes does not fit into memory"
            )
        if self.cache_dir and not is_url(self.data_dir or ""):
            raise UserError(
                f"--data_cache_dir={self.cache_dir} is for copies of files of a URL, not of a"
                " directory: omit it"
            )
        if not self.data_dir:
            if kind.directory:
                raise UserError(
                    f"--dataset={self.name}: give the directory where it lies as --data_dir"
                )
        elif not is_url(self.data_dir):
            if kind.directory and not self.directory.is_dir():
                raise UserError(f"--data_dir={self.data_dir}: no such directory")
        elif kind.url_window is None:
            raise UserError(
                f"--data_dir={self.data_dir}: URLs go with --dataset={AT_URLS}, not {self.name}"
            )
        elif not self.cache_dir:
            raise UserError(
                f"--data_dir={self.data_dir}: give a local directory for copies of its files as"
                " --data_cache_dir"
            )


def look(request: Request, splits: tuple[str, ...] = SPLITS) -> Glance:
    """Looks for several splits as `Request.look` does; returns what the first shows."""
    found = [dataclasses.replace(request, split=split).look() for split in splits]
    return found[0]
