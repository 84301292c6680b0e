"""Reads WebDataset tar files, from a directory or a URL: where each image lies, and its label."""

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
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from hybrid_imagenet import files
from hybrid_imagenet.data import images, listing
from hybrid_imagenet.data.datasets import DatasetRequest, SplitSummary
from hybrid_imagenet.data.directories import Directory
from hybrid_imagenet.data.listing import DatasetNote
from hybrid_imagenet.data.sources.source import BadRecord, Source, check_directory, remembered
from hybrid_imagenet.errors import UserError

_INFO = "_info.json"
_DECOMPRESS = {
    ".tar.gz": "gzip -dk",
    ".tgz": "gzip -dk",
    ".tar.bz2": "bzip2 -dk",
    ".tar.xz": "xz -dk",
    ".tar.zst": "zstd -d",
}
_PACKED = tuple(_DECOMPRESS)
_SCANS = 8  # files that a rank scans at the same time
_INDICES = 4096  # of files that are kept in memory
IMAGES = tuple(suffix.removeprefix(".") for form in images.FORMATS for suffix in form.suffixes)
_LABELS = ("cls", "json")
# Of the rules by which samples are recognized: an index of older rules is built again.
_VERSION = 4
_UNKNOWN = -1
_SEVERAL = -2  # several labels instead of one
_BROKEN_LINK = -3  # instead of an offset or a label
# Linux follows as many links to one file. More are a circle.
_MAX_LINKS = 40
_NUMBERS = re.compile(rb"\s*-?[\d.]+(?:[\s,;]+-?[\d.]+)+\s*")
_MOST_ZEROS = 4 << 20  # at the end: tar fills up its records, of 10 KiB unless told otherwise
_LONGEST_LABEL = 1 << 20  # bytes of a label's file
_LARGEST_LABEL = 2**31 - 1
_Row = tuple[int, int, int, int]  # begin, offset, length and label of a sample


def find(request: DatasetRequest) -> SplitSummary:
    """Finds the tar files of a split."""
    _find(request.open_directory(), request.split)
    return SplitSummary(f"found in {request.directory}")


def open_split(request: DatasetRequest) -> Source:
    """Opens the tar files of a split, at a path or a URL."""
    return WebDatasetSource(request.open_directory(), request.split, request.num_classes)


class WebDatasetSource(Source):
    """Gives random access to the samples of a split's tar files.

    `scan` says what a sample's image and label are; labels count from 0. The files of a split are
    those that `_info.json` lists (timm's form, with the samples in each), else those with the
    split's name as a word of their name, or in a directory of that name. Where samples lie is found
    by hopping from header to header, once, and remembered.

    The `webdataset` package itself reads one sample after another, with a buffer that shuffles and
    is not part of any state, so it can neither continue inside an epoch nor give each image once on
    any number of ranks.

    At a URL without `_info.json` all files of the split are copied at the start, as their samples
    must be counted.

    Args:
      directory: holds the files.
      split: "train" or "validation".
      num_classes: if there is no `labels.txt` (one name a line); else the largest label of the
        training files tells, with which a `labels.txt` is compared where the files are at hand.

    Raises:
      UserError: for files that are missing, compressed, damaged, of several sets, or hold other
        numbers of samples than `_info.json` says; and for samples with two images or labels.
    """

    def __init__(self, directory: Directory, split: str, num_classes: int | None) -> None:
        super().__init__()
        self._directory = directory
        self.reads = directory.reads
        self._index = functools.lru_cache(maxsize=_INDICES)(self._load)
        self._files, sizes, self.notes = _find(directory, split)
        self._promised = sizes
        self.listing = self._files
        try:
            directory.look_up_sizes(self._files)
        except OSError as error:
            raise UserError(f"{error}: no such file, or no access to it") from None
        self._copied_later = sizes is not None and directory.remote
        if sizes is None or not self._copied_later:
            sizes = self._scan_all()
        self.shard_sizes = self._sizes = np.array(sizes, np.int64)
        self._ends = np.cumsum(self._sizes)
        self.num_examples = int(self._ends[-1])
        if not self.num_examples:
            raise UserError(
                f"{directory.location}: its {len(self._files)} {split} tar files hold no samples"
            )
        self.class_names = self._listed_names(split) or self._numbered(split, num_classes)
        self.num_classes = len(self.class_names)

    def locate(self, index: int) -> tuple[str, int]:
        """Returns the tar file of a sample and the offset of the header of its first file there."""
        file, place = self._place(index)
        return self._directory.display_name(self._files[file]), int(self._index(file).begin[place])

    def read_one(self, index: int) -> tuple[bytes, int]:
        """Reads one image with a single operation."""
        file, place = self._place(index)
        found = self._index(file)
        offset, length, label = (
            int(values[place]) for values in (found.offset, found.length, found.label)
        )
        if _BROKEN_LINK in (offset, label):
            what = "image" if offset == _BROKEN_LINK else "label"
            reason = f"its {what} is a link to a file that the archive does not hold"
            raise BadRecord(
                *self.locate(index), f"{reason}: write the archive with tar --dereference"
            )
        if label == _SEVERAL:
            reason = (
                "the label is a list, as one-hot or several labels are: write one class number into"
                " each sample"
            )
            raise BadRecord(*self.locate(index), reason)
        if offset < 0 or label < 0:
            extensions = f"an image (a file whose whole extension is {', '.join(IMAGES)})"
            lacks = extensions if offset < 0 else "a label (a number in cls or json)"
            raise BadRecord(*self.locate(index), f"the sample lacks {lacks}")
        try:
            image = self._directory.read(self._files[file], offset, length)
        except OSError as error:
            check_directory(self.locate(index)[0])
            raise BadRecord(*self.locate(index), error.strerror or str(error)) from None
        if len(image) < length:
            raise BadRecord(*self.locate(index), "the file ends early")
        return image, self._checked_label(index, label)

    def prefetch(self, shards: Sequence[int]) -> None:
        self._directory.prefetch([self._files[number] for number in shards])

    def _place(self, index: int) -> tuple[int, int]:
        file = int(np.searchsorted(self._ends, index, "right"))
        return file, int(index - (self._ends[file] - self._sizes[file]))

    def _load(self, number: int) -> TarIndex:
        name = self._files[number]
        try:
            path = self._directory.local_path(name)
            # Of a local file the index is kept in the user's cache, until the file changes.
            stored = self._directory.index_path(name) or files.cached_index_path(
                "tar", _VERSION, of=[path]
            )
            index = remembered(stored, TarIndex, lambda: scan(path))
        except OSError as error:
            raise UserError(
                f"{self._directory.display_name(name)}: cannot be read ({error.strerror or error})"
            ) from None
        except ValueError as error:
            raise UserError(f"{self._directory.display_name(name)}: {error}") from None
        if self._promised and len(index.begin) != self._promised[number]:
            raise UserError(
                f"{self._directory.display_name(name)}: holds {len(index.begin)} samples,"
                f" {_INFO} says {self._promised[number]}; restore the file or correct the list"
            )
        return index

    def _scan_all(self) -> list[int]:
        numbers = list(range(len(self._files)))
        self._directory.prefetch(self._files)
        # Each process of a machine begins elsewhere, and finds what the others have stored by then.
        random.Random(os.getpid()).shuffle(numbers)
        with concurrent.futures.ThreadPoolExecutor(min(_SCANS, len(numbers))) as pool:
            found = dict(zip(numbers, pool.map(self._index, numbers), strict=True))
        return [len(found[number].begin) for number in range(len(self._files))]

    def _listed_names(self, split: str) -> tuple[str, ...]:
        """Returns the classes that `labels.txt` lists, compared with the labels where these are at
        hand.
        """
        place = self._directory.display_name(listing.LABELS_FILE)
        content = self._directory.read_small_file(listing.LABELS_FILE)
        names = listing.parse_class_list(place, content) if content is not None else ()
        if names and self._copied_later:
            self.class_list = place
        elif names and split == "train":
            self.notes += listing.check_labels(place, names, self._largest_label())
        return names

    def _numbered(self, split: str, num_classes: int | None) -> tuple[str, ...]:
        if num_classes is None:
            if self._copied_later:
                return listing.numbered_class_names(self._directory.location, None)
            source = self if split == "train" else WebDatasetSource(self._directory, "train", 1)
            num_classes = max(source._largest_label() + 1, 1)
        return listing.numbered_class_names(self._directory.location, num_classes)

    def _largest_label(self) -> int:
        return max(
            int(self._index(number).label.max(initial=-1)) for number in range(len(self._files))
        )


_Files = tuple[list[str], list[int] | None, tuple[DatasetNote, ...]]


def _find(directory: Directory, split: str) -> _Files:
    """Returns the tar files of a split, the samples in each if `_info.json` lists them, and notes
    on what is not read.

    Raises:
      UserError: if there are none, if one is missing or compressed, if they are of several sets, or
        if the list cannot be read.
    """
    return _listed(directory, split) or _found(directory, split)


def _listed(directory: Directory, split: str) -> _Files | None:
    """Returns the files of a split and the samples in each, as `_info.json` tells; None without
    one.
    """
    text = directory.read_small_file(_INFO)
    if text is None:
        return None
    try:
        splits = json.loads(text)["splits"]
        entry = next(splits[known] for known in listing.SPLIT_NAMES[split] if known in splits)
        files, sizes = (
            [str(file) for file in entry["filenames"]],
            [int(size) for size in entry["shard_lengths"]],
        )
        known = {str(file) for other in splits.values() for file in other.get("filenames", ())}
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        StopIteration,
        RecursionError,
    ) as error:
        raise UserError(
            f"{directory.display_name(_INFO)}: does not list the files of {split} with their"
            f" shard_lengths ({error!r})"
        ) from None
    if not files or len(files) != len(sizes):
        raise UserError(
            f"{directory.display_name(_INFO)}: has {len(files)} files but {len(sizes)} lengths"
            f" of {split}"
        )
    skipped = listing.SkippedFiles()
    if not directory.remote:  # a server with a list need not show its files
        for other in sorted(
            {file for file in directory.list_files() if file.endswith((".tar", *_PACKED))} - known
        ):
            skipped.add(f"not in {_INFO}", other)
    return files, sizes, skipped.notes(directory.location)


def _found(directory: Directory, split: str) -> _Files:
    names, place = directory.list_files(), directory.location
    named = listing.word_lookup(names, ".tar")
    found = listing.files_of_split(place, split, named)
    skipped = listing.SkippedFiles()
    for suffix in _PACKED:
        for name in listing.files_of_split(place, split, listing.word_lookup(names, suffix)):
            if f"{name.removesuffix(suffix)}.tar" not in found:
                raise UserError(
                    f"{directory.display_name(name)}: is compressed, but images are read in random"
                    f" order. Decompress it to {name.removesuffix(suffix)}.tar"
                    f" ({_DECOMPRESS[suffix]}), or move it away"
                )
            skipped.add("compressed, beside the unpacked file", name, fault=False)
    if not found:
        raise UserError(
            f"--data_dir={place}: holds no {split} tar files (names like {split}-000000.tar, or a"
            f" directory {split})"
        )
    files = listing.complete_file_set(place, split, found)
    others = listing.unassigned_files(
        place, [name for name in names if name.endswith(".tar")], named
    )
    return files, None, (*listing.numbering_gaps(place, files), *skipped.notes(place), *others)


@dataclasses.dataclass(frozen=True)
class TarIndex:
    """Locates the samples of one tar file, in its order.

    Attributes:
      begin: int64 [n]; the byte at which the header of each sample's first file begins.
      offset, length: int64 [n]; first byte and bytes of each image; offset -1 for a sample without
        one, -3 for a link that leads out of the archive.
      label: int64 [n]; -1 for a sample without one, -2 for one whose label is a list, -3 for such a
        link.
    """

    begin: npt.NDArray[np.int64]
    offset: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    label: npt.NDArray[np.int64]
    version: int = _VERSION

    def __post_init__(self) -> None:
        """Raises ValueError for samples that were found by other rules."""
        if self.version != _VERSION:
            raise ValueError(f"version {self.version} of the rules")


def scan(path: Path) -> TarIndex:
    """Reads the headers of a tar file, and the files with labels.

    A sample is what the files of one key have, which follow one another; the key is a path up to
    the first dot of its last part, and what follows is the extension (the WebDataset format). Its
    image is the file whose whole extension is one of `IMAGES`: `1.depth.png` is not one. Its label
    is the number in `.cls`, or `label` or `cls` in `.json`. Hard and symbolic links are followed
    inside the archive.

    Raises:
      OSError: if the file cannot be read.
      ValueError: for an archive that is cut, damaged, compressed or two that were joined, or with
        sparse files; for a sample with two images, or with two labels that differ.
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
                    extension = _divided(member.name)[1]
                    if extension in _LABELS and member.isfile() and member.size <= _LONGEST_LABEL:
                        # At once, because the disk has read them with their headers.
                        position = file.tell()
                        file.seek(member.offset_data)
                        labels[member.offset_data] = _labels(file.read(member.size), extension)
                        file.seek(position)
        except tarfile.TarError as error:
            _check_is_not_compressed(file)
            raise ValueError(f"offset {end}: {error}; restore the file") from None
        _check_end(file, -(-end // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
    rows = _samples(members, labels)
    return TarIndex(*np.array(rows, np.int64).reshape(-1, 4).T.copy())


def _samples(members: Sequence[tarfile.TarInfo], labels: Mapping[int, set[int]]) -> list[_Row]:
    """Returns the rows of the samples that the files of an archive make.

    Args:
      members: files and others, in their order.
      labels: class numbers in the files that have some, by the offset of their content.
    """
    rows: list[_Row] = []
    key = None
    used: dict[str, str] = {}
    has_links = any(member.islnk() or member.issym() for member in members)
    by_name = {posixpath.normpath(member.name): member for member in members} if has_links else {}
    for member in members:
        found, extension = _divided(member.name)
        if not (found and extension and (member.isfile() or member.islnk() or member.issym())):
            continue
        if found != key:
            rows.append((member.offset, _UNKNOWN, 0, _UNKNOWN))
            key = found
            used = {}
        rows[-1] = _with(rows[-1], member, _followed(member, by_name), labels, extension, used)
    return rows


def _followed(
    member: tarfile.TarInfo, by_name: Mapping[str, tarfile.TarInfo]
) -> tarfile.TarInfo | None:
    """Returns the file to which a link leads in its archive, itself for a file; None if it is not
    in the archive.
    """
    found: tarfile.TarInfo | None = member
    for _ in range(_MAX_LINKS):
        if found is None or found.isfile():
            return found
        if found.issym():  # relative to its directory
            target = posixpath.join(posixpath.dirname(found.name), found.linkname)
        elif found.islnk():  # relative to the root of the archive
            target = found.linkname
        else:
            return None
        found = by_name.get(posixpath.normpath(target))
    return None


def _check_is_not_compressed(file: BinaryIO) -> None:
    """Raises ValueError for a compressed archive: offsets in it are not those of its files."""
    file.seek(0)
    found = files.detect_compression(file.read(tarfile.BLOCKSIZE))
    if found:
        kind, command = found
        raise ValueError(
            f"is compressed ({kind}), but images are read in random order. Decompress each tar file"
            f" into another directory, as in: mkdir plain; {command} < FILE.tar > plain/FILE.tar"
        )


def _check_end(file: BinaryIO, place: int) -> None:
    """Raises ValueError unless zeros follow the last file that was found, which may be that before
    a damaged header.
    """
    file.seek(place)
    block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        raise ValueError(f"offset {place}: the file ends early; restore it")
    if any(block):
        raise ValueError(f"offset {place}: the header of a file is damaged; restore the file")
    while block := file.read(tarfile.RECORDSIZE):
        if any(block):
            place = file.tell() - len(block.lstrip(b"\0"))
            raise ValueError(
                f"offset {place}: more follows the end of the archive, as if two were joined: give"
                " each its own"
            )
    if file.tell() - place > _MOST_ZEROS:
        raise ValueError(
            f"offset {place}: only zeros follow, as after an interrupted copy: restore the file"
        )


def _divided(name: str) -> tuple[str, str]:
    """Returns the key of a file and its whole extension; no key for a file that belongs to no
    sample.
    """
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return f"{folder}/{stem}" if stem and not base.startswith("__") else "", extension.lower()


def _with(
    row: _Row,
    member: tarfile.TarInfo,
    followed: tarfile.TarInfo | None,
    labels: Mapping[int, set[int]],
    extension: str,
    used: dict[str, str],
) -> _Row:
    """Returns the row of a sample with one of its files added.

    Args:
      row: of the sample so far.
      member: the file that is added, or a link to it.
      followed: where its content is; None for a link that leads out of the archive.
      labels: see `_samples`.
      extension: of `member`.
      used: names the image and the label of the sample so far.
    """
    begin, offset, length, label = row
    if extension in IMAGES:
        _only(used, "image", member.name)
        if followed is None:
            return begin, _BROKEN_LINK, 0, label
        return begin, followed.offset_data, followed.size, label
    if extension in _LABELS and followed is None:
        return begin, offset, length, _BROKEN_LINK if label == _UNKNOWN else label
    if extension in _LABELS and followed is not None:
        found = labels.get(followed.offset_data, set())
        if _SEVERAL in (label, *found):
            label = _SEVERAL
            found = set()
        for value in found - {label}:
            _only(used, "label", member.name)
            label = value
    return begin, offset, length, label


def _only(used: dict[str, str], what: str, name: str) -> None:
    """Notes the file of a sample's image or label; raises ValueError if it has another one."""
    if what in used:
        raise ValueError(
            f"a sample has two {what}s, {used[what]} and {name}: leave one in each sample, or give"
            f" the other another extension (such as second.{name.rpartition('.')[2]})"
        )
    used[what] = name


def _labels(content: bytes, extension: str) -> set[int]:
    """Returns the class numbers in a file of a sample: none, one, or two that contradict each
    other.

    A list, such as a one-hot label, gives `_SEVERAL` alone.
    """
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return {_SEVERAL} if extension == "cls" and _NUMBERS.fullmatch(content) else set()
    values = [value]
    if extension == "json":
        values = [value.get("label"), value.get("cls")] if isinstance(value, dict) else []
    if any(isinstance(value, list) for value in values):
        return {_SEVERAL}
    return {number for number in values if type(number) is int and 0 <= number <= _LARGEST_LABEL}
