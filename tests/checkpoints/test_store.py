import numpy as np
import pytest

from hybrid_imagenet.checkpoints import archive
from hybrid_imagenet.checkpoints.store import CheckpointFolder, CheckpointStore, look
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


def test_the_newest_good_one_is_found_and_the_damaged_one_set_aside(folder):
    told = []
    store = CheckpointStore(folder, keep=3, report=told.append)
    for step in (1, 2, 3):
        save(store, step, c=np.array(step))
    newest = store.paths()[0]
    cut = newest.read_bytes()[:-30]
    newest.write_bytes(cut)
    assert store.newest_good().arrays["c"] == 2
    assert names(folder) == [name(1), name(2), f"{name(3)}.damaged"]
    assert (folder / f"{name(3)}.damaged").read_bytes() == cut
    [line] = told
    assert line.startswith(f"damaged checkpoint set aside as {name(3)}.damaged: {newest}: ")
    save(store, 3, c=np.array(3))
    newest.write_bytes(b"")
    assert store.newest_good().arrays["c"] == 2
    assert [path.name for path in store.set_aside()] == [
        f"{name(3)}.damaged",
        f"{name(3)}.damaged-2",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"state": [1, 2]},
        {"state": meta(8)["state"] | {"rollbacks": 0}},
        {"epoch_sums": {"loss": 1.0}},
        {"state": {**meta(4)["state"]}},  # of another step than its name says
    ],
)
def test_a_description_of_another_form_is_passed_over_and_does_not_count(folder, changes):
    save(CheckpointStore(folder, keep=1), 1)
    archive.write(folder / name(5), ARRAYS, meta(5, **changes))
    told = []
    store = CheckpointStore(folder, keep=1, report=told.append)
    assert store.newest_good().path.name == name(1)
    assert len(told) == 1
    assert names(folder) == [name(1), f"{name(5)}.damaged"]


def test_the_best_stays_beside_the_newest(folder):
    store = CheckpointStore(folder, keep=2, keep_best=True)
    scores = {1: 0.3, 2: 0.7, 3: 0.7, 4: None, 5: 0.6, 6: 0.5}
    for step, top1 in scores.items():
        save(store, step, top1)
    assert names(folder) == [name(2), name(5), name(6)]
    assert store.best_good().path.name == name(2)
    # What is best stands in the files: a store that is opened anew knows it, and goes on to the
    # next best without it.
    again = CheckpointStore(folder, keep=1, keep_best=True)
    save(again, 7, 0.1)
    assert names(folder) == [name(2), name(7)]
    (folder / name(2)).write_bytes(b"damaged")
    assert CheckpointFolder(folder, print).best_good().path.name == name(7)
    save(again, 8, 0.2)
    assert names(folder) == [f"{name(2)}.damaged", name(8)]
    without = CheckpointStore(folder, keep=1)
    save(without, 9)
    assert names(folder) == [f"{name(2)}.damaged", name(9)]
    assert without.best_good() is None


def test_a_reader_changes_nothing(folder):
    save(CheckpointStore(folder, keep=1), 1)
    (folder / name(2)).write_bytes(b"being written by another version")
    told = []
    assert CheckpointFolder(folder, told.append).newest_good().path.name == name(1)
    assert len(told) == 1
    assert names(folder) == [name(1), name(2)]


def test_only_so_many_are_kept_and_leftovers_go(folder):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)
    (folder / ".step-000000009.npz.77.tmp").write_bytes(b"cut short")
    for step in (2, 10, 11):
        save(store, step)
    assert names(folder) == [name(10), name(11)]


def test_a_failed_write_is_told_and_leaves_the_earlier_ones(folder, monkeypatch):
    store = CheckpointStore(folder, keep=2)
    save(store, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.os, "fsync", full)
    store.save(2, ARRAYS, meta(2))
    with pytest.raises(UserError, match="No space left on device; those written before are intact"):
        store.wait()
    first = CheckpointStore(folder.with_name("first"), keep=2)
    first.save(1, ARRAYS, meta(1))
    with pytest.raises(UserError, match="No space left on device; none has been written"):
        first.wait()
    monkeypatch.undo()
    assert names(folder) == [name(1)]
    save(store, 3)
    assert store.newest_good().path.name == name(3)


def test_the_newest_readable_checkpoint_of_a_run_is_described(folder):
    folder.mkdir()
    for step in (1, 2):
        archive.write(folder / name(step), {"x": np.zeros(1)}, {"model": f"resnet{step}"})
    (folder / name(3)).write_bytes(b"cut short")
    for path in (folder.parent, folder):
        assert look(path).meta["model"] == "resnet2"
    assert look(folder / name(1)).meta["model"] == "resnet1"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("none", "no such file"),
        ("text", "not a checkpoint"),
        ("folder", "holds no usable checkpoint"),
        ("model.keras", "a model that Keras has saved: load it with keras.saving.load_model"),
    ],
)
def test_what_is_no_checkpoint_is_named_for_what_it_is(tmp_path, name, text):
    for file in ("text", "model.keras", "weights.pth"):
        (tmp_path / file).write_text("hello")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=text):
        look(tmp_path / name)
    assert look(tmp_path / "weights.pth").meta == {}
