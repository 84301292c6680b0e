"""What is trained on and what is validated."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import config
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.config import derived
from hybrid_imagenet.data import device
from hybrid_imagenet.data.image_mixing import ImageMixer
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import sampling
from hybrid_imagenet.training import build
from tests.data import support, test_idx


def sources(tmp_path, *flags):
    resolved = config.resolve(
        ["--dataset=fashion_mnist", f"--data_dir={test_idx.write(tmp_path)}", *flags]
    )
    return resolved, build.sources(resolved)


def images(source):
    """Each image as one number: the fixture's pixels are all different."""
    return {
        int(p.astype(np.int64).sum()) for p in source.read_pixels(np.arange(source.num_examples))[0]
    }


def test_tuning_never_sees_the_validation_images(tmp_path):
    resolved, (train, held) = sources(tmp_path, "--tuning_split=3")
    assert derived.validated_split(resolved.data) == "tuning"
    assert (train.num_examples, held.num_examples) == (9, 3)
    assert not images(train) & images(held)
    assert images(sources(tmp_path, "--tuning_split=0.25")[1][1]) == images(held)
    drawn = set()
    for seed in range(1, 6):
        _, (train, held) = sources(tmp_path, "--tuning_split=3", f"--seed={seed}")
        assert not images(train) & images(held)
        drawn.add(frozenset(images(held)))
    assert len(drawn) > 1


def test_the_report_validates_the_validation_images_with_the_same_training(tmp_path):
    resolved, (train, validation) = sources(tmp_path, "--tuning_split=3", "--eval_split=validation")
    assert derived.validated_split(resolved.data) == "validation"
    assert (train.num_examples, validation.num_examples) == (9, 4)
    assert images(train) == images(sources(tmp_path, "--tuning_split=3")[1][0])
    assert derived.validated_split(sources(tmp_path)[0].data) == "validation"


@pytest.mark.parametrize("augmentation", ["alexnet", "shift"])
def test_preprocess_with_mixing_mixes_the_augmented_images(augmentation):
    flags = ["--mixup_alpha=0.3", "--cutmix_alpha=1", f"--augmentation={augmentation}"]
    resolved = config.resolve([*flags, "--virtual_gpus=2"])
    random = np.random.default_rng(0)
    pixels = tf.constant(random.integers(0, 256, (8, 16, 16, 3)), tf.uint8)
    examples = np.arange(8)
    seeds = tf.constant(sampling.seeds(0, 0 * examples, examples))
    plain = device.augment(pixels, seeds, augmentation)
    expected = ImageMixer(0.3, 1.0, parts=2).images(plain, seeds)
    batch = {"image": pixels, "seed": seeds}
    np.testing.assert_allclose(
        build.train_preprocess(resolved, "float32")(batch), expected, rtol=1e-6
    )
    assert build.train_preprocess(resolved, "float16")(batch).dtype == tf.float16
    assert build.image_mixer(config.resolve([])) is None


class SecondRank(SingleProcess):
    """A rank that is told what rank 0 has counted, images of two classes."""

    def __init__(self):
        super().__init__()
        self.rank = 1

    def broadcast_object(self, obj):
        assert obj == []
        return [1, 3]


def test_class_weights_on_other_ranks_are_those_of_rank_0(tmp_path):
    resolved, (train, _) = sources(tmp_path, "--class_weights=balanced")
    weights = build.class_weights(resolved, train, SecondRank())
    np.testing.assert_allclose(weights, [2.0, 2 / 3], rtol=1e-6)
    own = build.class_weights(resolved, train, SingleProcess())
    assert own.shape == (10,)
    assert build.class_weights(config.resolve([]), train, SecondRank()) is None


def test_training_and_validation_must_have_the_same_classes(tmp_path):
    for split, names in (("train", support.CLASSES), ("validation", support.CLASSES[::-1])):
        support.write_parquet(tmp_path, split, support.tiny(split), names=names)
    with pytest.raises(
        UserError,
        match=r"training and validation have different classes .class 0 is 'n01' and 'n03'",
    ):
        build.sources(config.resolve(["--dataset=parquet", f"--data_dir={tmp_path}"]))
    support.write_parquet(tmp_path, "validation", support.tiny("validation"))
    with pytest.raises(UserError, match="--num_classes=5 is wrong, because parquet has 3 classes"):
        build.sources(
            config.resolve(["--dataset=parquet", f"--data_dir={tmp_path}", "--num_classes=5"])
        )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tuning_split=12"], "--tuning_split=12: 12 of 12 training images"),
        (["--tuning_split=1.5"], "--tuning_split=1.5 is invalid. Set a whole number"),
        (["--eval_split=validation"], "--eval_split=validation needs --tuning_split"),
    ],
)
def test_splits_that_cannot_be_made(tmp_path, flags, words):
    with pytest.raises(UserError, match=words):
        sources(tmp_path, *flags)


def test_images_are_mixed_by_windows_of_shards_where_that_is_asked_for(tiny_data, tmp_path):
    flags = ["--dataset=tfrecord", f"--data_dir={tiny_data}", "--num_classes=4", "--seed=3"]
    source = build.sources(config.resolve(flags))[0]
    for window, shards in ((0, 2), (1, 1), (2, 2)):
        order = build.sample_order(config.resolve([*flags, f"--shuffle_window={window}"]), source)
        assert sorted(order.at(0, np.arange(64)).tolist()) == list(range(64))
        assert len(np.unique(order.at(0, np.arange(32)) // 32)) == shards  # of 32 images each
    assert (
        len(np.unique(build.sample_order(config.resolve(flags), source).at(0, np.arange(32)) // 32))
        == 2
    )


def test_a_window_goes_with_shards_only():
    asked = config.resolve(["--dataset=synthetic", "--num_examples=8", "--shuffle_window=2"])
    with pytest.raises(
        UserError, match=r"--shuffle_window=2 needs a dataset in shards .*, not synthetic"
    ):
        build.check_shuffle_window(asked.data, build.sources(asked)[0])
