"""Tests the derived dataset: its images, its labels, and equal bytes on every machine."""

import hashlib
import subprocess
import sys

import numpy as np
import pytest

from hybrid_imagenet.commands import command_line
from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.sources.idx import FASHION_MNIST
from hybrid_imagenet.errors import UserError
from studies import garment_pairs
from studies.garment_pairs import GARMENT_SIDE, SIDE

GARMENTS_PER_CLASS = 20
LABELS = np.repeat(np.arange(10, dtype=np.uint8), GARMENTS_PER_CLASS)
# Each garment has its own gray level, and test garments are brighter than training garments. So an
# image of a pair shows which garments it has, and from which split they come.
TRAINING_GARMENTS = np.broadcast_to((160 + LABELS)[:, None, None], (len(LABELS), 28, 28))
TEST_GARMENTS = np.broadcast_to((200 + LABELS)[:, None, None], (len(LABELS), 28, 28))


def write_source(directory, training=TRAINING_GARMENTS, test=TEST_GARMENTS, labels=LABELS):
    """Writes the four IDX files that Fashion-MNIST consists of; returns their directory."""
    directory.mkdir(exist_ok=True)
    for prefix, images in (("train", training), ("t10k", test)):
        (directory / f"{prefix}-images-idx3-ubyte").write_bytes(
            garment_pairs.encode_idx(images.astype(np.uint8))
        )
        (directory / f"{prefix}-labels-idx1-ubyte").write_bytes(garment_pairs.encode_idx(labels))
    return directory


def run(*words):
    return command_line.run_command(garment_pairs.main, [str(word) for word in words])


@pytest.fixture
def source(tmp_path):
    return write_source(tmp_path / "source")


@pytest.fixture
def pairs(source, tmp_path):
    """Derives a dataset with two images of each pair in both splits; returns its directory."""
    assert run(f"--data_dir={source}", f"--to={tmp_path / 'pairs'}", "--training_images=200") == 0
    return tmp_path / "pairs"


def test_garment_pairs_are_read_as_100_named_classes(pairs):
    for split in ("train", "validation"):
        source = datasets.open_source("idx", str(pairs), split)
        assert (source.num_examples, source.num_classes, source.side) == (200, 100, 32)
        assert source.notes == ()
        pixels, _ = source.read_pixels(np.array([0]))
        assert (pixels.shape, pixels.dtype) == ((1, 32, 32, 3), np.uint8)
    assert source.class_names[0] == "T-shirt/top above T-shirt/top"
    assert source.class_names[38] == f"{FASHION_MNIST[3]} above {FASHION_MNIST[8]}"


@pytest.mark.parametrize(("split", "gray"), [("train", 160), ("validation", 200)])
def test_garment_pairs_have_the_garments_of_their_label_and_split(pairs, split, gray):
    source = datasets.open_source("idx", str(pairs), split)
    for picture, label in zip(source.pixels, source.labels, strict=True):
        # The lower garment hides part of the upper one, but not its first rows.
        assert int(picture[: SIDE - GARMENT_SIDE].max()) == gray + label // 10
        assert int(picture[GARMENT_SIDE:].max()) == gray + label % 10


def test_garment_pairs_have_equal_counts_in_random_order(pairs):
    for split in ("train", "validation"):
        labels = datasets.open_source("idx", str(pairs), split).labels
        assert np.bincount(labels).tolist() == [2] * 100
        assert not np.array_equal(labels, np.sort(labels))


def test_choose_pairs_uses_each_garment_at_most_once_above_and_once_below():
    generator = np.random.Generator(np.random.PCG64(3))
    labels = generator.permutation(LABELS)
    upper, lower = garment_pairs.choose_pairs(labels, 2, generator)
    for numbers in (upper, lower):
        assert sorted(numbers) == list(range(len(labels)))
    expected = np.repeat(np.arange(100), 2)
    assert (10 * labels[upper] + labels[lower]).tolist() == expected.tolist()


def test_compose_places_garments_at_every_column_with_the_lower_one_in_front():
    generator = np.random.Generator(np.random.PCG64(4))
    pictures, labels = garment_pairs.compose(
        TRAINING_GARMENTS.astype(np.uint8), LABELS, 2, generator
    )
    lefts = set()
    for picture, label in zip(pictures, labels, strict=True):
        lower = picture[-1] == 160 + label % 10
        left = int(lower.argmax())
        assert lower.sum() == GARMENT_SIDE
        assert (
            picture[SIDE - GARMENT_SIDE :, left : left + GARMENT_SIDE] == 160 + label % 10
        ).all()
        assert picture[0].max() == 160 + label // 10
        lefts.add(left)
    assert lefts == set(range(SIDE - GARMENT_SIDE + 1))


def test_compose_fills_the_background_with_noise_around_a_level():
    nothing = np.zeros((len(LABELS), 28, 28), np.uint8)
    pictures, _ = garment_pairs.compose(nothing, LABELS, 2, np.random.Generator(np.random.PCG64(5)))
    spread = np.ptp(pictures.reshape(len(pictures), -1).astype(int), axis=1)
    assert spread.min() == spread.max() == garment_pairs.NOISE_LEVELS - 1
    lowest = pictures.min(axis=(1, 2))
    assert lowest.min() < 5
    assert lowest.max() in range(115, garment_pairs.FIELD_LEVELS)


def test_shrink_averages_the_area_that_a_pixel_covers():
    ramp = np.broadcast_to(np.arange(0, 252, 9, dtype=np.uint8), (1, 28, 28))
    small = garment_pairs.shrink(ramp)
    # Pixel k covers [28 / 18 k, 28 / 18 (k + 1)], which is at least one whole old pixel and parts
    # of its neighbors.
    values = np.arange(28) * 9.0
    for column in range(18):
        begin = 28 / 18 * column
        end = begin + 28 / 18
        shares = [max(0.0, min(end, old + 1) - max(begin, old)) for old in range(28)]
        assert abs(float(small[0, 5, column]) - np.dot(shares, values) / sum(shares)) <= 0.5
    assert (small == small[:, :1]).all()


def test_garment_pairs_for_tests_do_not_depend_on_the_number_of_training_images(
    source, pairs, tmp_path
):
    assert run(f"--data_dir={source}", f"--to={tmp_path / 'fewer'}", "--training_images=100") == 0
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        assert (tmp_path / "fewer" / name).read_bytes() == (pairs / name).read_bytes()


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """Writes a source whose garments are noise that is the same on every machine."""
    # NumPy guarantees the raw stream of a bit generator in all its versions.
    raw = np.random.MT19937(1).random_raw(2 * len(LABELS) * 28 * 28) % 256
    training, test = raw.reshape(2, len(LABELS), 28, 28)
    return write_source(tmp_path_factory.mktemp("noise"), training, test)


@pytest.mark.parametrize(
    ("seed", "training_images", "test_images"),
    [
        (
            0,
            "19183bb710a2faadc6ea270d98a2e5850520e778ca629c9539e12ee22967002f",
            "2a39ea21888512f82b4282723448d7e8f2ad48b20152cca7b7ae509b03ecd670",
        ),
        (
            1,
            "c3e98b2c5020b596be826ed77c7773190b54b5fe8e002fc78a074f8f20713963",
            "1b1d54a9e2939e4787c3e469acb59dcc741d72c3604b59005fbd527116a6bb3a",
        ),
    ],
)
def test_write_gives_the_recorded_bytes_for_a_seed(
    noise, tmp_path, seed, training_images, test_images
):
    digests = garment_pairs.write(noise, tmp_path / "pairs", seed, 200)
    assert digests["train-images-idx3-ubyte"] == training_images
    assert digests["t10k-images-idx3-ubyte"] == test_images


def test_garment_pairs_command_prints_the_digest_of_each_file(source, tmp_path, capsys):
    out = tmp_path / "pairs"
    assert run(f"--data_dir={source}", f"--to={out}", "--training_images=100") == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(list(out.iterdir())) == 5
    for line in lines:
        sha256, path = line.split("  ")
        assert hashlib.sha256((out / path.rpartition("/")[2]).read_bytes()).hexdigest() == sha256
    assert last.endswith(f"--data_dir={out}")


def test_garment_pairs_command_with_invalid_input_prints_one_line_and_writes_nothing(
    source, tmp_path, capsys
):
    empty = tmp_path / "empty"
    empty.mkdir()
    wide = write_source(tmp_path / "wide", training=np.zeros((200, 28, 32)))
    few = write_source(tmp_path / "few", labels=np.minimum(LABELS, 8).astype(np.uint8))
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").touch()
    to = tmp_path / "to"
    for words, message in [
        ((f"--data_dir={empty}", f"--to={to}"), "has no train-images-idx3-ubyte"),
        ((f"--data_dir={tmp_path / 'none'}", f"--to={to}"), "has no train-images-idx3-ubyte"),
        ((f"--data_dir={wide}", f"--to={to}"), "has images of 28 x 32 pixels"),
        ((f"--data_dir={few}", f"--to={to}", "--training_images=100"), "is enough for 0 images"),
        ((f"--data_dir={source}", f"--to={to}"), "is enough for 200 images"),
        (
            (f"--data_dir={source}", f"--to={to}", "--training_images=150"),
            "150 is not a multiple of 100",
        ),
        (
            (f"--data_dir={source}", f"--to={full}", "--training_images=100"),
            "is not an empty directory",
        ),
        (
            (f"--data_dir={source}", f"--to={source}", "--training_images=100"),
            "is not an empty directory",
        ),
        ((f"--data_dir={source}", "--to=https://host/x", "--training_images=100"), "--to="),
        (
            (f"--data_dir={source}", f"--to={full / 'mine' / 'below'}", "--training_images=100"),
            "mine",
        ),
    ]:
        before = sorted(tmp_path.rglob("*"))
        assert run(*words) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert message in error
        assert sorted(tmp_path.rglob("*")) == before


def test_write_that_fails_leaves_no_directory(source, tmp_path, monkeypatch):
    def fail(self, content):
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr("pathlib.Path.write_bytes", fail)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="No space left on device"):
        garment_pairs.main(
            [f"--data_dir={source}", f"--to={tmp_path / 'pairs'}", "--training_images=100"]
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_garment_pairs_as_a_program_exits_with_2_without_loading_tensorflow(tmp_path):
    code = (
        "import runpy, sys\n"
        f"sys.argv = ['garment_pairs', '--data_dir={tmp_path}', '--to={tmp_path / 'to'}']\n"
        "try:\n    runpy.run_module('studies.garment_pairs', run_name='__main__')\n"
        "finally:\n    print('tensorflow' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == "False\n"
    assert result.stderr.count("\n") == 1
