"""Tests which files belong to a split, which ones are missing, and which ones are skipped."""

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from hybrid_imagenet.data import datasets, listing
from hybrid_imagenet.errors import UserError
from tests.data import support
from tests.data.test_sources import cache, make  # noqa: F401


def files_of(split, *names):
    return listing.files_of_split("set", split, listing.split_name_lookup(names, ".tar"))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["train-00000-of-00003", "train-00002-of-00003"],
            "1 of 3 train files are missing, the first is number 1",
        ),
        (
            ["train-00000-of-00001", "train-00000-of-00002"],
            "several sets .* train-00000-of-00001 and train-00000-of-",
        ),
        (
            ["train/0.tar", "train-0.tar"],
            "several sets .* train-0.tar and train/0.tar. Keep only one",
        ),
        (
            ["train-00000-of-00001-aa.parquet", "train-00000-of-00001-bb.parquet"],
            "are the same part of a set",
        ),
    ],
)
def test_complete_file_set_rejects_missing_files_and_several_sets(names, message):
    with pytest.raises(UserError, match=message):
        listing.complete_file_set("set", "train", names)


def test_complete_file_set_sorts_by_name():
    names = [f"data/train-0000{number}-of-00003-{'cba'[number]}.parquet" for number in range(3)]
    assert listing.complete_file_set("set", "train", names[::-1]) == names
    assert listing.complete_file_set("set", "train", ["train-b.tar", "train-a.tar"]) == [
        "train-a.tar",
        "train-b.tar",
    ]


def test_files_of_split_rejects_two_names_of_a_split_and_two_splits_of_a_file():
    names = ["a-val-0.tar", "a-test-0.tar", "a-train-0.tar"]
    assert files_of("validation", *names) == ["a-val-0.tar"]
    with pytest.raises(UserError, match=r"two validation splits, validation-0.tar and val-0.tar"):
        files_of("validation", "valid-0.tar", "validation-0.tar", "val-0.tar")
    with pytest.raises(UserError, match=r"train/val-0.tar is named both"):
        files_of("train", "train/val-0.tar", "train/0.tar")


def test_numbering_gaps_are_reported_only_in_a_series_of_numbers():
    names = [f"train-{number:06d}.tar" for number in (0, 1, 3, 4, 6)]
    (note,) = listing.numbering_gaps("set", names)
    assert (
        "2 files are missing between train-000000.tar and train-000006.tar, the first is number 2"
        in note.text
    )
    assert note.fault
    for others in (names[:2], ["train/n01440764.tar", "train/n15075141.tar"], ["train-a.tar"]):
        assert not list(listing.numbering_gaps("set", others))


def notes(name, directory, split="train"):
    return {
        str(note): note.fault for note in datasets.open_source(name, str(directory), split).notes
    }


def test_notes_on_a_folder_count_files_that_are_skipped(tmp_path):
    make("folder", tmp_path)
    classes = tmp_path / "train"
    (classes / "n01" / "more").mkdir()
    for name in (
        "n01/a.avif",
        "n02/b.avif",
        "n02/c.TIFF",
        "n02/noSuffix",
        "n03/._d.jpg",
        "n03/readme.txt",
        "e.jpg",
    ):
        (classes / name).touch()
    os.mkfifo(classes / "n02" / "pipe.jpg")
    skipped = notes("folder", tmp_path)
    assert notes("folder", tmp_path, "validation") == {}
    expected = {
        "2 skipped, .avif is not supported": True,
        "1 skipped, .tiff is not supported": True,
        "1 skipped, a name without a suffix is not supported": True,
        "1 skipped, a directory inside a class directory": True,
        "1 skipped, not in a class directory": True,
        "1 skipped, not a regular file": True,
        "1 skipped, hidden": False,
        "1 skipped, .txt is not supported": False,
    }
    assert {
        key: fault for key in expected for note, fault in skipped.items() if key in note
    } == expected
    assert len(skipped) == len(expected)
    assert any(note.endswith("the first is n01/a.avif") for note in skipped)
    assert datasets.open_source("folder", str(tmp_path)).num_examples == 14
    validation = tmp_path / "validation"
    shutil.rmtree(validation / "n03")
    text = f"{validation}: 1 skipped, no directory of this class in validation; the first is n03"
    assert notes("folder", tmp_path, "validation") == {text: True}


@pytest.mark.parametrize("form", ["imagenet", "parquet"])
def test_open_source_counts_unassigned_files_and_raises_for_missing_shards(form, tmp_path):
    name = make(form, tmp_path)
    is_imagenet = form == "imagenet"
    directory = tmp_path if is_imagenet else tmp_path / "data"
    suffix = "" if is_imagenet else ".parquet"
    (directory / f"extra-00000-of-00001{suffix}").touch()
    (note,) = notes(name, tmp_path)
    assert "1 skipped" in note
    assert f"extra-00000-of-00001{suffix}" in note
    (directory / f"train-00001-of-00002{suffix}").unlink()
    with pytest.raises(UserError, match="1 of 2 train files are missing"):
        datasets.open_source(name, str(tmp_path))


def test_notes_on_tar_files_name_missing_compressed_and_unlisted_ones(tmp_path):
    for split in datasets.SPLITS:
        support.write_tars(tmp_path, split, support.tiny(split), 3)
    support.write_tars(tmp_path, "unlabeled", support.tiny("train")[:2], 3)
    (tmp_path / "train-0002.tar").rename(tmp_path / "train-0002.tar.gz")
    with pytest.raises(
        UserError,
        match=r"0002.tar.gz is compressed.* Decompress it to train-0002.tar \(gzip -dk\)",
    ):
        datasets.open_source("webdataset", str(tmp_path))
    (tmp_path / "train-0001.tar").rename(tmp_path / "moved")
    (tmp_path / "train-0002.tar.gz").rename(tmp_path / "train-0001.tar.gz")
    (tmp_path / "moved").rename(tmp_path / "train-0001.tar")
    notes_by_text = notes("webdataset", tmp_path)
    assert sorted(notes_by_text.values()) == [False, True, True]
    for text, fault in (
        (
            "1 files are missing between train-0000.tar and train-0004.tar, the first is number 2",
            True,
        ),
        (
            (
                "1 skipped, neither train nor validation by their names; the first is"
                " unlabeled-0000.tar"
            ),
            True,
        ),
        ("1 skipped, compressed, next to the unpacked file; the first is train-0001.tar.gz", False),
    ):
        assert [notes_by_text[note] for note in notes_by_text if text in note] == [fault]
    support.write_info(tmp_path)
    support.write_tars(tmp_path, "train-new", support.tiny("train")[:2], 3)
    assert any(
        "skipped, not in _info.json; the first is train-0001.tar.gz" in note
        for note in notes("webdataset", tmp_path)
    )


# The same word composed, as Linux programs write it, and decomposed, as a Mac writes it.
COMPOSED = "caf\u00e9"
DECOMPOSED = "cafe\u0301"


def write_classes(directory, *names):
    for number, name in enumerate(names):
        (directory / name).mkdir(parents=True)
        (directory / name / "a.jpg").write_bytes(support.jpeg(number))
        (directory / name / "b.jpg").write_bytes(support.jpeg(number))


@pytest.mark.parametrize(
    ("train_name", "validation_name"), [(COMPOSED, DECOMPOSED), (DECOMPOSED, COMPOSED)]
)
def test_folder_whose_splits_have_different_unicode_forms_has_one_class(
    train_name, validation_name, tmp_path
):
    write_classes(tmp_path / "train", train_name, "cake")
    write_classes(tmp_path / "val", validation_name, "cake")
    train, validation = (
        datasets.open_source("folder", str(tmp_path), split) for split in datasets.SPLITS
    )
    assert train.class_names == validation.class_names == tuple(sorted((train_name, "cake")))
    listing.check_splits("folder", train.class_names, validation.class_names)
    labels = validation.read(range(4))[1].tolist()
    for index, label in enumerate(labels):
        directory = Path(validation.locate(index)[0]).parent.name
        assert (directory == "cake") == (train.class_names[label] == "cake")


@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
def test_folder_with_two_unicode_forms_of_a_class_raises(val_fraction, tmp_path):
    write_classes(tmp_path / "train", COMPOSED, DECOMPOSED)
    write_classes(tmp_path / ("other" if val_fraction else "val"), COMPOSED)
    message = r"directories 'cafe\\u0301' and 'caf\\xe9' differ only in their Unicode form\. Move"
    with pytest.raises(UserError, match=message):
        datasets.open_source("folder", str(tmp_path), val_fraction=val_fraction)


def test_class_difference_ignores_the_unicode_form():
    assert listing.class_difference((COMPOSED, "tea"), (DECOMPOSED, "tea")) is None
    assert listing.class_difference((COMPOSED,), ("cafe",)) == "class 0 is 'caf\u00e9' and 'cafe'"


def test_class_list_with_two_unicode_forms_of_a_name_raises():
    with pytest.raises(UserError, match=r"lists .* on 2 of 3 lines"):
        listing.parse_class_list("labels.txt", f"{COMPOSED}\ntea\n{DECOMPOSED}\n".encode())


@pytest.mark.parametrize("val_fraction", [0.0, 0.5])
def test_folder_with_directories_that_are_no_classes_raises_before_training(val_fraction, tmp_path):
    write_classes(tmp_path / "train", "cat", "dog")
    if not val_fraction:
        write_classes(tmp_path / "val", "cat", "dog")
    for name in ("@eaDir", "__MACOSX", "lost+found"):
        (tmp_path / "train" / name).mkdir()
    (tmp_path / "train" / "__MACOSX" / "._a.jpg").touch()
    (tmp_path / "train" / "@eaDir" / "a.jpg").mkdir()
    message = (
        r"3 of 5 class directories in .*train have no images: @eaDir, __MACOSX, lost\+found\. Move"
        r" them away, or set --num_classes=5 to keep"
    )
    request = datasets.DatasetRequest("folder", str(tmp_path), val_fraction=val_fraction)
    for find in (request.probe, request.open):
        with pytest.raises(UserError, match=message):
            find()
    source = dataclasses.replace(request, num_classes=5).open()
    assert source.class_names == ("@eaDir", "__MACOSX", "cat", "dog", "lost+found")
    with pytest.raises(UserError, match="3 of 5 class directories"):
        dataclasses.replace(request, num_classes=4).open()


def test_folder_with_many_empty_classes_names_the_first_ten(tmp_path):
    write_classes(tmp_path / "train", "cat")
    for number in range(12):
        (tmp_path / "train" / f"n{number:02d}").mkdir()
    with pytest.raises(UserError, match=r"no images: n00, .*, n09 and 2 more\. Move them away"):
        datasets.open_source("folder", str(tmp_path))
