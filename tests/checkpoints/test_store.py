"""The folder of checkpoints: saving, keeping, finding, and skipping damaged files."""

import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.store import CheckpointFolder, CheckpointStore, find_checkpoint
from hybrid_imagenet.errors import UserError
from tests.checkpoints.support import ARRAYS, meta


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(store, step, top1=None, **arrays):
    store.save(step, {**ARRAYS, **arrays}, meta(step, top1))
    store.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def name(step):
    return f"step-{step:09d}.npz"


def test_latest_valid_with_a_damaged_file_renames_it_and_returns_the_one_before(folder):
    messages = []
    store = CheckpointStore(folder, keep=3, log=messages.append)
    for step in (1, 2, 3):
        save(store, step, c=np.array(step))
    latest = store.paths()[0]
    cut = latest.read_bytes()[:-30]
    latest.write_bytes(cut)
    assert store.latest_valid().arrays["c"] == 2
    assert names(folder) == [name(1), name(2), f"{name(3)}.damaged"]
    assert (folder / f"{name(3)}.damaged").read_bytes() == cut
    [message] = messages
    assert message.startswith(f"renamed a damaged checkpoint to {name(3)}.damaged: {latest}: ")
    save(store, 3, c=np.array(3))
    latest.write_bytes(b"")
    assert store.latest_valid().arrays["c"] == 2
    assert [path.name for path in store.damaged_paths()] == [
        f"{name(3)}.damaged",
        f"{name(3)}.damaged-2",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"state": [1, 2]},
        {"state": meta(8)["state"] | {"rollbacks": 0}},
        {"epoch_sums": {"loss": 1.0}},
        # This state is of step 4, but the name of the file has step 5.
        {"state": {**meta(4)["state"]}},
    ],
)
def test_latest_valid_skips_and_renames_files_with_invalid_descriptions(folder, changes):
    save(CheckpointStore(folder, keep=1), 1)
    archive.write(folder / name(5), ARRAYS, meta(5, **changes))
    messages = []
    store = CheckpointStore(folder, keep=1, log=messages.append)
    assert store.latest_valid().path.name == name(1)
    assert len(messages) == 1
    assert names(folder) == [name(1), f"{name(5)}.damaged"]


def test_latest_valid_rejects_files_of_an_earlier_version_and_keeps_them(folder):
    save(CheckpointStore(folder, keep=1), 1)
    archive.write(folder / name(5), ARRAYS, meta(5, format=1))
    for find in (CheckpointStore(folder, keep=1).latest_valid, lambda: find_checkpoint(folder)):
        with pytest.raises(UserError, match="was saved by an earlier version"):
            find()
    assert names(folder) == [name(1), name(5)]


def test_keep_best_keeps_the_best_and_the_latest(folder):
    store = CheckpointStore(folder, keep=2, keep_best=True)
    scores = {1: 0.3, 2: 0.7, 3: 0.7, 4: None, 5: 0.6, 6: 0.5}
    for step, top1 in scores.items():
        save(store, step, top1)
    assert names(folder) == [name(2), name(5), name(6)]
    assert store.best_valid().path.name == name(2)
    # The accuracy is stored in the files, so a new store finds the best one. Without that file, it
    # keeps the next best.
    other_store = CheckpointStore(folder, keep=1, keep_best=True)
    save(other_store, 7, 0.1)
    assert names(folder) == [name(2), name(7)]
    (folder / name(2)).write_bytes(b"damaged")
    assert CheckpointFolder(folder, print).best_valid().path.name == name(7)
    save(other_store, 8, 0.2)
    assert names(folder) == [f"{name(2)}.damaged", name(8)]
    without = CheckpointStore(folder, keep=1)
    save(without, 9)
    assert names(folder) == [f"{name(2)}.damaged", name(9)]
    assert without.best_valid() is None


def test_checkpoint_folder_changes_no_file(folder):
    save(CheckpointStore(folder, keep=1), 1)
    (folder / name(2)).write_bytes(b"being written by another version")
    messages = []
    assert CheckpointFolder(folder, messages.append).latest_valid().path.name == name(1)
    assert len(messages) == 1
    assert names(folder) == [name(1), name(2)]


def test_save_keeps_the_latest_and_removes_temporary_files(folder):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    (folder / ".step-000000009.npz.77.tmp").write_bytes(b"cut short")
    for step in (2, 10, 11):
        save(store, step)
    assert names(folder) == [name(10), name(11)]


def test_failed_write_raises_and_keeps_earlier_checkpoints(folder, monkeypatch):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.os, "fsync", full)
    store.save(2, ARRAYS, meta(2))
    with pytest.raises(
        UserError, match=r"No space left on device\. Earlier checkpoints are intact"
    ):
        store.wait()
    first = CheckpointStore(folder.with_name("first"), keep=2)
    first.save(1, ARRAYS, meta(1))
    with pytest.raises(
        UserError, match=r"No space left on device\. No checkpoint has been written yet"
    ):
        first.wait()
    monkeypatch.undo()
    assert names(folder) == [name(1)]
    save(store, 3)
    assert store.latest_valid().path.name == name(3)


def test_find_checkpoint_of_a_run_returns_the_latest_readable_one(folder):
    folder.mkdir()
    for step in (1, 2):
        archive.write(folder / name(step), {"x": np.zeros(1)}, {"model": f"resnet{step}"})
    (folder / name(3)).write_bytes(b"cut short")
    for path in (folder.parent, folder):
        assert find_checkpoint(path).meta["model"] == "resnet2"
    assert find_checkpoint(folder / name(1)).meta["model"] == "resnet1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "does not exist"),
        ("text", "not a checkpoint"),
        ("folder", "has no usable checkpoint"),
        ("model.keras", "is a model that Keras has saved. Load it with keras.saving.load_model"),
    ],
)
def test_find_checkpoint_of_another_file_raises_with_the_reason(tmp_path, name, text):
    for file in ("text", "model.keras", "weights.pth"):
        (tmp_path / file).write_text("hello")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=text):
        find_checkpoint(tmp_path / name)
    assert find_checkpoint(tmp_path / "weights.pth").meta == {}
