"""The file format of checkpoints: complete round trips, and errors for damaged files."""

import io
import json
import os
import random
import re
import zipfile

import ml_dtypes
import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.archive import DamagedCheckpointError
from hybrid_imagenet.errors import UserError
from tests.checkpoints.support import ARRAYS, meta
from tests.support.promptly import promptly


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step-000000005.npz"
    archive.write(path, ARRAYS, meta(5))
    return path


def rewrite(path, members, compression=zipfile.ZIP_STORED):
    """Replaces a checkpoint by an archive with these members."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)


def assert_complete(checkpoint):
    assert checkpoint.meta == {**meta(5), "format": archive.FORMAT}
    assert checkpoint.arrays.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(checkpoint.arrays[name], value)
        assert checkpoint.arrays[name].dtype == value.dtype


def test_read_returns_what_write_stored(path):
    assert_complete(archive.read(path))
    assert archive.read_meta(path)["state"] == meta(5)["state"]
    assert archive.read(path, keep_arrays=False).arrays == {}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True]),
        np.float16(1.5),
    ],
    ids=["empty", "Fortran order", "booleans", "scalar"],
)
def test_write_and_read_keep_shape_and_type(tmp_path, array):
    archive.write(tmp_path / "a.npz", {"x": array}, meta(5))
    read = archive.read(tmp_path / "a.npz").arrays["x"]
    np.testing.assert_array_equal(read, array)
    assert (read.dtype, read.shape) == (np.asarray(array).dtype, np.asarray(array).shape)


def test_read_with_one_flipped_bit_raises_or_returns_equal_content(path):
    content = path.read_bytes()
    generator = random.Random(3)
    detected = 0
    for _ in range(300):
        position = generator.randrange(len(content))
        path.write_bytes(
            content[:position]
            + bytes([content[position] ^ (1 << generator.randrange(8))])
            + content[position + 1 :]
        )
        try:
            checkpoint = archive.read(path)
        except DamagedCheckpointError:
            detected += 1
            continue
        # The bit was in an unused field, such as a time stamp.
        assert_complete(checkpoint)
    assert detected > 200


@pytest.mark.parametrize("part", [0, 1, 10, 0.5, -1])
def test_read_of_a_truncated_file_raises(path, part):
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content)) if isinstance(part, float) else part])
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        archive.read(path)


def header(text: str) -> bytes:
    """Returns the beginning of an array file (format 1.0 of NumPy) with this text as header."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


HUGE = "{'descr': '<f4', 'fortran_order': False, 'shape': (4000000000000, 1000), }\n"


@pytest.mark.parametrize(
    "content",
    [
        header(HUGE) + bytes(16),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-2, -2), }\n") + bytes(16),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (5,), }\n") + bytes(16),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (2,), }\n") + bytes(16),
        header("(" * 5000 + "\n") + bytes(16),
        header("not a dictionary\n") + bytes(16),
        header("{'descr': '<f4'") + bytes(16),
        b"\x93NUMPY\x03\x00",
        b"",
    ],
)
def test_read_of_an_invalid_array_header_raises_without_allocating(path, content):
    """Uses valid checksums, which were computed over the invalid headers."""
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    rewrite(path, members | {"array/b.npy": content})
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        archive.read(path)


def test_read_of_compressed_members_raises_before_decompression(path):
    rewrite(path, {"meta.npy": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedCheckpointError, match="directory of members"):
        archive.read(path)


def test_write_and_read_keep_the_types_of_ml_dtypes(tmp_path):
    arrays = {
        "matrix": np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16),
        "scalar": np.array(0.5, ml_dtypes.float8_e4m3fn),
        "float32": np.ones(2, np.float32),
    }
    archive.write(tmp_path / "a.npz", arrays, meta(5))
    read = archive.read(tmp_path / "a.npz").arrays
    for name, value in arrays.items():
        assert read[name].dtype == value.dtype
        np.testing.assert_array_equal(read[name], value)


@pytest.mark.parametrize("read", [archive.read, archive.read_meta])
@pytest.mark.parametrize(
    ("number", "version"),
    [
        (None, "an earlier version"),
        (archive.FORMAT - 1, "an earlier version"),
        (archive.FORMAT + 1, "a later version"),
    ],
)
def test_read_of_another_format_raises_and_says_how_to_load_the_weights(
    path, read, number, version
):
    archive.write(path, ARRAYS, {**meta(5), "format": number})
    message = f"{path} was saved by {version} of hybrid_imagenet. Train again, or load the weights"
    with pytest.raises(UserError, match=re.escape(message)):
        read(path)


def test_read_without_a_format_takes_the_file_for_an_earlier_version(path):
    rewrite(path, {"meta.npy": described({"arrays": []})})
    with pytest.raises(UserError, match="was saved by an earlier version of hybrid_imagenet"):
        archive.read(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
def test_read_of_a_fifo_or_directory_raises_at_once(path, make):
    path.unlink()
    make(path)
    assert promptly(lambda: archive.read(path)) == f"{path}: not a regular file"


def array(value) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


def described(value) -> bytes:
    return array(np.frombuffer(json.dumps(value).encode(), np.uint8))


EMPTY = described({"format": archive.FORMAT, "arrays": [], "types": {}})
ONE = described({"format": archive.FORMAT, "arrays": ["a"], "types": {}})
UNKNOWN_TYPE = described({"format": archive.FORMAT, "arrays": ["a"], "types": {"a": "object"}})


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"meta.npy": b""},
        {"meta.npy": array(np.array(7))},
        {"meta.npy": described([])},
        {"meta.npy": described({"format": archive.FORMAT})},
        {"meta.npy": ONE},
        {"meta.npy": described({"format": archive.FORMAT, "arrays": 5, "types": {}})},
        {"meta.npy": UNKNOWN_TYPE, "array/a.npy": array(np.array(1.5))},
        {"meta.npy": ONE, "array/a.npy": array(np.array([print], object))},
        {"meta.npy": ONE, "array/a": b"raw"},
        {"../../escape.npy": array(np.array(1)), "meta.npy": EMPTY},
    ],
)
def test_read_of_archives_that_are_not_checkpoints_raises(path, members):
    rewrite(path, members)
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        archive.read(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
