"""Writes a tiny dataset in every form in which people store images, and has a source in memory."""

import io
import json
import tarfile
import threading

import numpy as np
from PIL import Image

from hybrid_imagenet.data.images import encode
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.source import BadRecord, Source

CLASSES = ("n01", "n02", "n03")


def jpeg(seed, height=20, width=24, mode="RGB", quality=90):
    channels = {"RGB": 3, "CMYK": 4, "L": 1}[mode]
    smooth = np.random.default_rng(seed).integers(0, 256, (4, 4, channels), np.uint8)
    image = Image.fromarray(smooth.squeeze(), mode=mode).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    return encode(image, "JPEG", quality=quality)


def png(seed, height=20, width=24):
    return encode(Image.open(io.BytesIO(jpeg(seed, height, width))), "PNG")


def tiny(split):
    """Returns (image, label) pairs: 14 for training, 5 for validation."""
    first, count = {"train": (0, 14), "validation": (100, 5)}[split]
    return [(jpeg(first + number), (number * 2) % 3) for number in range(count)]


def write_shards(directory, split, pairs, shards=2, plain=False):
    directory.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with (directory / f"{split}-{shard:05d}-of-{shards:05d}").open("wb") as file:
            for image, label in pairs[
                shard * len(pairs) // shards : (shard + 1) * len(pairs) // shards
            ]:
                features = {"image": image, "label": label}
                if not plain:
                    features = {
                        "image/encoded": image,
                        "image/class/label": label + 1,
                        "image/height": 20,
                    }
                file.write(tfrecord.frame(tfrecord.encode_example(features)))


def write_folder(directory, split, pairs):
    for name in CLASSES:
        (directory / split / name).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(pairs):
        (directory / split / CLASSES[label] / f"{number:03d}.JPEG").write_bytes(image)


def write_parquet(directory, split, pairs, shards=2, names=CLASSES):
    import pyarrow
    from pyarrow import parquet

    directory.mkdir(parents=True, exist_ok=True)
    features = {"image": {"_type": "Image"}, "label": {"names": list(names), "_type": "ClassLabel"}}
    for shard in range(shards):
        part = pairs[shard * len(pairs) // shards : (shard + 1) * len(pairs) // shards]
        table = pyarrow.table(
            {
                "image": [
                    {"bytes": image, "path": f"{number}.jpg"}
                    for number, (image, _) in enumerate(part)
                ],
                "label": [label for _, label in part],
            }
        ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        parquet.write_table(
            table, directory / f"{split}-{shard:05d}-of-{shards:05d}.parquet", row_group_size=3
        )


def as_cls(number, image, label):
    """Returns a sample of a WebDataset with its label in a separate file."""
    return {"__key__": f"{label}/{number:05d}", "jpg": image, "cls": label}


def write_tars(directory, name, pairs, per_file, form=as_cls):
    """Writes tar files with the webdataset package."""
    import webdataset

    with webdataset.ShardWriter(
        str(directory / f"{name}-%04d.tar"), maxcount=per_file, verbose=0
    ) as file:
        for number, (image, label) in enumerate(pairs):
            file.write(form(number, image, label))


def write_info(directory, **changes):
    """Writes the list of tar files that timm reads, with `changes` in the training split."""
    splits = {}
    for split in ("train", "validation"):
        files = sorted(directory.glob(f"*{split}-*.tar"))
        lengths = [
            sum(name.endswith((".cls", ".json")) for name in _members(path)) for path in files
        ]
        names = [path.name for path in files]
        splits[split] = {
            "name": split,
            "num_samples": sum(lengths),
            "filenames": names,
            "shard_lengths": lengths,
        }
    splits["train"] |= changes
    (directory / "_info.json").write_text(json.dumps({"splits": splits}))


def _members(path):
    with tarfile.open(path) as archive:
        return archive.getnames()


class MemorySource(Source):
    """Holds distinct small images whose label is their number; some may be bad."""

    def __init__(self, count, bad=(), undecodable=()):
        super().__init__()
        self.num_examples = self.num_classes = count
        self.class_names = tuple(map(str, range(count)))
        self.images = [jpeg(number, 12, 16) for number in range(min(count, 40))]
        self.bad = frozenset(bad)
        self.undecodable = frozenset(undecodable)
        self.reads = 0
        self._count_lock = threading.Lock()

    def locate(self, index):
        return "memory", index * 1000

    def read_one(self, index):
        with self._count_lock:
            self.reads += 1
        if index in self.bad:
            raise BadRecord(*self.locate(index), "the checksum of the data does not match")
        image = self.images[index % len(self.images)]
        if index in self.undecodable:
            # This begins and ends like a JPEG, but contains no image.
            image = image[: image.index(b"\xff\xc0") + 10] + b"\xff\xd9"
        return image, index
