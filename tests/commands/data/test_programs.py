"""Tests `hybrid-imagenet data prepare` and `data check`."""

import fcntl
import io
import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib

import numpy as np
import pytest
from PIL import Image

from hybrid_imagenet.commands.data import data_command as program
from hybrid_imagenet.data import datasets, images
from hybrid_imagenet.data.sources import tfrecord
from tests.data import support
from tests.data.test_sources import cache, flip_bit, make  # noqa: F401
from tests.support.processes import wait_for


def run(*arguments):
    return program.main([*arguments, "--workers=1"])


@pytest.mark.parametrize("form", ["folder", "parquet"])
def test_prepare_writes_the_images_and_labels_of_the_source(form, tmp_path, capsys):
    name = make(form, tmp_path / "from")
    target = str(tmp_path / "to")
    assert (
        run(
            "prepare",
            f"--from={name}",
            f"--data_dir={tmp_path / 'from'}",
            f"--to={target}",
            "--per_shard=4",
        )
        == 0
    )
    assert "train: 14 images in 4 shards" in capsys.readouterr().out
    for split in datasets.SPLITS:
        before = datasets.open_source(name, str(tmp_path / "from"), split)
        after = datasets.open_source("tfrecord", target, split)
        assert after.class_names == before.class_names
        images, labels = after.read(range(after.num_examples))
        expected_images, expected_labels = before.read(range(before.num_examples))
        assert images == expected_images
        assert labels.tolist() == expected_labels.tolist()
        assert isinstance(after, tfrecord.ShardSource)
        scanned = tfrecord.load_or_scan_index(after.shards)
        for column in ("shard", "offset", "length"):
            np.testing.assert_array_equal(getattr(after.index, column), getattr(scanned, column))
    names = sorted(path.name for path in (tmp_path / "to").iterdir() if path.name[0] == "t")
    assert names == [*(f"train-{number:05d}-of-00004" for number in range(4)), "train.index.npz"]
    assert run("check", "--dataset=tfrecord", f"--data_dir={target}") == 0


def test_prepare_with_resize_reduces_large_images_and_converts_png_and_cmyk(tmp_path):
    pairs = [
        (support.jpeg(1, 60, 90), 0),
        (support.jpeg(2, 20, 30), 1),
        (support.png(3, 80, 50), 2),
    ]
    pairs += [(support.jpeg(4, 64, 64, "CMYK"), 0)]
    for split in datasets.SPLITS:
        support.write_folder(tmp_path / "from", split, pairs)
    run(
        "prepare",
        "--from=folder",
        f"--data_dir={tmp_path / 'from'}",
        f"--to={tmp_path / 'to'}",
        "--resize=32",
    )
    source = datasets.open_source("tfrecord", str(tmp_path / "to"))
    by_class = {}
    for image, label in zip(*source.read(range(4)), strict=True):
        by_class.setdefault(int(label), []).append(image)
    pictures_by_class = {
        label: [Image.open(io.BytesIO(image)) for image in images]
        for label, images in by_class.items()
    }
    assert sorted(picture.size for picture in pictures_by_class[0]) == [(32, 32), (48, 32)]
    assert by_class[1] == [pairs[1][0]]
    assert [picture.size for picture in pictures_by_class[2]] == [(32, 51)]
    assert {
        (picture.format, picture.mode)
        for pictures in pictures_by_class.values()
        for picture in pictures
    } == {("JPEG", "RGB")}


def test_prepare_keeps_class_names_that_are_not_utf8(tmp_path):
    make("folder", tmp_path / "from")
    class_name = os.fsdecode(b"n01\xe9")
    for split in datasets.SPLITS:
        (tmp_path / "from" / split / "n01").rename(tmp_path / "from" / split / class_name)
    assert (
        run(
            "prepare", "--from=folder", f"--data_dir={tmp_path / 'from'}", f"--to={tmp_path / 'to'}"
        )
        == 0
    )
    shard = next((tmp_path / "to").glob("train-0*"))
    assert os.fsencode(class_name) in shard.read_bytes()


def test_prepare_with_bad_images_fails_or_skips_and_lists_them(tmp_path, capsys):
    for split in datasets.SPLITS:
        support.write_folder(tmp_path / "from", split, support.tiny(split))
    bad = next((tmp_path / "from" / "train" / "n01").iterdir())
    bad.write_bytes(bad.read_bytes()[:100])
    arguments = [
        "prepare",
        "--from=folder",
        f"--data_dir={tmp_path / 'from'}",
        f"--to={tmp_path / 'to'}",
    ]
    assert run(*arguments) == 2
    assert f"error: {bad}, offset 0: the JPEG is truncated" in capsys.readouterr().err
    other = next((tmp_path / "from" / "train" / "n02").iterdir())
    other = other.rename(other.with_name("other.jpg"))
    # An image has another name than in the interrupted call.
    assert run(*arguments, "--bad_records=skip") == 2
    assert "holds the beginning of a dataset with other images" in capsys.readouterr().err
    arguments[-1] += "2"
    assert run(*arguments) == 2
    assert run(*arguments, "--bad_records=skip") == 0
    manifest = json.loads((tmp_path / "to2" / "manifest.json").read_text())
    assert manifest["splits"]["train"]["num_examples"] == 13
    assert str(bad) in manifest["splits"]["train"]["bad_records"][0]
    capsys.readouterr()
    assert run("check", "--dataset=tfrecord", f"--data_dir={tmp_path / 'to2'}") == 2
    out = capsys.readouterr().out
    assert (
        f"manifest.json: train: omitted when the dataset was prepared: {bad}, offset 0: the JPEG is"
        " truncated" in out
    )
    assert "1 fault\n" in out


@pytest.mark.parametrize(
    ("has_manifest", "damage"), [(False, "cut"), (True, "cut between records")]
)
def test_prepare_from_a_truncated_shard_fails(damage, has_manifest, tmp_path, capsys):
    # Without a manifest, a file that is cut between two records looks complete to every reader.
    source = tmp_path / "from"
    target = tmp_path / "to"
    if has_manifest:
        make("folder", tmp_path / "images")
        run(
            "prepare",
            "--from=folder",
            f"--data_dir={tmp_path / 'images'}",
            f"--to={source}",
            "--per_shard=7",
        )
    else:
        make("imagenet", source)
    path = source / "train-00001-of-00002"
    at = int(tfrecord.scan_shard(path)[0][4])
    path.write_bytes(path.read_bytes()[: at if has_manifest else at + 50])
    capsys.readouterr()
    for policy in ("fail", "skip"):
        directories = (f"--data_dir={source}", f"--to={target}")
        assert run("prepare", "--from=tfrecord", *directories, f"--bad_records={policy}") == 2
        (line,) = capsys.readouterr().err.splitlines()
        error = "hold 11 records instead of 14" if has_manifest else f"{path}, offset {at}: "
        assert error in line
        assert not (target / "manifest.json").exists()


def test_prepare_repeats_a_finished_shard_that_was_truncated_later(tmp_path, capsys):
    support.write_folder(tmp_path / "from", "train", support.tiny("train"))
    support.write_folder(
        tmp_path / "from", "validation", [*support.tiny("validation")[:-1], (b"no image", 2)]
    )
    arguments = [
        "prepare",
        "--from=folder",
        f"--data_dir={tmp_path / 'from'}",
        f"--to={tmp_path / 'to'}",
    ]
    # All training shards are finished before it fails.
    assert run(*arguments) == 2
    path = tmp_path / "to" / "train-00000-of-00001"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    next(
        f
        for f in (tmp_path / "from" / "validation").rglob("*.JPEG")
        if f.read_bytes() == b"no image"
    ).unlink()
    support.write_folder(tmp_path / "from", "validation", support.tiny("validation"))
    assert run(*arguments) == 0
    assert path.read_bytes() == whole


def test_check_reports_each_fault_with_file_and_offset(tmp_path, capsys):
    make("folder", tmp_path / "from")
    run(
        "prepare",
        "--from=folder",
        f"--data_dir={tmp_path / 'from'}",
        f"--to={tmp_path / 'to'}",
        "--per_shard=5",
    )
    path = tmp_path / "to" / "train-00001-of-00003"
    offsets, lengths, _ = tfrecord.scan_shard(path)
    flip_bit(path, int(offsets[2] + lengths[2] // 2))
    capsys.readouterr()
    assert run("check", "--dataset=tfrecord", f"--data_dir={tmp_path / 'to'}") == 2
    out = capsys.readouterr().out
    assert f"{path}, offset {offsets[2]}: the checksum of the data does not match" in out
    assert f"{path}: its CRC-32C is" in out
    assert "2 faults" in out
    path.write_bytes(path.read_bytes()[: int(offsets[4] + 9)])
    assert run("check", "--dataset=tfrecord", f"--data_dir={tmp_path / 'to'}", "--split=train") == 2
    assert f"{path}, offset {offsets[4]}: the record header is truncated" in capsys.readouterr().err


def test_check_finds_images_that_decoders_repair_and_images_with_too_many_pixels(tmp_path, capfd):
    # The JPEG is cut but has its end marker, so a decoder fills the rest with gray. The header of
    # the PNG claims 20,000 x 20,000 pixels.
    make("folder", tmp_path)
    gray, huge, trailing, bitmap = sorted(tmp_path.glob("train/n01/*"))[:4]
    content = support.jpeg(1, 200, 200)
    gray.write_bytes(content[: len(content) // 2] + b"\xff\xd9")
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 20000, 20000, 1, 0, 0, 0, 0)
    header = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    end = b"\0\0\0\0IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    huge.write_bytes(b"\x89PNG\r\n\x1a\n" + header + end)
    trailing.write_bytes(trailing.read_bytes() + bytes(1000))
    # Pillow decodes this bitmap, but training does not.
    bitmap.write_bytes(images.encode(Image.new("1", (8, 8)), "BMP"))
    assert run("check", "--dataset=folder", f"--data_dir={tmp_path}", "--split=train") == 2
    captured = capfd.readouterr()
    assert captured.out.splitlines() == [
        f"{gray}, offset 0: the JPEG is corrupt: premature end of data segment",
        (
            f"{huge}, offset 0: the image has 20000 x 20000 = 400,000,000 pixels, at most"
            " 89,478,485 are decoded: make it smaller or remove it"
        ),
        (
            f"{bitmap}, offset 0: the image does not decode (Number of channels inherent in the"
            " image must be 1, 3 or 4, was 0)"
        ),
        "3 faults",
    ]
    assert "Corrupt JPEG" not in captured.err
    huge.unlink()
    prepare = [
        "prepare",
        "--from=folder",
        f"--data_dir={tmp_path}",
        f"--to={tmp_path / 'to'}",
        "--resize=32",
    ]
    # A new JPEG would hide the damage.
    assert run(*prepare) == 2
    assert f"{gray}, offset 0: the JPEG is corrupt" in capfd.readouterr().err


def test_prepare_after_a_kill_keeps_finished_shards(tmp_path):
    pictures = [support.png(number, 80, 80) for number in range(20)]
    support.write_folder(
        tmp_path / "from", "train", [(pictures[n % 20], n % 3) for n in range(750)]
    )
    support.write_folder(tmp_path / "from", "validation", support.tiny("validation"))
    command = [
        sys.executable, "-m", "hybrid_imagenet", "data", "prepare",
        "--from=folder", f"--data_dir={tmp_path / 'from'}",
        f"--to={tmp_path / 'to'}", "--per_shard=15", "--workers=2", "--resize=48",
    ]  # fmt: skip
    started = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_for(lambda: len(list((tmp_path / "to").glob("train-0*"))) >= 5)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    # A killed worker may leave such a file.
    (tmp_path / "to" / ".train-00040-of-00050.abc").touch()
    # The workers end by themselves.
    time.sleep(0.5)
    finished = {path: path.stat().st_mtime_ns for path in (tmp_path / "to").glob("train-0*")}
    assert not (tmp_path / "to" / "manifest.json").exists()
    receipts = {
        path.name.removesuffix(".json")
        for path in (tmp_path / "to" / "prepare-state").glob("train-*")
    }
    subprocess.run([*command, "--workers=1"], check=True, timeout=60, capture_output=True)
    kept = [
        path
        for path, stamp in finished.items()
        if path.name in receipts and path.stat().st_mtime_ns == stamp
    ]
    assert len(kept) == len(receipts) >= 4
    source = datasets.open_source("tfrecord", str(tmp_path / "to"))
    assert source.num_examples == 750
    assert Image.open(io.BytesIO(source.read_one(7)[0])).size == (48, 48)
    assert not [
        path for path in (tmp_path / "to").iterdir() if path.name.startswith((".", "prepare"))
    ]


def test_prepare_continues_only_with_the_source_of_the_interrupted_call(tmp_path, capsys):
    # The first call ends at a bad image. The other directories have as many images, but one is
    # elsewhere, and one has another class.
    for name in ("a", "b", "c"):
        make("folder", tmp_path / name)
    (tmp_path / "c" / "train" / "n03").rename(tmp_path / "c" / "train" / "n04")
    (tmp_path / "c" / "validation" / "n03").rename(tmp_path / "c" / "validation" / "n04")
    bad = max((tmp_path / "a" / "train").rglob("*.JPEG"))
    whole = bad.read_bytes()
    bad.write_bytes(whole[:100])

    def prepare(name):
        code = run(
            "prepare",
            "--from=folder",
            f"--data_dir={tmp_path / name}",
            f"--to={tmp_path / 'to'}",
            "--per_shard=5",
        )
        return code, capsys.readouterr().err

    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "letter.txt").write_text("dear")
    assert "is not empty" in prepare("a")[1]
    (tmp_path / "to" / "letter.txt").rename(tmp_path / "to" / "manifest.json")
    assert "contains a dataset that is complete" in prepare("a")[1]
    (tmp_path / "to" / "manifest.json").unlink()
    assert prepare("a")[0] == 2
    with (tmp_path / "to" / "prepare-state" / "lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "Another data prepare writes to" in prepare("a")[1]
    code, err = prepare("b")
    assert code == 2
    assert (
        f"holds the beginning of a dataset with other directory ({tmp_path / 'a'}, now"
        f" {tmp_path / 'b'})" in err
    )
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "a").rename(tmp_path / "b")
    (tmp_path / "c").rename(tmp_path / "a")
    code, err = prepare("a")
    assert code == 2
    assert "a dataset with other images" in err
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    bad.write_bytes(whole)
    assert prepare("a")[0] == 0
    assert datasets.open_source("tfrecord", str(tmp_path / "to")).num_examples == 14
    assert not (tmp_path / "to" / "prepare-state").exists()


def test_check_and_prepare_report_skipped_files(tmp_path, capsys, caplog):
    make("folder", tmp_path / "from")
    (tmp_path / "from" / "train" / "n01" / "a.zip").touch()
    (tmp_path / "from" / "train" / "n01" / "notes.txt").touch()
    assert run("check", "--dataset=folder", f"--data_dir={tmp_path / 'from'}") == 2
    out = capsys.readouterr().out.splitlines()
    assert "1 skipped, .zip is not supported" in out[1]
    assert out[0].startswith("note: ")
    assert out[-1] == "1 fault"
    assert (
        run(
            "prepare", "--from=folder", f"--data_dir={tmp_path / 'from'}", f"--to={tmp_path / 'to'}"
        )
        == 0
    )
    assert "1 skipped, .zip is not supported" in caplog.text
    capsys.readouterr()
    assert run("check", "--dataset=tfrecord", f"--data_dir={tmp_path / 'to'}") == 2
    out = capsys.readouterr().out
    assert "manifest.json: train: when the dataset was prepared: " in out
    assert "1 skipped, .zip is not supported" in out


def test_check_and_prepare_print_a_file_name_with_newlines_in_one_line(
    tmp_path, capsys, monkeypatch
):
    make("folder", tmp_path / "from")
    forged = tmp_path / "from" / "train" / "n01" / "a\nno faults\n\x1b[2J.jpg"
    forged.write_bytes(support.jpeg(1)[:100])
    (forged.parent / "b\nno faults\n.zip").touch()
    # pytest has a handler for messages that the package logs; a command has none.
    monkeypatch.setattr(
        logging.Logger, "callHandlers", lambda log, record: logging.lastResort.handle(record)
    )
    check = "check", "--dataset=folder", f"--data_dir={tmp_path / 'from'}"
    assert run(*check) == 2
    target = f"--to={tmp_path / 'to'}"
    prepare = "prepare", "--from=folder", f"--data_dir={tmp_path / 'from'}", target
    assert run(*prepare, "--bad_records=skip") == 0
    assert run("check", "--dataset=tfrecord", f"--data_dir={tmp_path / 'to'}") == 2
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert printed.count(r"a\nno faults\n\x1b[2J.jpg") == 3
    assert printed.count(r"b\nno faults\n.zip") == 3
    assert "no faults" not in printed.splitlines()
    assert "\x1b" not in printed


def test_check_and_prepare_count_files_that_both_splits_skip_once(tmp_path, capsys, caplog):
    for name, (image, _) in zip(("a", "b"), support.tiny("train"), strict=False):
        (tmp_path / "from" / name).mkdir(parents=True)
        for number in range(4):
            (tmp_path / "from" / name / f"{number}.jpg").write_bytes(image)
    (tmp_path / "from" / "a" / "photos.zip").touch()
    flags = f"--data_dir={tmp_path / 'from'}", "--val_fraction=0.25"
    assert run("check", "--dataset=folder", *flags) == 2
    out = capsys.readouterr().out.splitlines()
    assert sum("photos.zip" in line for line in out) == 1
    assert out[-1] == "1 fault"
    assert run("prepare", "--from=folder", f"--to={tmp_path / 'to'}", *flags) == 0
    assert caplog.text.count("photos.zip") == 1
    manifest = json.loads((tmp_path / "to" / "manifest.json").read_text())
    assert [len(manifest["splits"][split]["notes"]) for split in datasets.SPLITS] == [1, 0]


def test_check_and_prepare_reject_splits_with_different_classes(tmp_path, capsys):
    for split, names in (("train", support.CLASSES), ("validation", support.CLASSES[::-1])):
        support.write_parquet(tmp_path / "from", split, support.tiny(split), names=names)
    for command in (
        ["check", "--dataset=parquet"],
        ["prepare", "--from=parquet", f"--to={tmp_path / 'to'}"],
    ):
        assert run(*command, f"--data_dir={tmp_path / 'from'}") == 2
        assert "training and validation have different classes" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


def test_prepare_rejects_a_target_inside_the_classes(tmp_path, capsys):
    support.write_folder(tmp_path / "set", "", support.tiny("train"))
    flags = (
        f"--data_dir={tmp_path / 'set'}",
        "--val_fraction=0.3",
        f"--to={tmp_path / 'set' / 'shards'}",
    )
    assert run("prepare", "--from=folder", *flags) == 2
    assert "where it would be a class" in capsys.readouterr().err


def test_check_names_classes_without_images(tmp_path, capsys):
    pictures = [support.jpeg(number, 8, 8) for number in range(20)]
    pairs = [(pictures[number % 20], number // 40) for number in range(800)]
    support.write_shards(tmp_path, "train", pairs, shards=20)
    support.write_shards(tmp_path, "validation", pairs[:5])
    (tmp_path / "labels.txt").write_text("\n".join(map(str, range(21))))
    words = ["check", "--dataset=tfrecord", f"--data_dir={tmp_path}"]
    assert run(*words, "--split=train") == 0
    assert (
        "note: 1 of 21 classes have no training image, the first is 20" in capsys.readouterr().out
    )
