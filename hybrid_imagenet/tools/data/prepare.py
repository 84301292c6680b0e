"""Converts any source into TFRecord shards with an index and a manifest; goes on where it was interrupted."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from hybrid_imagenet.data import images, records, shards
from hybrid_imagenet.data.sources.base import BadRecord, Source
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.tools.data import parallel

_STATE = "prepare-state"


@dataclasses.dataclass(frozen=True)
class Settings:
    """How images are written.

    Attributes:
      resize: pixels of the shorter side to which larger images are reduced; None copies every image as it is.
      quality: JPEG quality of reduced images.
      per_shard: images per shard.
      skip_bad: leave out records that cannot be used, and list them in the manifest, instead of failing.
    """

    resize: int | None = None
    quality: int = 90
    per_shard: int = 1024
    skip_bad: bool = False


@dataclasses.dataclass(frozen=True)
class _Shard:
    target: str
    first: int
    last: int
    settings: Settings


def prepare(
    name: str,
    data_dir: str | None,
    target: Path,
    settings: Settings,
    *,
    workers: int = 1,
    num_classes: int | None = None,
    num_examples: int | None = None,
) -> dict[str, Any]:
    """Writes `train` and `validation` shards of a data set into `target`; returns the manifest.

    Shards appear whole or not at all. A shard that an interrupted call with the same settings has finished is kept.

    Raises:
      UserError: for a source that cannot be used, a bad record, or a target that holds something else.
    """
    from hybrid_imagenet import data

    sources = {split: parallel.SourceName(name, data_dir, split, num_classes, num_examples) for split in data.SPLITS}
    opened = {split: source.open() for split, source in sources.items()}
    _claim(
        target, {"name": name, "sizes": {s: o.num_examples for s, o in opened.items()}} | dataclasses.asdict(settings)
    )
    manifest: dict[str, Any] = {
        "source": name,
        "class_names": list(opened["train"].class_names),
        "resize": settings.resize,
        "quality": settings.quality if settings.resize else None,
        "splits": {},
    }
    for split, source in sources.items():
        manifest["splits"][split] = _write_split(source, opened[split].num_examples, split, target, settings, workers)
    with shards.replacing(target / shards.MANIFEST) as temporary:
        temporary.write_text(json.dumps(manifest, indent=1) + "\n", "utf-8")
    for leftover in (*target.glob(".*"), *(target / _STATE).iterdir()):
        leftover.unlink()
    (target / _STATE).rmdir()
    return manifest


def _claim(target: Path, settings: dict[str, Any]) -> None:
    """Notes the settings in the target, or checks that an interrupted call had the same."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        state = target / _STATE / "settings.json"
        if state.exists():
            if json.loads(state.read_text()) != json.loads(json.dumps(settings)):
                raise UserError(f"--to={target}: holds the beginning of a set with other settings; remove it first")
            return
        if any(target.iterdir()):
            raise UserError(f"--to={target}: is not empty; give a new directory")
        with shards.replacing(state) as temporary:
            temporary.write_text(json.dumps(settings))
    except OSError as error:
        raise UserError(f"--to={target}: cannot be written ({error.strerror or error})") from None


def _write_split(
    source: parallel.SourceName, num_examples: int, split: str, target: Path, settings: Settings, workers: int
) -> dict[str, Any]:
    count = -(-num_examples // settings.per_shard)
    bounds = np.linspace(0, num_examples, count + 1).astype(int).tolist()
    names = [f"{split}-{number:05d}-of-{count:05d}" for number in range(count)]
    tasks = [
        _Shard(str(target / shard), bounds[number], bounds[number + 1], settings)
        for number, shard in enumerate(names)
        if not (target / shard).exists() or not _receipt(target / shard).exists()
    ]
    progress = parallel.Progress(f"{split} shards", num_examples)
    progress.add(num_examples - sum(task.last - task.first for task in tasks))
    for task, _ in parallel.run(_write_shard, source, tasks, workers):
        progress.add(task.last - task.first)
    receipts = [json.loads(_receipt(target / shard).read_text()) for shard in names]
    offsets = [np.array(receipt.pop("offsets"), np.int64) for receipt in receipts]
    with shards.replacing(target / f"{split}.index.npz") as temporary, temporary.open("wb") as file:
        lengths = [np.diff(starts, append=r["bytes"]) for starts, r in zip(offsets, receipts, strict=True)]
        numbers = np.repeat(np.arange(count), [len(starts) for starts in offsets])
        np.savez(file, shard=numbers, offset=np.concatenate(offsets), length=np.concatenate(lengths))
    return {
        "num_examples": sum(receipt["num_examples"] for receipt in receipts),
        "bad_records": [bad for receipt in receipts for bad in receipt.pop("bad_records")],
        "shards": receipts,
    }


def _receipt(shard: Path) -> Path:
    return shard.parent / _STATE / f"{shard.name}.json"


def _write_shard(source: Source, task: _Shard) -> None:
    """Writes one shard and then its receipt: counts, checksum and where each record begins."""
    path = Path(task.target)
    offsets: list[int] = []
    bad: list[str] = []
    checksum = google_crc32c.Checksum()
    at = 0
    with shards.replacing(path) as temporary, temporary.open("wb") as file:
        for index in range(task.first, task.last):
            try:
                record = _record(source, index, task.settings)
            except BadRecord as error:
                if not task.settings.skip_bad:
                    raise UserError(f"{error}; mend it, or give --bad_records=skip") from None
                bad.append(str(error))
                continue
            file.write(record)
            checksum.update(record)
            offsets.append(at)
            at += len(record)
    receipt = {
        "file": path.name,
        "num_examples": len(offsets),
        "bytes": at,
        "crc32c": checksum.hexdigest().decode(),
        "bad_records": bad,
        "offsets": offsets,
    }
    with shards.replacing(_receipt(path)) as temporary:
        temporary.write_text(json.dumps(receipt))


def _record(source: Source, index: int, settings: Settings) -> bytes:
    """One framed Example with the keys of TensorFlow's ImageNet scripts."""
    content, label = source.read_one(index)
    file, offset = source.locate(index)
    try:
        kind, height, width = images.probe(content)
        if kind == images.RAW:
            content = as_png(content)
        if settings.resize is not None:
            content, height, width = reduced(content, kind, height, width, settings.resize, settings.quality)
    except (ValueError, OSError) as error:
        raise BadRecord(file, offset, str(error)) from None
    return records.frame(
        records.encode_example(
            {
                "image/encoded": content,
                "image/class/label": label + 1,
                "image/class/text": source.class_names[label].encode(),
                "image/filename": Path(file).name.encode(),
                "image/height": height,
                "image/width": width,
            }
        )
    )


def as_png(content: bytes) -> bytes:
    """Pixels that no other program reads as they are as a PNG, which keeps them exactly."""
    buffer = io.BytesIO()
    images.picture(content).save(buffer, "PNG")
    return buffer.getvalue()


def reduced(content: bytes, kind: int, height: int, width: int, shorter: int, quality: int) -> tuple[bytes, int, int]:
    """The image as an RGB JPEG whose shorter side is at most `shorter` pixels, and its height and width.

    A JPEG that is small enough is returned as it is.

    Raises:
      ValueError, OSError: if it does not decode.
    """
    from PIL import Image

    if kind == images.JPEG and min(height, width) <= shorter:
        return content, height, width
    with Image.open(io.BytesIO(content)) as opened:
        picture = opened.convert("RGB")
    scale = min(1.0, shorter / min(height, width))
    size = (max(1, round(width * scale)), max(1, round(height * scale)))
    buffer = io.BytesIO()
    picture.resize(size, Image.Resampling.LANCZOS).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue(), size[1], size[0]
