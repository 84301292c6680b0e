"""Ranks whose data differ, and a run that is resumed on others, end with one line that names the
part.
"""

import copy
import pathlib
import shutil

import numpy as np
import pytest

from hybrid_imagenet import data
from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data.sources.wrappers import Subset
from hybrid_imagenet.errors import EXIT_USAGE, SharedError, UserError
from hybrid_imagenet.training import same_data
from tests.data import support
from tests.training import programs


class Ranks(SingleProcess):
    """Rank 0 of several, the others of which tell what they are given here."""

    def __init__(self, *others):
        super().__init__()
        self.others = others
        self.hosts = tuple(f"host{number}" for number in range(1 + len(others)))

    def allgather_object(self, obj):
        return [obj, *self.others]


def folder(directory):
    for split in data.SPLITS:
        support.write_folder(directory, split, support.tiny(split))
    return directory


def told(source):
    return {"training": source.identity}


def altered(directory, change):
    """The set of `folder` after a change, as another host has it."""
    other = directory.with_name("other")
    shutil.copytree(directory, other)
    change(other / "train")
    return data.open_source("folder", str(other))


CHANGES = [
    (
        lambda train: next(train.rglob("*.JPEG")).unlink(),
        "13 images instead of 14, other file names",
    ),
    (lambda train: (train / "n01").rename(train / "n09"), "other class names, other file names"),
    (
        lambda train: (train / "n01" / "000.JPEG").rename(train / "n01" / "new.JPEG"),
        ": other file names",
    ),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_the_rank_its_host_and_the_part_are_named(change, words, tmp_path):
    source = data.open_source("folder", str(folder(tmp_path / "set")))
    other = altered(tmp_path / "set", change)
    same_data.check_ranks(Ranks(told(copy.copy(source))), {"training": source})
    with pytest.raises(
        SharedError, match=f"training data of rank 2 on host2 .* rank 0 on host0.*{words}"
    ) as caught:
        same_data.check_ranks(Ranks(told(source), told(other)), {"training": source})
    assert caught.value.exit_code == EXIT_USAGE


def test_a_run_is_not_resumed_on_other_data(tmp_path):
    source, (change, words) = data.open_source("folder", str(folder(tmp_path / "set"))), CHANGES[1]
    checkpoint = CheckpointArchive(pathlib.Path("step-000000005.npz"), {}, {"data": told(source)})
    same_data.check_resumed(checkpoint, {"training": source})
    same_data.check_resumed(
        checkpoint, {"training": source, "tuning": source}
    )  # it validated others then
    with pytest.raises(
        UserError, match=f"step-000000005.npz: the training data .*{words}. Resume with the data"
    ):
        same_data.check_resumed(checkpoint, {"training": altered(tmp_path / "set", change)})


def test_other_images_kept_apart_for_tuning_are_other_data(tmp_path):
    source = data.open_source("folder", str(folder(tmp_path / "set")))
    one, same, other = (
        Subset(source, np.array(kept)) for kept in ([0, 2, 5], [0, 2, 5], [0, 3, 5])
    )
    same_data.check_ranks(Ranks(told(same)), {"training": one})
    with pytest.raises(SharedError, match="other file names"):
        same_data.check_ranks(Ranks(told(other)), {"training": one})


def test_shards_of_other_sizes_are_other_data(tmp_path):
    for name, shards in (("a", [8, 6]), ("b", [6, 8])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "labels.txt").write_text("a\nb\nc")
        first = 0
        for number, count in enumerate(shards):
            pairs = support.tiny("train")[first : first + count]
            support.write_tars(tmp_path / name, f"train-{number}", pairs, per_file=count)
            first += count
    one, other = (data.open_source("webdataset", str(tmp_path / name)) for name in "ab")
    with pytest.raises(SharedError, match=": other sizes of shards\\. Use the same data"):
        same_data.check_ranks(Ranks(told(other)), {"training": one})


def test_ranks_with_another_order_of_classes_do_not_train(pools, tiny_data, tmp_path):
    for rank in range(2):
        shutil.copytree(tiny_data, tmp_path / str(rank))
        (tmp_path / str(rank) / "labels.txt").write_text("\n".join("abcd" if rank else "abdc"))
    ends = pools[2].call(programs.train_on_own_data, str(tmp_path))
    assert [code for code, _, _ in ends] == [EXIT_USAGE] * 2
    lines = [
        line for _, _, errors in ends for line in errors.splitlines() if line.startswith("error:")
    ]
    assert len(lines) == 1
    assert "training data of rank 1" in lines[0]
    assert ": other class names. " in lines[0]
