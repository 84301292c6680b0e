"""Reads WebDataset tar files, from a directory or a URL."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import posixpath
import random
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files
from hybrid_imagenet.data import images, listing
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.directories import Directory
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources.source import (
    BadRecord,
    Source,
    load_or_build_index,
    raise_if_file_may_be_intact,
)
from hybrid_imagenet.errors import UserError

_INFO_FILE = "_info.json"
# The command that decompresses a file, by its suffix.
_DECOMPRESS_COMMANDS = {
    ".tar.gz": "gzip -dk",
    ".tgz": "gzip -dk",
    ".tar.bz2": "bzip2 -dk",
    ".tar.xz": "xz -dk",
    ".tar.zst": "zstd -d",
}
_COMPRESSED_SUFFIXES = tuple(_DECOMPRESS_COMMANDS)
_SCAN_THREADS = 8
_MAX_INDICES_IN_MEMORY = 4096
IMAGE_EXTENSIONS = tuple(
    suffix.removeprefix(".") for form in images.FORMATS for suffix in form.suffixes
)
_LABEL_EXTENSIONS = ("cls", "json")
# Version of the rules that recognize samples. Increase it when they change: an index that was built
# by other rules is then built again.
_INDEX_VERSION = 4
# Values of offsets and labels in an index that stand for a sample that cannot be used. They are
# stored, so that a bad sample is reported when it is read, not for every file at the start.
_MISSING = -1
_MULTIPLE_LABELS = -2
_BROKEN_LINK = -3
# Linux follows up to 40 links on the way to one file. More are a circle.
_MAX_LINKS = 40
# Text of several numbers, such as a one-hot label.
_NUMBER_LIST = re.compile(rb"\s*-?[\d.]+(?:[\s,;]+-?[\d.]+)+\s*")
# tar fills the last of its records, which have 10 KiB by default, with zeros. More zeros than this
# are left by an interrupted copy that reserved its space.
_MAX_TRAILING_ZEROS = 4 << 20
# A longer file does not hold a label, and reading it would cost time and memory.
_MAX_LABEL_FILE_BYTES = 1 << 20
# Labels are int32 in batches.
_MAX_LABEL = 2**31 - 1


def probe_split(request: DatasetRequest) -> SplitSummary:
    """Finds the tar files of a split."""
    _find_split(request.open_directory(), request.split)
    return SplitSummary(f"found in {request.directory}")


def open_split(request: DatasetRequest) -> Source:
    """Opens the tar files of a split, at a path or a URL."""
    return WebDatasetSource(request.open_directory(), request.split, request.num_classes)


class WebDatasetSource(Source):
    """Gives random access to the samples in the tar files of a split.

    `scan_tar` defines which files are the image and the label of a sample. Labels count from 0. The
    files of a split are the ones that `_info.json` lists (in the form of timm, with the number of
    samples in each file). Without it, they are the files that have the name of the split as a word
    of their name, or that are in a directory of that name. Each tar file is scanned once, by
    reading one header after another, and the index is cached.

    The `webdataset` package itself is not used. It reads samples in order, and shuffles them in a
    buffer whose content it does not save, so it can neither resume within an epoch nor return each
    image exactly once on any number of ranks.

    At a URL without `_info.json`, all files of the split are copied at the start, because their
    samples must be counted.

    Args:
      directory: Contains the files.
      split: "train" or "validation".
      num_classes: Number of classes if there is no `labels.txt` (one name per line). By default it
        is one more than the largest label of the training files. `labels.txt` is compared with that
        label, too, if the files are on this host.

    Raises:
      UserError: If files are missing, compressed, damaged, of several sets, or hold other numbers
        of samples than `_info.json` says; or if a sample has two images or two labels.
    """

    def __init__(self, directory: Directory, split: str, num_classes: int | None) -> None:
        super().__init__()
        self._directory = directory
        self.reads = directory.reads
        self._index_of_file = functools.lru_cache(maxsize=_MAX_INDICES_IN_MEMORY)(self._load_index)
        split_files = _find_split(directory, split)
        self._files = split_files.names
        self.notes = split_files.notes
        self._listed_sizes = split_files.sizes
        self.file_names = self._files
        try:
            directory.look_up_sizes(self._files)
        except OSError as error:
            raise UserError(
                f"{error} does not exist, or cannot be accessed. Restore it, or correct --data_dir."
            ) from None
        # With a list of sizes, remote files need not be copied before their samples are read.
        self._is_copied_later = self._listed_sizes is not None and directory.remote
        if self._listed_sizes is not None and self._is_copied_later:
            sizes = self._listed_sizes
        else:
            sizes = self._scan_all()
        self._sizes = np.array(sizes, np.int64)
        self.shard_sizes = self._sizes
        self._ends = np.cumsum(self._sizes)
        self.num_examples = int(self._ends[-1])
        if not self.num_examples:
            raise UserError(
                f"The {len(self._files)} {split} tar files in {directory.location} hold no samples."
                " Restore them, or correct --data_dir."
            )
        self.class_names = self._read_class_names(split) or self._numbered_classes(
            split, num_classes
        )
        self.num_classes = len(self.class_names)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the tar file of a sample and the offset of its first header."""
        file, sample = self._position(index)
        begin = self._index_of_file(file).begin[sample]
        return self._directory.display_name(self._files[file]), int(begin)

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one image with a single operation."""
        file, sample = self._position(index)
        tar_index = self._index_of_file(file)
        offset = int(tar_index.offset[sample])
        length = int(tar_index.length[sample])
        label = int(tar_index.label[sample])
        reason = _reason_if_unusable(offset, label)
        if reason:
            raise BadRecord(*self.locate(index), reason)
        try:
            image = self._directory.read(self._files[file], offset, length)
        except OSError as error:
            path, begin = self.locate(index)
            raise_if_file_may_be_intact(path, error)
            raise BadRecord(path, begin, error.strerror or str(error)) from None
        if len(image) < length:
            raise BadRecord(*self.locate(index), "the file ends early")
        return image, self._validate_label(index, label)

    def stored_labels(self) -> npt.NDArray[np.int64] | None:
        """Returns the labels in the indices of the tar files; None if files are copied later."""
        if self._is_copied_later:
            return None
        indices = [self._index_of_file(number) for number in range(len(self._files))]
        return np.concatenate([index.label for index in indices])

    def prefetch(self, shards: Sequence[int]) -> None:
        self._directory.prefetch([self._files[number] for number in shards])

    def _position(self, index: int) -> tuple[int, int]:
        """Returns the number of a sample's file, and its number in that file."""
        file = int(np.searchsorted(self._ends, index, "right"))
        return file, int(index - (self._ends[file] - self._sizes[file]))

    def _load_index(self, number: int) -> TarIndex:
        """Returns the index of a file, from the cache unless the file has changed.

        Raises:
          UserError: If the file cannot be used, or has another size than `_info.json` says.
        """
        name = self._files[number]
        path = self._directory.display_name(name)
        try:
            local_path = self._directory.local_path(name)
            # The index of a copy is stored next to it. The index of a local file is in the user's
            # cache, until the file changes.
            cache_file = self._directory.index_path(name) or files.cached_index_path(
                "tar", _INDEX_VERSION, files=[local_path]
            )
            index = load_or_build_index(cache_file, TarIndex, lambda: scan_tar(local_path))
        except OSError as error:
            raise UserError(
                f"{path} cannot be read ({error.strerror or error}). Restore the file, or correct"
                " its permissions."
            ) from None
        except ValueError as error:
            raise UserError(f"{path}: {error}") from None
        if self._listed_sizes and len(index.begin) != self._listed_sizes[number]:
            raise UserError(
                f"{path} holds {len(index.begin)} samples, but {_INFO_FILE} says"
                f" {self._listed_sizes[number]}. Restore the file, or correct the list."
            )
        return index

    def _scan_all(self) -> list[int]:
        """Returns the number of samples in each file, after scanning them all."""
        numbers = list(range(len(self._files)))
        self._directory.prefetch(self._files)
        # Each process of a host begins with other files. By the time that it gets to the files of
        # the others, they have stored their indices.
        random.Random(os.getpid()).shuffle(numbers)
        with concurrent.futures.ThreadPoolExecutor(min(_SCAN_THREADS, len(numbers))) as pool:
            indices = dict(zip(numbers, pool.map(self._index_of_file, numbers), strict=True))
        return [len(indices[number].begin) for number in range(len(self._files))]

    def _read_class_names(self, split: str) -> tuple[str, ...]:
        """Returns the classes in `labels.txt`, or () without that file.

        They are compared with the labels, if the files are on this host.
        """
        path = self._directory.display_name(listing.LABELS_FILE)
        content = self._directory.read_small_file(listing.LABELS_FILE)
        if content is None:
            return ()
        names = listing.parse_class_list(path, content)
        if self._is_copied_later:
            self.unverified_class_list = path
        elif split == "train":
            self.notes += listing.check_labels(path, names, self._largest_label())
        return names

    def _numbered_classes(self, split: str, num_classes: int | None) -> tuple[str, ...]:
        """Returns numbers as class names, by default up to the largest training label."""
        if num_classes is None and not self._is_copied_later:
            train = self if split == "train" else WebDatasetSource(self._directory, "train", 1)
            num_classes = max(train._largest_label() + 1, 1)
        return listing.numbered_class_names(self._directory.location, num_classes)

    def _largest_label(self) -> int:
        indices = [self._index_of_file(number) for number in range(len(self._files))]
        return max(int(index.label.max(initial=-1)) for index in indices)


def _reason_if_unusable(offset: int, label: int) -> str:
    """Returns why a sample with these values in its index cannot be used, or ""."""
    if _BROKEN_LINK in (offset, label):
        member = "image" if offset == _BROKEN_LINK else "label"
        return (
            f"its {member} is a link to a file that the archive does not hold: write the archive"
            " with tar --dereference"
        )
    if label == _MULTIPLE_LABELS:
        return (
            "the label is a list, as one-hot or multiple labels are: write one class number per"
            " sample"
        )
    if offset < 0:
        extensions = ", ".join(IMAGE_EXTENSIONS)
        return f"the sample lacks an image (a file whose whole extension is {extensions})"
    if label < 0:
        return "the sample lacks a label (a number in cls or json)"
    return ""


class _SplitFiles(NamedTuple):
    """The tar files of a split.

    Attributes:
      names: Their names, in order.
      sizes: Number of samples in each, if `_info.json` lists them.
      notes: On files that are not read.
    """

    names: list[str]
    sizes: list[int] | None
    notes: tuple[DatasetNote, ...]


def _find_split(directory: Directory, split: str) -> _SplitFiles:
    """Finds the tar files of a split, in `_info.json` or by their names.

    Raises:
      UserError: If there are none, if one is missing or compressed, if they are of several sets, or
        if `_info.json` cannot be read.
    """
    content = directory.read_small_file(_INFO_FILE)
    if content is not None:
        return _find_split_in_list(directory, split, content)
    return _find_split_by_names(directory, split)


def _find_split_in_list(directory: Directory, split: str, content: bytes) -> _SplitFiles:
    """Returns the files that `_info.json`, with this content, lists for a split."""
    try:
        splits = json.loads(content)["splits"]
        split_name = next(name for name in listing.SPLIT_NAMES[split] if name in splits)
        entry = splits[split_name]
        names = [str(file) for file in entry["filenames"]]
        sizes = [int(size) for size in entry["shard_lengths"]]
        listed_names: set[str] = set()
        for other_entry in splits.values():
            listed_names.update(str(file) for file in other_entry.get("filenames", ()))
    except (
        ValueError,
        OverflowError,
        KeyError,
        TypeError,
        AttributeError,
        StopIteration,
        RecursionError,
    ) as error:
        raise UserError(
            f"{directory.display_name(_INFO_FILE)} does not list the files of {split} with their"
            f" shard_lengths ({error!r}). Correct the list, or remove it."
        ) from None
    if not names or len(names) != len(sizes):
        raise UserError(
            f"{directory.display_name(_INFO_FILE)} has {len(names)} files but {len(sizes)} lengths"
            f" for {split}. Correct the list, or remove it."
        )
    skipped = listing.SkippedFiles()
    # A server with a list need not be able to list its directory.
    if not directory.remote:
        suffixes = (".tar", *_COMPRESSED_SUFFIXES)
        tar_names = {name for name in directory.list_files() if name.endswith(suffixes)}
        for name in sorted(tar_names - listed_names):
            skipped.add(f"not in {_INFO_FILE}", name)
    return _SplitFiles(names, sizes, skipped.notes(directory.location))


def _find_split_by_names(directory: Directory, split: str) -> _SplitFiles:
    """Returns the files of a split by their names or those of their directory."""
    location = directory.location
    names = directory.list_files()
    files_by_split_name = listing.split_name_lookup(names, ".tar")
    split_files = listing.files_of_split(location, split, files_by_split_name)
    skipped = listing.SkippedFiles()
    for suffix, command in _DECOMPRESS_COMMANDS.items():
        compressed = listing.files_of_split(
            location, split, listing.split_name_lookup(names, suffix)
        )
        for name in compressed:
            tar_name = f"{name.removesuffix(suffix)}.tar"
            if tar_name not in split_files:
                raise UserError(
                    f"{directory.display_name(name)} is compressed, but images are read in random"
                    f" order. Decompress it to {tar_name} ({command}), or move it away."
                )
            skipped.add("compressed, next to the unpacked file", name, fault=False)
    if not split_files:
        raise UserError(
            f"--data_dir={location} holds no {split} tar files. Their names must be like"
            f" {split}-000000.tar, or they must be in a directory {split}."
        )
    ordered_files = listing.complete_file_set(location, split, split_files)
    tar_names = [name for name in names if name.endswith(".tar")]
    notes = (
        *listing.numbering_gaps(location, ordered_files),
        *skipped.notes(location),
        *listing.unassigned_files(location, tar_names, files_by_split_name),
    )
    return _SplitFiles(ordered_files, None, notes)


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Locates the samples of one tar file, in its order.

    Attributes:
      begin: Offset of the header of each sample's first member, int64 [n].
      offset: First byte of each image, int64 [n]; -1 if the sample has none, -3 if it is a link to
        a file that is not in the archive.
      length: Number of bytes of each image, int64 [n].
      label: Class number of each sample, int64 [n]; -1 if it has none, -2 if it is a list, -3 if it
        is a link to a file that is not in the archive.
      version: Version of the rules that recognize samples.
    """

    begin: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    version: int = _INDEX_VERSION

    def __post_init__(self) -> None:
        """Raises ValueError for an index that was built by other rules."""
        if self.version != _INDEX_VERSION:
            raise ValueError(f"version {self.version} of the rules")


def scan_tar(path: Path) -> TarIndex:
    """Builds the index of a tar file from its headers and label files.

    A sample consists of consecutive members with the same key (the WebDataset format). The key is
    the path up to the first dot in its last component, and the rest is the extension. The image is
    the member whose whole extension is one of `IMAGE_EXTENSIONS`: `1.depth.png` is not one. The
    label is the number in `.cls`, or `label` or `cls` in `.json`. Hard and symbolic links are
    followed within the archive.

    Raises:
      OSError: If the file cannot be read.
      ValueError: If the archive is truncated, damaged, compressed, has sparse members or consists
        of two that were joined; or if a sample has two images, or two labels that differ.
    """
    members: list[tarfile.TarInfo] = []
    labels: dict[int, set[int]] = {}
    end = 0
    with files.open_regular(path) as file:
        try:
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    if member.issparse():
                        raise ValueError(
                            f"{member.name} is stored as a sparse file: write the archive without"
                            " --sparse"
                        )
                    # The header of a link may have the size of its target, whose content does not
                    # follow.
                    end = member.offset_data + (member.size if member.isfile() else 0)
                    members.append(member)
                    if _is_label_file(member):
                        # Read labels now, because the disk has read them along with their headers.
                        labels[member.offset_data] = _read_labels(file, member)
        except tarfile.TarError as error:
            _raise_if_compressed(file)
            raise ValueError(f"offset {end}: {error}; restore the file") from None
        blocks = -(-end // tarfile.BLOCKSIZE)
        _check_end(file, blocks * tarfile.BLOCKSIZE)
    rows = _index_samples(members, labels)
    columns = np.array(rows, np.int64).reshape(-1, len(_Sample._fields)).T.copy()
    return TarIndex(*columns)


def _is_label_file(member: tarfile.TarInfo) -> bool:
    extension = _split_name(member.name)[1]
    is_short = member.size <= _MAX_LABEL_FILE_BYTES
    return extension in _LABEL_EXTENSIONS and member.isfile() and is_short


def _read_labels(file: BinaryIO, member: tarfile.TarInfo) -> set[int]:
    """Returns the class numbers in a label file; restores the position in `file`."""
    position = file.tell()
    file.seek(member.offset_data)
    content = file.read(member.size)
    file.seek(position)
    return _parse_labels(content, _split_name(member.name)[1])


class _Sample(NamedTuple):
    """One sample, as in `TarIndex`."""

    begin: int
    offset: int
    length: int
    label: int


def _index_samples(
    members: Sequence[tarfile.TarInfo], labels: Mapping[int, set[int]]
) -> list[_Sample]:
    """Groups the members of an archive into samples.

    Args:
      members: All members, in order.
      labels: Class numbers in the members that have some, by the offset of their content.
    """
    samples: list[_Sample] = []
    key = ""
    used_names: dict[str, str] = {}
    members_by_path: dict[str, tarfile.TarInfo] = {}
    # Normalizing all paths takes time, and most archives have no links.
    if any(member.islnk() or member.issym() for member in members):
        members_by_path = {posixpath.normpath(member.name): member for member in members}
    for member in members:
        member_key, extension = _split_name(member.name)
        is_content = member.isfile() or member.islnk() or member.issym()
        if not (member_key and extension and is_content):
            continue
        if member_key != key:
            samples.append(_Sample(member.offset, _MISSING, 0, _MISSING))
            key = member_key
            used_names = {}
        target = _follow_links(member, members_by_path)
        samples[-1] = _add_member(samples[-1], member, target, labels, extension, used_names)
    return samples


def _add_member(
    sample: _Sample,
    member: tarfile.TarInfo,
    target: tarfile.TarInfo | None,
    labels: Mapping[int, set[int]],
    extension: str,
    used_names: dict[str, str],
) -> _Sample:
    """Returns a sample with one of its members added.

    Args:
      sample: The sample so far.
      member: The member to add: a file, or a link to one.
      target: The file with its content; None for a link to a file that is not in the archive.
      labels: See `_index_samples`.
      extension: Extension of `member`.
      used_names: Names of the members with the "image" and the "label" of the sample so far.

    Raises:
      ValueError: If the sample has an image or another label already.
    """
    if extension in IMAGE_EXTENSIONS:
        _claim_name(used_names, "image", member.name)
        if target is None:
            return sample._replace(offset=_BROKEN_LINK, length=0)
        return sample._replace(offset=target.offset_data, length=target.size)
    if extension not in _LABEL_EXTENSIONS:
        return sample
    if target is None:
        is_labeled = sample.label != _MISSING
        return sample if is_labeled else sample._replace(label=_BROKEN_LINK)
    numbers = labels.get(target.offset_data, set())
    if sample.label == _MULTIPLE_LABELS or _MULTIPLE_LABELS in numbers:
        return sample._replace(label=_MULTIPLE_LABELS)
    for number in numbers - {sample.label}:
        _claim_name(used_names, "label", member.name)
        sample = sample._replace(label=number)
    return sample


def _claim_name(used_names: dict[str, str], role: str, name: str) -> None:
    """Records the member with a sample's image or label.

    Raises:
      ValueError: If the sample has one already.
    """
    if role in used_names:
        raise ValueError(
            f"a sample has two {role}s, {used_names[role]} and {name}: leave one in each sample, or"
            f" give the other another extension (such as second.{name.rpartition('.')[2]})"
        )
    used_names[role] = name


def _follow_links(
    member: tarfile.TarInfo, members_by_path: Mapping[str, tarfile.TarInfo]
) -> tarfile.TarInfo | None:
    """Returns the file to which a link leads, or the member itself if it is a file.

    Returns None for a link that leads out of the archive, in a circle, or not to a file.
    """
    target: tarfile.TarInfo | None = member
    for _ in range(_MAX_LINKS):
        if target is None or target.isfile():
            return target
        if target.issym():
            # Symbolic links are relative to their own directory.
            path = posixpath.join(posixpath.dirname(target.name), target.linkname)
        elif target.islnk():
            # Hard links are relative to the root of the archive.
            path = target.linkname
        else:
            return None
        target = members_by_path.get(posixpath.normpath(path))
    return None


def _raise_if_compressed(file: BinaryIO) -> None:
    """Raises ValueError for a compressed archive, which allows no random access."""
    file.seek(0)
    compression = files.detect_compression(file.read(tarfile.BLOCKSIZE))
    if compression:
        name, command = compression
        raise ValueError(
            f"the file is compressed ({name}), but images are read in random order. Decompress each"
            f" tar file into another directory, as in: mkdir plain; {command} < FILE.tar >"
            " plain/FILE.tar"
        )


def _check_end(file: BinaryIO, end: int) -> None:
    """Raises ValueError unless only zeros follow the last member that was found.

    tarfile ends silently at a damaged header, so that member may not be the last of the archive.

    Args:
      file: The archive.
      end: Offset of the first block after that member.
    """
    file.seek(end)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise ValueError(f"offset {end}: the file ends early; restore it")
    if any(block):
        raise ValueError(f"offset {end}: the header of a file is damaged; restore the file")
    while block := file.read(tarfile.RECORDSIZE):
        if any(block):
            second_archive = file.tell() - len(block.lstrip(b"\0"))
            raise ValueError(
                f"offset {second_archive}: more follows the end of the archive, as if two were"
                " joined: write each to its own file"
            )
    if file.tell() - end > _MAX_TRAILING_ZEROS:
        raise ValueError(
            f"offset {end}: only zeros follow, as after an interrupted copy; restore the file"
        )


def _split_name(name: str) -> tuple[str, str]:
    """Returns the key and the whole extension of a member.

    The key is "" for a member that belongs to no sample, such as `__meta__.json`: names that begin
    with `__` describe the archive.
    """
    directory, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    key = f"{directory}/{stem}" if stem and not base.startswith("__") else ""
    return key, extension.lower()


def _parse_labels(content: bytes, extension: str) -> set[int]:
    """Returns the class numbers in a label file of a sample.

    There is none, one, or two that contradict each other. A list, such as a one-hot label, gives
    `_MULTIPLE_LABELS` alone.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        is_number_list = extension == "cls" and _NUMBER_LIST.fullmatch(content)
        return {_MULTIPLE_LABELS} if is_number_list else set()
    values = [value]
    if extension == "json":
        values = [value.get("label"), value.get("cls")] if isinstance(value, dict) else []
    if any(isinstance(value, list) for value in values):
        return {_MULTIPLE_LABELS}
    return {number for number in values if type(number) is int and 0 <= number <= _MAX_LABEL}
