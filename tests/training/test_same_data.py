"""Ranks with different data, and a run resumed on other data, end with one error line."""

import copy
import pathlib
import shutil

import numpy as np
import pytest

from hybrid_imagenet.checkpoints.archive import CheckpointArchive
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.sources.subset import Subset
from hybrid_imagenet.errors import EXIT_USAGE, SharedError, UserError
from hybrid_imagenet.training import same_data
from tests.data import support
from tests.training import programs


class Ranks(SingleProcess):
    """Rank 0 of several ranks, whose other ranks gather the given values."""

    def __init__(self, *others):
        super().__init__()
        self.others = others
        self.hosts = tuple(f"host{number}" for number in range(1 + len(others)))

    def allgather_object(self, obj):
        return [obj, *self.others]


def folder(directory):
    for split in datasets.SPLITS:
        support.write_folder(directory, split, support.tiny(split))
    return directory


def identities(source):
    return {"training": source.identity}


def altered(directory, change):
    """Returns the dataset of `folder` after a change, as another host might have it."""
    other = directory.with_name("other")
    shutil.copytree(directory, other)
    change(other / "train")
    return datasets.open_source("folder", str(other))


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
def test_check_ranks_with_different_data_names_rank_host_and_part(change, words, tmp_path):
    source = datasets.open_source("folder", str(folder(tmp_path / "set")))
    other = altered(tmp_path / "set", change)
    same_data.check_ranks(Ranks(identities(copy.copy(source))), {"training": source})
    with pytest.raises(
        SharedError, match=f"training data of rank 2 on host2 .* rank 0 on host0.*{words}"
    ) as caught:
        same_data.check_ranks(Ranks(identities(source), identities(other)), {"training": source})
    assert caught.value.exit_code == EXIT_USAGE


def test_check_resumed_with_other_data_is_rejected(tmp_path):
    source = datasets.open_source("folder", str(folder(tmp_path / "set")))
    change, words = CHANGES[1]
    checkpoint = CheckpointArchive(
        pathlib.Path("step-000000005.npz"), {}, {"data": identities(source)}
    )
    same_data.check_resumed(checkpoint, {"training": source})
    # The run may have validated other images.
    same_data.check_resumed(checkpoint, {"training": source, "tuning": source})
    with pytest.raises(
        UserError, match=f"step-000000005.npz: the training data .*{words}. Resume with the data"
    ):
        same_data.check_resumed(checkpoint, {"training": altered(tmp_path / "set", change)})


def test_check_ranks_with_another_tuning_split_is_rejected(tmp_path):
    source = datasets.open_source("folder", str(folder(tmp_path / "set")))
    one, same, other = (
        Subset(source, np.array(kept)) for kept in ([0, 2, 5], [0, 2, 5], [0, 3, 5])
    )
    same_data.check_ranks(Ranks(identities(same)), {"training": one})
    with pytest.raises(SharedError, match="other file names"):
        same_data.check_ranks(Ranks(identities(other)), {"training": one})


def test_check_ranks_with_other_shard_sizes_is_rejected(tmp_path):
    for name, shards in (("a", [8, 6]), ("b", [6, 8])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "labels.txt").write_text("a\nb\nc")
        first = 0
        for number, count in enumerate(shards):
            pairs = support.tiny("train")[first : first + count]
            support.write_tars(tmp_path / name, f"train-{number}", pairs, per_file=count)
            first += count
    one, other = (datasets.open_source("webdataset", str(tmp_path / name)) for name in "ab")
    with pytest.raises(SharedError, match=": other sizes of shards\\. Use the same data"):
        same_data.check_ranks(Ranks(identities(other)), {"training": one})


def test_program_on_ranks_with_another_class_order_is_rejected(pools, tiny_data, tmp_path):
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
