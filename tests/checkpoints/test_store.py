import random
import threading

import numpy as np
import pytest

from hybrid_imagenet.checkpoints import store as checkpoint
from hybrid_imagenet.checkpoints.store import CheckpointStore, DamagedCheckpointError
from hybrid_imagenet.errors import UserError

ARRAYS = {"a/weights": np.arange(60, dtype=np.float32).reshape(3, 20), "b": np.array(7, np.int64)}
META = {"state": {"step": 5}, "model": "resnet18"}


def save(store, step, **arrays):
    store.save(step, {**ARRAYS, **arrays}, META, wait=True)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "step-000000005.npz"
    checkpoint.write(path, ARRAYS, META)
    read = checkpoint.read(path)
    assert read.meta["state"] == {"step": 5}
    assert read.arrays.keys() == ARRAYS.keys()
    for name, value in ARRAYS.items():
        np.testing.assert_array_equal(read.arrays[name], value)
        assert read.arrays[name].dtype == value.dtype
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_any_single_change_is_noticed(tmp_path):
    path = tmp_path / "step-000000005.npz"
    checkpoint.write(path, ARRAYS, META)
    good = path.read_bytes()
    generator = random.Random(3)
    noticed = 0
    for _ in range(300):
        place = generator.randrange(len(good))
        path.write_bytes(good[:place] + bytes([good[place] ^ (1 << generator.randrange(8))]) + good[place + 1 :])
        try:
            same = checkpoint.read(path)
        except DamagedCheckpointError:
            noticed += 1
            continue
        # A bit of a time stamp or another field that says nothing: the content must be whole.
        assert same.meta == {**META, "format": 1}
        for name, value in ARRAYS.items():
            np.testing.assert_array_equal(same.arrays[name], value)
    assert noticed > 200


@pytest.mark.parametrize("part", [0, 1, 10, 0.5, -1])
def test_a_cut_file_is_damaged(tmp_path, part):
    path = tmp_path / "step-000000005.npz"
    checkpoint.write(path, ARRAYS, META)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content)) if isinstance(part, float) else part])
    with pytest.raises(DamagedCheckpointError, match="step-000000005"):
        checkpoint.read(path)


def test_pickles_are_refused(tmp_path):
    path = tmp_path / "step-000000005.npz"
    with path.open("wb") as file:
        np.savez(file, meta=np.array([{"format": 1}], dtype=object))
    with pytest.raises(DamagedCheckpointError):
        checkpoint.read(path)


def test_the_newest_good_one_is_found_and_the_damaged_one_named(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=3)
    for step in (1, 2, 3):
        save(store, step, c=np.array(step))
    newest = store.paths()[0]
    newest.write_bytes(newest.read_bytes()[:-30])
    told = []
    found = store.newest_good(told.append)
    assert found.arrays["c"] == 2
    assert len(told) == 1
    assert newest.name in told[0]


def test_only_so_many_are_kept_and_leftovers_go(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    save(store, 1)
    (tmp_path / "checkpoints" / ".step-000000009.npz.77.tmp").write_bytes(b"cut short")
    for step in (2, 10, 11):
        save(store, step)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-000000010.npz", "step-000000011.npz"]


def test_a_failed_write_is_told_and_leaves_the_earlier_ones(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    save(store, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.os, "fsync", full)
    store.save(2, ARRAYS, META)
    with pytest.raises(UserError, match="No space left on device"):
        store.wait()
    monkeypatch.undo()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000000001.npz"]
    save(store, 3)
    assert store.newest_good(print).path.name == "step-000000003.npz"


def test_writing_happens_beside_training(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    release = threading.Event()
    original = checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *a: (release.wait(20), original(*a)))
    store.save(1, ARRAYS, META)
    assert store.paths() == []
    release.set()
    store.wait()
    assert [p.name for p in store.paths()] == ["step-000000001.npz"]
