"""Damaged TFRecords, images and checkpoints: refused with the place and the reason, or read as what they are."""

import io
import json
import random
import zipfile

import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.archive import DamagedCheckpointError
from hybrid_imagenet.checkpoints.store import CheckpointStore
from hybrid_imagenet.data import images
from hybrid_imagenet.data.sources import tfrecord
from hybrid_imagenet.data.sources.base import BadRecord
from hybrid_imagenet.errors import UserError
from tests.checkpoints import support
from tests.data.support import jpeg, png
from tests.support.counts import counted


def damaged(content: bytes, generator: random.Random) -> bytes:
    """The bytes with something flipped, cut, repeated, inserted, zeroed or replaced."""
    at = generator.randrange(len(content))
    to = min(len(content), at + generator.choice((1, 2, 4, 16, 200)))
    how = generator.randrange(7)
    if how == 0:
        return content[:at] + bytes([content[at] ^ (1 << generator.randrange(8))]) + content[at + 1 :]
    if how == 1:
        return content[:at]
    if how == 2:
        return content[:at] + content[to:]
    if how == 3:
        return content[:to] + content[at:]
    if how == 4:
        return content[:at] + generator.randbytes(to - at) + content[at:]
    if how == 5:
        return content[:at] + bytes(to - at) + content[to:]
    return content[:at] + b"\xff" * (to - at) + content[to:]


@pytest.fixture
def counts(request):
    with counted(request.node.name.removeprefix("test_"), request) as counts:
        yield counts


def test_records(tmp_path, counts):
    """Every record that is read has the image and label it was written with, or it is a BadRecord."""
    pairs = [(jpeg(number), number % 3) for number in range(6)]
    parts = [tfrecord.frame(tfrecord.encode_example({"image": image, "label": label})) for image, label in pairs]
    generator = random.Random(1)
    known = {image for image, _ in pairs}
    for number in range(300):
        path = tmp_path / f"train-{number:05d}"
        path.write_bytes(damaged(b"".join(parts), generator))
        try:
            source = tfrecord.ShardSource((path,), ("a", "b", "c"), index=tfrecord._scan_all((path,)))
        except UserError as error:
            assert str(path) in str(error) or str(tmp_path) in str(error)
            counts.refused += 1
            continue
        bad = 0
        for place in range(source.num_examples):
            try:
                image, label = source.read_one(place)
            except BadRecord as error:
                assert error.reason
                bad += 1
            else:
                assert image in known
                assert 0 <= label < 3
        counts.refused += bool(bad)
        counts.taken += not bad


def test_examples(counts):
    """Payloads with a right checksum that are no Example, or one with odd features."""
    good = tfrecord.encode_example({"image": b"pixels", "label": 2})
    generator = random.Random(2)
    for _ in range(300):
        payload = damaged(good, generator)
        try:
            features = tfrecord.decode_example(payload, ("image", "label"))
        except tfrecord.RecordError as error:
            assert str(error)
            counts.refused += 1
        else:
            assert set(features) <= {"image", "label"}
            counts.taken += 1


def test_images(counts):
    """Images are probed, then decoded by TensorFlow where the probe takes them."""
    import tensorflow as tf

    signature = [tf.TensorSpec((), tf.string), tf.TensorSpec((), tf.int32), tf.TensorSpec(4, tf.int32)]

    @tf.function(input_signature=signature)
    def decoded(content, branch, window):
        return images.decode(content, branch, window, 16)

    generator = random.Random(3)
    goods = [jpeg(1), jpeg(2, mode="L"), jpeg(3, mode="CMYK"), png(4)]
    for number in range(400):
        content = damaged(goods[number % 4], generator)
        try:
            kind, height, width = images.probe(content)
        except ValueError as error:
            assert str(error)
            counts.refused += 1
            continue
        assert height > 0
        assert width > 0
        branch, window = images.branches(np.array([kind]), np.array([[0, 0, height, width]]), 16)
        try:
            image = decoded(tf.constant(content), tf.constant(branch[0]), tf.constant(window[0]))
        except tf.errors.OpError as error:
            assert error.message
            counts.refused += 1
        else:
            assert image.shape == (16, 16, 3)
            counts.taken += 1


ARRAYS = {"model/0000/kernel": np.arange(24, dtype=np.float32).reshape(4, 6), "optimizer/0000/step": np.array(3)}


def test_checkpoints(tmp_path, counts):
    """Whatever happens to a file, what is read is what was written; the file before it is used and both stay."""
    told = []
    store = CheckpointStore(tmp_path, keep=2, report=told.append)
    store.save(2, ARRAYS, support.meta(2), wait=True)
    store.save(3, ARRAYS, support.meta(3), wait=True)
    newest, before = store.paths()
    aside = newest.with_name(f"{newest.name}.damaged")
    good, earlier = newest.read_bytes(), before.read_bytes()
    generator = random.Random(4)
    for _ in range(300):
        newest.write_bytes(content := damaged(good, generator))
        told.clear()
        found = store.newest_good()
        assert found is not None
        assert {name: value.tolist() for name, value in found.arrays.items()} == {
            name: value.tolist() for name, value in ARRAYS.items()
        }
        assert found.meta["state"] == support.meta(2 if told else 3)["state"]
        assert len(told) == (found.path == before)
        assert all(newest.name in line for line in told)
        counts.refused += len(told)
        counts.taken += not told
        assert (aside if told else newest).read_bytes() == content
        aside.unlink(missing_ok=True)
        assert before.read_bytes() == earlier


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


def array(value) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


def meta(value) -> bytes:
    return array(np.frombuffer(json.dumps(value).encode(), np.uint8))


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"meta.npy": b""},
        {"meta.npy": array(np.array([{"a": 1}], object))},
        {"meta.npy": array(np.array([1.5]))},
        {"meta.npy": array(np.array(7))},
        {"meta.npy": meta([])},
        {"meta.npy": meta(None)},
        {"meta.npy": meta({})},
        {"meta.npy": meta({"format": 1})},
        {"meta.npy": meta({"format": 99, "arrays": []})},
        {"meta.npy": meta({"format": 1, "arrays": ["a"]})},
        {"meta.npy": meta({"format": 1, "arrays": 5})},
        {"meta.npy": meta({"format": 1, "arrays": ["a"]}), "array/a.npy": array(np.array([print], object))},
        {"meta.npy": meta({"format": 1, "arrays": ["a"]}), "array/a.npy": b"\x93NUMPY\x01\x00\xff\xff"},
        {"meta.npy": meta({"format": 1, "arrays": ["a"]}), "array/a": b"raw"},
        {"../../escape.npy": array(np.array(1)), "meta.npy": meta({"format": 1, "arrays": []})},
    ],
)
def test_archives_that_are_no_checkpoints(tmp_path, members):
    path = tmp_path / "step-000000001.npz"
    path.write_bytes(zipped(members))
    with pytest.raises(DamagedCheckpointError, match="step-000000001"):
        archive.read(path)
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
