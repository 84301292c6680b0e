"""Converts any source into TFRecord shards with an index and a manifest; continues where it was
interrupted.
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
from hybrid_imagenet.comm.quiet import import_tensorflow
from hybrid_imagenet.data import SPLITS, DatasetRequest, images, listing
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.folder import FolderSource
from hybrid_imagenet.data.sources.source import BadRecord, Source, write_index
from hybrid_imagenet.errors import UserError, without_secrets
from hybrid_imagenet.tools.data import parallel

_STATE = "prepare-state"

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings by which images are written.

    Attributes:
      resize: pixels of the shorter side to which larger images are reduced; None copies every image
      as it is.
      quality: of these, as JPEGs.
      skip_bad: leave out records that cannot be used, and list them in the manifest, instead of
      failing.
      max_bad: records of a split above which leaving out fails.
    """

    resize: int | None = None
    quality: int = 90
    per_shard: int = 1024
    skip_bad: bool = False
    max_bad: int = 100


@dataclasses.dataclass(frozen=True)
class _Shard:
    target: str
    first: int
    last: int
    settings: Settings


def prepare(
    request: DatasetRequest, target: Path, settings: Settings, workers: int = 1
) -> dict[str, Any]:
    """Writes `train` and `validation` shards of a data set into `target`; returns the manifest.

    Shards appear whole or not at all. A shard that an interrupted call with the same source and
    settings has finished is kept. The manifest tells for each split the `images_in` of the source,
    of which `num_examples` were written and `images_dropped` were not, for the reasons listed in
    `bad_records`; `notes` tell what the source does not read.

    Raises:
      UserError: for a source that cannot be used, a bad record, more of them than `max_bad`, or a
        target that holds something else or that another call writes.
    """
    requests = {split: dataclasses.replace(request, split=split) for split in SPLITS}
    opened = {split: one.open() for split, one in requests.items()}
    listing.check_splits(
        request.name, opened["train"].class_names, opened["validation"].class_names
    )
    train = opened["train"]
    if isinstance(train, FolderSource) and Path(train.root).resolve() in target.resolve().parents:
        raise UserError(
            f"--to={target}: would be a class of --data_dir={request.data_dir}: give another place"
        )
    with _locked(target):
        _claim(target, _receipt_of(request, opened, settings))
        manifest: dict[str, Any] = {
            "source": request.name,
            "class_names": list(opened["train"].class_names),
            "resize": settings.resize,
            "quality": settings.quality if settings.resize else None,
            "splits": {},
        }
        opened["validation"].notes = tuple(
            note for note in opened["validation"].notes if note not in train.notes
        )
        for split, source in opened.items():
            manifest["splits"][split] = _write_split(
                requests[split], source, target, settings, workers
            )
        with files.atomic_replace(target / tfrecord.MANIFEST) as temporary:
            temporary.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
        for leftover in (*target.glob(".*"), *(target / _STATE).iterdir()):
            leftover.unlink()
        (target / _STATE).rmdir()
    return manifest


def _receipt_of(
    request: DatasetRequest, sources: Mapping[str, Source], settings: Settings
) -> dict[str, Any]:
    """Returns what an interrupted call and the one that continues it must have in common,
    JSON-ready.
    """
    place = request.data_dir
    if place is not None and not files.is_url(place):
        place = str(request.directory.resolve())
    choices = dataclasses.asdict(settings)
    del choices["max_bad"], choices["skip_bad"]  # they may be changed to continue
    return {
        "source": request.name,
        "directory": place and without_secrets(place),
        "images": {split: source.identity for split, source in sources.items()},
        **choices,
    }


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Keeps other calls out of a target while this one writes there."""
    state = target / _STATE
    try:
        target.mkdir(parents=True, exist_ok=True)
        if not state.exists():
            _check_empty(target)
        state.mkdir(exist_ok=True)
        with files.lock(state):
            yield
    except BlockingIOError:
        raise UserError(
            f"--to={target}: another data prepare writes there: wait until it ends"
        ) from None
    except OSError as error:
        raise UserError(f"--to={target}: cannot be written ({error.strerror or error})") from None


def _check_empty(target: Path) -> None:
    if any(path.name != _STATE for path in target.iterdir()):
        raise UserError(f"--to={target}: is not empty; give a new directory")


def _claim(target: Path, receipt: dict[str, Any]) -> None:
    """Notes the source and the settings in the target, or checks that an interrupted call had the
    same.
    """
    state = target / _STATE / "settings.json"
    if not state.exists():
        _check_empty(target)
        with files.atomic_replace(state) as temporary:
            temporary.write_text(json.dumps(receipt))
        return
    before, now = files.read_json(state), json.loads(json.dumps(receipt))
    for key in now:
        if before.get(key) != now[key]:
            values = "" if key == "images" else f" ({before.get(key)}, now {now[key]})"
            raise UserError(
                f"--to={target}: holds the beginning of a set with other {key}{values}; give the"
                " same command to continue, or remove the directory"
            )


def _write_split(
    request: DatasetRequest, source: Source, target: Path, settings: Settings, workers: int
) -> dict[str, Any]:
    split = request.split
    count = -(-source.num_examples // settings.per_shard)
    bounds = np.linspace(0, source.num_examples, count + 1).astype(int).tolist()
    names = [f"{split}-{number:05d}-of-{count:05d}" for number in range(count)]
    tasks = [
        _Shard(str(target / shard), bounds[number], bounds[number + 1], settings)
        for number, shard in enumerate(names)
    ]
    for note in source.notes:
        _log.warning("%s", note)
    progress = parallel.Progress(f"{split} shards", source.num_examples)
    finished = {task: bad for task in tasks if (bad := _finished(task)) is not None}
    todo = [task for task in tasks if task not in finished]
    dropped = 0
    for task, bad in itertools.chain(
        finished.items(), parallel.run(_write_shard, request, todo, workers)
    ):
        for line in bad:
            dropped += 1
            _log.warning("left out (%d so far): %s", dropped, line)
            if dropped > settings.max_bad:
                raise UserError(
                    f"more than --max_bad_records={settings.max_bad} bad records; the last: {line}"
                )
        progress.add(task.last - task.first)
    receipts = [json.loads(_receipt(target / shard).read_text()) for shard in names]
    with files.atomic_replace(target / f"{split}.index.npz") as temporary:
        write_index(temporary, tfrecord.scan_shards([target / shard for shard in names]))
    bad = [line for receipt in receipts for line in receipt.pop("bad_records")]
    return {
        "num_examples": sum(receipt["num_examples"] for receipt in receipts),
        "images_in": source.num_examples,
        "images_dropped": len(bad),
        "bad_records": bad,
        "notes": [str(note) for note in source.notes if note.fault],
        "shards": receipts,
    }


def _finished(task: _Shard) -> list[str] | None:
    """The bad records of a shard that an interrupted call has finished, if it is whole and may lack
    them; else None.
    """
    path = Path(task.target)
    try:
        receipt = json.loads(_receipt(path).read_text())
        if path.stat().st_size != receipt["bytes"]:
            return None
        if receipt["bad_records"] and not task.settings.skip_bad:
            return None
        if receipt["num_examples"] + len(receipt["bad_records"]) != task.last - task.first:
            return None
        return list(receipt["bad_records"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _receipt(shard: Path) -> Path:
    return shard.parent / _STATE / f"{shard.name}.json"


def _write_shard(source: Source, task: _Shard) -> list[str]:
    """Writes one shard and then its receipt: counts and checksum; returns what is bad."""
    path = Path(task.target)
    bad: list[str] = []
    checksum = google_crc32c.Checksum()
    size = 0
    with files.atomic_replace(path) as temporary, temporary.open("wb") as file:
        for index in range(task.first, task.last):
            try:
                record = _record(source, index, task.settings)
            except BadRecord as error:
                if not task.settings.skip_bad:
                    raise UserError(f"{error}. Repair it, or set --bad_records=skip") from None
                bad.append(str(error))
                continue
            file.write(record)
            checksum.update(record)
            size += len(record)
    receipt = {
        "file": path.name,
        "num_examples": task.last - task.first - len(bad),
        "bytes": size,
        "crc32c": checksum.hexdigest().decode(),
        "bad_records": bad,
    }
    with files.atomic_replace(_receipt(path)) as temporary:
        temporary.write_text(json.dumps(receipt))
    return bad


def _record(source: Source, index: int, settings: Settings) -> bytes:
    content, label = source.read_one(index)
    file, offset = source.locate(index)
    try:
        kind, height, width = images.probe(content)
        if settings.resize is not None:
            content, height, width = reduced(
                content, kind, height, width, settings.resize, settings.quality
            )
    except ValueError as error:
        raise BadRecord(file, offset, str(error)) from None
    return tfrecord.frame(
        tfrecord.encode_example(
            {
                "image/encoded": content,
                "image/class/label": label + 1,
                "image/class/text": os.fsencode(source.class_names[label]),
                "image/filename": os.fsencode(Path(file).name),
                "image/height": height,
                "image/width": width,
            }
        )
    )


def reduced(
    content: bytes, kind: int, height: int, width: int, shorter: int, quality: int
) -> tuple[bytes, int, int]:
    """The image as an RGB JPEG whose shorter side is at most `shorter` pixels, and its height and
    width.

    A JPEG that is small enough is returned as it is.

    Raises:
      ValueError: if it does not decode, or is a JPEG with damage that would be hidden in a new one.
    """
    from PIL import Image

    if kind == images.JPEG:
        if min(height, width) <= shorter:
            return content, height, width
        import_tensorflow()  # images that are copied do without it
        images.verify(content)
    elif kind == images.ANY_CHANNELS:
        import_tensorflow()
    picture = images.picture(content)
    scale = min(1.0, shorter / min(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    smaller = picture.resize(size, Image.Resampling.LANCZOS)
    return images.encoded(smaller, "JPEG", quality=quality), size[1], size[0]
