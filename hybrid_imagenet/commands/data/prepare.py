"""Converts any source into TFRecord shards with an index and a manifest.

A conversion that was interrupted continues where it stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hybrid_imagenet import files
from hybrid_imagenet.cluster.quiet import import_tensorflow
from hybrid_imagenet.commands.data import parallel
from hybrid_imagenet.data import images, listing
from hybrid_imagenet.data.datasets import SPLITS, DatasetRequest
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.folder import FolderSource
from hybrid_imagenet.data.sources.source import BadRecord, Source, write_index
from hybrid_imagenet.errors import UserError, without_secrets

# The directory in the target that exists while the dataset is written. It holds the lock, the
# settings, and a receipt for each finished shard.
_STATE_DIRECTORY = "prepare-state"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PrepareSettings:
    """Says how images are written.

    Attributes:
      resize: Larger images are reduced until their shorter side has this many pixels; None copies
        every image as it is.
      quality: JPEG quality of reduced images, 1 to 100.
      per_shard: Number of images per shard.
      skip_bad_records: Omit records that cannot be used, and list them in the manifest, instead of
        failing.
      max_bad_records: Number of omitted records per split above which preparing fails.
    """

    resize: int | None = None
    quality: int = 90
    per_shard: int = 1024
    skip_bad_records: bool = False
    max_bad_records: int = 100


@dataclasses.dataclass(frozen=True)
class _ShardTask:
    """One shard to write.

    Attributes:
      path: The file.
      first: Index of the first example.
      last: Index after the last example.
      settings: How to write them.
    """

    path: Path
    first: int
    last: int
    settings: PrepareSettings

    @property
    def num_examples(self) -> int:
        return self.last - self.first


def prepare_dataset(
    request: DatasetRequest, target: Path, settings: PrepareSettings, workers: int = 1
) -> dict[str, Any]:
    """Writes the train and validation shards of a dataset into `target`.

    A shard appears when it is complete. Shards that an interrupted call with the same source and
    settings has finished are kept.

    Args:
      request: The dataset; its split is ignored.
      target: A new directory, or that of an interrupted call.
      settings: How to write the images.
      workers: Number of processes.

    Returns:
      The manifest. For each split it has the number of images in the source (`images_in`), of those
      written (`num_examples`) and of those omitted (`images_dropped`), with the reasons
      (`bad_records`), and `notes` on what the source does not read.

    Raises:
      UserError: If the source cannot be used, if there is a bad record or more of them than
        `max_bad_records`, or if the target holds something else or another call writes there.
    """
    requests = {split: dataclasses.replace(request, split=split) for split in SPLITS}
    sources = {split: requests[split].open() for split in SPLITS}
    train = sources["train"]
    validation = sources["validation"]
    listing.check_splits(request.name, train.class_names, validation.class_names)
    if isinstance(train, FolderSource) and Path(train.root).resolve() in target.resolve().parents:
        raise UserError(
            f"--to={target} is inside --data_dir={request.data_dir}, where it would be a class."
            " Choose another directory."
        )
    with _lock_target(target):
        _claim_target(target, _conversion_identity(request, sources, settings))
        # Both splits may be in one directory, whose other files each of them skips.
        validation.notes = tuple(note for note in validation.notes if note not in train.notes)
        manifest: dict[str, Any] = {
            "source": request.name,
            "class_names": list(train.class_names),
            "resize": settings.resize,
            "quality": settings.quality if settings.resize else None,
            "splits": {},
        }
        for split, source in sources.items():
            manifest["splits"][split] = _write_split(
                requests[split], source, target, settings, workers
            )
        with files.atomic_replace(target / tfrecord.MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        _remove_state(target)
    return manifest


def _conversion_identity(
    request: DatasetRequest, sources: Mapping[str, Source], settings: PrepareSettings
) -> dict[str, Any]:
    """Returns what must be equal to continue an interrupted conversion, JSON-ready."""
    location = request.data_dir
    if location is not None and not files.is_url(location):
        location = str(request.directory.resolve())
    fixed_settings = dataclasses.asdict(settings)
    # These two say what to do after a bad record, and may be changed to continue after one.
    del fixed_settings["skip_bad_records"]
    del fixed_settings["max_bad_records"]
    return {
        "source": request.name,
        "directory": location and without_secrets(location),
        "images": {split: source.identity for split, source in sources.items()},
        **fixed_settings,
    }


@contextlib.contextmanager
def _lock_target(target: Path) -> Iterator[None]:
    """Creates a target, and keeps other calls from writing there.

    Raises:
      UserError: If it is not empty, if another call has locked it, or if it cannot be written.
    """
    state = target / _STATE_DIRECTORY
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not state.exists():
            _check_empty(target)
        state.mkdir(exist_ok=True)
        with files.lock(state):
            yield
    except BlockingIOError:
        raise UserError(
            f"Another data prepare writes to --to={target}. Wait until it ends."
        ) from None
    except OSError as error:
        raise UserError(
            f"--to={target} cannot be written ({error.strerror or error}). Free space, correct its"
            " permissions, or choose another directory."
        ) from None


def _check_empty(target: Path) -> None:
    if (target / tfrecord.MANIFEST).exists():
        raise UserError(
            f"--to={target} contains a dataset that is complete. Train with --dataset=tfrecord"
            f" --data_dir={target}, or choose a new directory."
        )
    if any(path.name != _STATE_DIRECTORY for path in target.iterdir()):
        raise UserError(f"--to={target} is not empty. Choose a new directory.")


def _claim_target(target: Path, identity: dict[str, Any]) -> None:
    """Stores the conversion's identity, or compares it with an interrupted one.

    Raises:
      UserError: If they differ.
    """
    identity_file = target / _STATE_DIRECTORY / "settings.json"
    if not identity_file.exists():
        _check_empty(target)
        with files.atomic_replace(identity_file) as temporary:
            temporary.write_text(json.dumps(identity))
        return
    stored = files.read_json(identity_file)
    # The way through JSON turns tuples into lists, as in the file.
    current = json.loads(json.dumps(identity))
    for key, value in current.items():
        if stored.get(key) == value:
            continue
        # The digests of images say nothing to a reader.
        values = "" if key == "images" else f" ({stored.get(key)}, now {value})"
        raise UserError(
            f"--to={target} holds the beginning of a dataset with other {key}{values}. Repeat the"
            " original command to continue, or remove the directory."
        )


def _remove_state(target: Path) -> None:
    """Removes temporary files and the state of a conversion that is complete."""
    for leftover in (*target.glob(".*"), *(target / _STATE_DIRECTORY).iterdir()):
        leftover.unlink()
    (target / _STATE_DIRECTORY).rmdir()


def _write_split(
    request: DatasetRequest,
    source: Source,
    target: Path,
    settings: PrepareSettings,
    workers: int,
) -> dict[str, Any]:
    """Writes the shards and the index of a split; returns its entry in the manifest."""
    for note in source.notes:
        _log.warning("%s", note)
    tasks = _plan_shards(request.split, source.num_examples, target, settings)
    _write_shards(request, tasks, source.num_examples, settings, workers)
    shards = [task.path for task in tasks]
    receipts = [json.loads(_receipt_file(shard).read_text()) for shard in shards]
    with files.atomic_replace(target / f"{request.split}.index.npz") as temporary:
        write_index(temporary, tfrecord.scan_shards(shards))
    bad_records: list[str] = []
    for receipt in receipts:
        bad_records += receipt.pop("bad_records")
    return {
        "num_examples": sum(receipt["num_examples"] for receipt in receipts),
        "images_in": source.num_examples,
        "images_dropped": len(bad_records),
        "bad_records": bad_records,
        "notes": [str(note) for note in source.notes if note.fault],
        "shards": receipts,
    }


def _plan_shards(
    split: str, num_examples: int, target: Path, settings: PrepareSettings
) -> list[_ShardTask]:
    """Divides the examples of a split into shards of about equal size."""
    num_shards = -(-num_examples // settings.per_shard)
    bounds = np.linspace(0, num_examples, num_shards + 1).astype(int).tolist()
    tasks = []
    for number in range(num_shards):
        path = target / f"{split}-{number:05d}-of-{num_shards:05d}"
        tasks.append(_ShardTask(path, bounds[number], bounds[number + 1], settings))
    return tasks


def _write_shards(
    request: DatasetRequest,
    tasks: list[_ShardTask],
    num_examples: int,
    settings: PrepareSettings,
    workers: int,
) -> None:
    """Writes the shards that are not finished yet, and logs bad records.

    Raises:
      UserError: If there are more bad records than `max_bad_records`, or if one is bad and may not
        be omitted.
    """
    progress = parallel.ProgressPrinter(f"{request.split} shards", num_examples)
    finished: dict[_ShardTask, list[str]] = {}
    remaining = []
    for task in tasks:
        bad_records = _bad_records_if_finished(task)
        if bad_records is None:
            remaining.append(task)
        else:
            finished[task] = bad_records
    num_omitted = 0
    written = parallel.run(_write_shard, request, remaining, workers)
    for task, bad_records in itertools.chain(finished.items(), written):
        for bad_record in bad_records:
            num_omitted += 1
            _log.warning("omitted (%d so far): %s", num_omitted, bad_record)
            if num_omitted > settings.max_bad_records:
                raise UserError(
                    f"There are more bad records than --max_bad_records={settings.max_bad_records}."
                    f" Repair them, or raise the limit. The last one: {bad_record}"
                )
        progress.add(task.num_examples)


def _bad_records_if_finished(task: _ShardTask) -> list[str] | None:
    """Returns the bad records of a shard that an interrupted call has finished.

    Returns None if the shard must be written: it is missing or cut, or it lacks bad records that
    these settings do not allow to omit.
    """
    try:
        receipt = json.loads(_receipt_file(task.path).read_text())
        bad_records = list(receipt["bad_records"])
        if task.path.stat().st_size != receipt["bytes"]:
            return None
        if receipt["num_examples"] + len(bad_records) != task.num_examples:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if bad_records and not task.settings.skip_bad_records:
        return None
    return bad_records


def _receipt_file(shard: Path) -> Path:
    return shard.parent / _STATE_DIRECTORY / f"{shard.name}.json"


def _write_shard(source: Source, task: _ShardTask) -> list[str]:
    """Writes one shard, and then its receipt with counts and checksum.

    Returns:
      The bad records that were omitted.

    Raises:
      UserError: For a bad record that may not be omitted.
    """
    bad_records: list[str] = []
    checksum = google_crc32c.Checksum()
    size = 0
    with files.atomic_replace(task.path) as temporary, temporary.open("wb") as file:
        for index in range(task.first, task.last):
            try:
                record = _encode_record(source, index, task.settings)
            except BadRecord as error:
                if not task.settings.skip_bad_records:
                    raise UserError(f"{error}. Repair it, or set --bad_records=skip.") from None
                bad_records.append(str(error))
                continue
            file.write(record)
            checksum.update(record)
            size += len(record)
    receipt = {
        "file": task.path.name,
        "num_examples": task.num_examples - len(bad_records),
        "bytes": size,
        "crc32c": checksum.hexdigest().decode(),
        "bad_records": bad_records,
    }
    # The receipt is written last: a shard with a receipt is complete.
    with files.atomic_replace(_receipt_file(task.path)) as temporary:
        temporary.write_text(json.dumps(receipt))
    return bad_records


def _encode_record(source: Source, index: int, settings: PrepareSettings) -> bytes:
    """Returns one example as a TFRecord in the layout of TensorFlow's ImageNet.

    Raises:
      BadRecord: If the example cannot be read, or its image cannot be used.
    """
    content, label = source.read_one(index)
    file, offset = source.locate(index)
    try:
        kind, height, width = images.decode_header(content)
        if settings.resize is not None:
            content, height, width = shrink_image(
                content, kind, height, width, settings.resize, settings.quality
            )
    except ValueError as error:
        raise BadRecord(file, offset, str(error)) from None
    # Names of classes and files may have bytes that are not UTF-8. os.fsencode preserves them.
    example: dict[str, bytes | int] = {
        "image/encoded": content,
        "image/class/label": label + 1,
        "image/class/text": os.fsencode(source.class_names[label]),
        "image/filename": os.fsencode(Path(file).name),
        "image/height": height,
        "image/width": width,
    }
    return tfrecord.frame(tfrecord.encode_example(example))


def shrink_image(
    content: bytes, kind: int, height: int, width: int, max_shorter_side: int, quality: int
) -> tuple[bytes, int, int]:
    """Returns an image as an RGB JPEG whose shorter side is not too long.

    A JPEG that is small enough is returned as it is.

    Args:
      content: The encoded image.
      kind: Its kind, from `images.decode_header`.
      height: Its height in pixels.
      width: Its width in pixels.
      max_shorter_side: Maximum of the smaller of height and width, in pixels.
      quality: Quality of a JPEG that is written, 1 to 100.

    Returns:
      (content, height, width) of the result.

    Raises:
      ValueError: If the image does not decode, or is a JPEG with damage that would be hidden in a
        new one.
    """
    from PIL import Image

    if kind == images.JPEG and min(height, width) <= max_shorter_side:
        return content, height, width
    # TensorFlow is imported only here, because images that are copied do not need it.
    import_tensorflow()
    picture = Image.fromarray(images.decode_whole(content))
    scale = min(1.0, max_shorter_side / min(height, width))
    new_width = max(1, round(width * scale))
    new_height = max(1, round(height * scale))
    resized = picture.resize((new_width, new_height), Image.Resampling.LANCZOS)
    return images.encode(resized, "JPEG", quality=quality), new_height, new_width
