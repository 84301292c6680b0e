import io
import json
import os
import random
import zipfile

import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.archive import DamagedCheckpointError
from tests.checkpoints.support import ARRAYS, meta
from tests.support.promptly import promptly


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "step-000000005.npz"
    archive.write(path, ARRAYS, meta(5))
    return path


def rewrite(path, members, compression=zipfile.ZIP_STORED):
    """Puts an archive of these members in the place of a checkpoint."""
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)


def assert_whole(checkpoint):
    assert checkpoint.meta == {**meta(5), "format": 1}
    assert checkpoint.arrays.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(checkpoint.arrays[name], value)
        assert checkpoint.arrays[name].dtype == value.dtype


def test_what_is_written_is_read(path):
    assert_whole(archive.read(path))
    assert archive.read_meta(path)["state"] == meta(5)["state"]
    assert archive.read(path, arrays=False).arrays == {}
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True]),
        np.float16(1.5),
    ],
    ids=["empty", "columns first", "truth values", "scalar"],
)
def test_arrays_of_every_kind(tmp_path, array):
    archive.write(tmp_path / "a.npz", {"x": array}, meta(5))
    read = archive.read(tmp_path / "a.npz").arrays["x"]
    np.testing.assert_array_equal(read, array)
    assert (read.dtype, read.shape) == (np.asarray(array).dtype, np.asarray(array).shape)


def test_any_single_change_is_noticed(path):
    good = path.read_bytes()
    generator = random.Random(3)
    noticed = 0
    for _ in range(300):
        place = generator.randrange(len(good))
        path.write_bytes(
            good[:place] + bytes([good[place] ^ (1 << generator.randrange(8))]) + good[place + 1 :]
        )
        try:
            same = archive.read(path)
        except DamagedCheckpointError:
            noticed += 1
            continue
        assert_whole(same)  # a bit of a time stamp or another field that says nothing
    assert noticed > 200


@pytest.mark.parametrize("part", [0, 1, 10, 0.5, -1])
def test_a_cut_file_is_damaged(path, part):
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content)) if isinstance(part, float) else part])
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        archive.read(path)


def header(text: str) -> bytes:
    """The beginning of an array file (format 1.0 of NumPy), with any text in the place of its
    header.
    """
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
def test_no_header_of_an_array_asks_for_memory_or_ends_in_a_traceback(path, content):
    """The checksums are right here: headers that were never good, or were damaged before they were
    summed up.
    """
    with zipfile.ZipFile(path) as file:
        members = {name: file.read(name) for name in file.namelist()}
    rewrite(path, members | {"array/b.npy": content})
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        archive.read(path)


def test_compressed_members_are_refused_unread(path):
    rewrite(path, {"meta.npy": bytes(1 << 20)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(DamagedCheckpointError, match="directory of members"):
        archive.read(path)


def test_another_format_is_refused(path):
    archive.write(path, ARRAYS, {**meta(5), "format": 2})
    with pytest.raises(DamagedCheckpointError, match="format 2, this version reads 1"):
        archive.read(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["FIFO", "directory"])
def test_what_is_no_file_is_told_at_once(path, make):
    path.unlink()
    make(path)
    assert promptly(lambda: archive.read(path)) == f"{path}: not a regular file"


def array(value) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=True)
    return buffer.getvalue()


def described(value) -> bytes:
    return array(np.frombuffer(json.dumps(value).encode(), np.uint8))


EMPTY = described({"format": 1, "arrays": []})
ONE = described({"format": 1, "arrays": ["a"]})


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"meta.npy": b""},
        {"meta.npy": array(np.array(7))},
        {"meta.npy": described([])},
        {"meta.npy": described({"format": 1})},
        {"meta.npy": ONE},
        {"meta.npy": described({"format": 1, "arrays": 5})},
        {"meta.npy": ONE, "array/a.npy": array(np.array([print], object))},
        {"meta.npy": ONE, "array/a": b"raw"},
        {"../../escape.npy": array(np.array(1)), "meta.npy": EMPTY},
    ],
)
def test_archives_that_are_no_checkpoints(path, members):
    rewrite(path, members)
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        archive.read(path)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
