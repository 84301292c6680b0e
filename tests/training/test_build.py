"""The parts of a training built from flags: sources, preprocessing, class weights, order."""

import numpy as np
import pytest
import tensorflow as tf

from hybrid_imagenet import config, run_plan
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data import device
from hybrid_imagenet.data.image_mixing import ImageMixer
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order import sampling
from hybrid_imagenet.training import build
from tests.data import support, test_idx


def open_sources(resolved):
    return build.sources(resolved.data, resolved.run.seed)


def plan(*flags, precision="float32"):
    return run_plan.make(config.resolve(flags), precision)


def sources(tmp_path, *flags):
    resolved = config.resolve(
        ["--dataset=fashion_mnist", f"--data_dir={test_idx.write(tmp_path)}", *flags]
    )
    return resolved, open_sources(resolved)


def images(source):
    """Returns each image as the sum of its pixels, which is unique in this fixture."""
    return {
        int(p.astype(np.int64).sum()) for p in source.read_pixels(np.arange(source.num_examples))[0]
    }


def test_sources_with_tuning_split_are_disjoint_parts_of_the_training_images(tmp_path):
    resolved, (train, tuning) = sources(tmp_path, "--tuning_split=3")
    assert resolved.data.validated_split == "tuning"
    assert (train.num_examples, tuning.num_examples) == (9, 3)
    assert not images(train) & images(tuning)
    assert images(sources(tmp_path, "--tuning_split=0.25")[1][1]) == images(tuning)
    draws = set()
    for seed in range(1, 6):
        _, (train, tuning) = sources(tmp_path, "--tuning_split=3", f"--seed={seed}")
        assert not images(train) & images(tuning)
        draws.add(frozenset(images(tuning)))
    assert len(draws) > 1


def test_sources_with_eval_split_validation_keep_the_training_images(tmp_path):
    resolved, (train, validation) = sources(tmp_path, "--tuning_split=3", "--eval_split=validation")
    assert resolved.data.validated_split == "validation"
    assert (train.num_examples, validation.num_examples) == (9, 4)
    assert images(train) == images(sources(tmp_path, "--tuning_split=3")[1][0])
    assert sources(tmp_path)[0].data.validated_split == "validation"


@pytest.mark.parametrize("augmentation", ["alexnet", "shift"])
def test_preprocess_with_mixing_mixes_the_augmented_images(augmentation):
    flags = ["--mixup_alpha=0.3", "--cutmix_alpha=1", f"--augmentation={augmentation}"]
    flags.append("--virtual_gpus=2")
    random = np.random.default_rng(0)
    pixels = tf.constant(random.integers(0, 256, (8, 16, 16, 3)), tf.uint8)
    examples = np.arange(8)
    seeds = tf.constant(sampling.seeds(0, 0 * examples, examples))
    plain = device.augment(pixels, seeds, augmentation)
    expected = ImageMixer(0.3, 1.0, parts=2).images(plain, seeds)
    batch = {"image": pixels, "seed": seeds}
    np.testing.assert_allclose(build.train_preprocess(plan(*flags))(batch), expected, rtol=1e-6)
    in_float16 = plan(*flags, precision="mixed_float16")
    assert build.train_preprocess(in_float16)(batch).dtype == tf.float16
    assert build.image_mixer(plan()) is None


class SecondRank(SingleProcess):
    """Rank 1, which receives the counts of rank 0: images of two classes."""

    def __init__(self):
        super().__init__()
        self.rank = 1

    def broadcast_object(self, obj):
        assert obj == []
        return [1, 3]


def test_class_weights_are_computed_from_the_counts_of_rank_0(tmp_path):
    resolved, (train, _) = sources(tmp_path, "--class_weights=balanced")
    planned = run_plan.make(resolved)
    weights = build.class_weights(planned, train, SecondRank())
    np.testing.assert_allclose(weights, [2.0, 2 / 3], rtol=1e-6)
    weights_of_rank_0 = build.class_weights(planned, train, SingleProcess())
    assert weights_of_rank_0.shape == (10,)
    assert build.class_weights(plan(), train, SecondRank()) is None


def test_sources_with_different_classes_are_rejected(tmp_path):
    for split, names in (("train", support.CLASSES), ("validation", support.CLASSES[::-1])):
        support.write_parquet(tmp_path, split, support.tiny(split), names=names)
    with pytest.raises(
        UserError,
        match=r"training and validation have different classes .class 0 is 'n01' and 'n03'",
    ):
        open_sources(config.resolve(["--dataset=parquet", f"--data_dir={tmp_path}"]))
    support.write_parquet(tmp_path, "validation", support.tiny("validation"))
    with pytest.raises(UserError, match="--num_classes=5 is wrong, because parquet has 3 classes"):
        open_sources(
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
def test_sources_of_an_invalid_split_are_rejected(tmp_path, flags, words):
    with pytest.raises(UserError, match=words):
        sources(tmp_path, *flags)


def test_sample_order_with_shuffle_window_mixes_that_many_shards(tiny_data, tmp_path):
    flags = ["--dataset=tfrecord", f"--data_dir={tiny_data}", "--num_classes=4", "--seed=3"]
    source = open_sources(config.resolve(flags))[0]
    for window, shards in ((0, 2), (1, 1), (2, 2)):
        order = build.sample_order(plan(*flags, f"--shuffle_window={window}"), source)
        assert sorted(order.at(0, np.arange(64)).tolist()) == list(range(64))
        # Each shard has 32 images.
        assert len(np.unique(order.at(0, np.arange(32)) // 32)) == shards
    assert len(np.unique(build.sample_order(plan(*flags), source).at(0, np.arange(32)) // 32)) == 2


def test_shuffle_window_without_shards_is_rejected():
    resolved = config.resolve(["--dataset=synthetic", "--num_examples=8", "--shuffle_window=2"])
    with pytest.raises(
        UserError, match=r"--shuffle_window=2 needs a dataset in shards .*, not synthetic"
    ):
        build.check_shuffle_window(resolved.data, open_sources(resolved)[0])


@pytest.mark.parametrize(
    ("flags", "precision", "ranks", "wire", "scale"),
    [
        ([], "mixed_float16", 1, "float16", 2.0**15),
        ([], "mixed_float16", 2, "float16", 2.0**15),
        ([], "float32", 1, "float16", None),
        ([], "float32", 2, "float16", 2.0**12),
        (["--compression=none"], "mixed_float16", 2, "float32", 2.0**15),
        (["--compression=none"], "float32", 2, "float32", None),
        (["--loss_scale=1"], "float32", 2, "float16", None),
    ],
)
def test_optimizer_of_the_program_sends_and_scales_by_flags_precision_and_ranks(
    flags, precision, ranks, wire, scale
):
    small = ["--model=resnet8", "--model_width=4", "--image_size=16"]
    resolved = config.resolve([*small, *flags], ranks)
    planned = run_plan.make(resolved, precision)
    communicator = SingleProcess()
    communicator.size = ranks
    network = build.model(planned, 10, communicator)
    optimizer = build.optimizer(planned, network, communicator)
    optimizer.build(network.trainable_variables)
    assert optimizer.reducer.wire_dtype == wire
    assert optimizer.loss_scale.dynamic is (scale is not None)
    assert optimizer.loss_scale.scale.numpy() == (scale or 1.0)
