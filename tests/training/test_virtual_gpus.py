"""V virtual GPUs on a rank train like V ranks: all layouts of four GPUs give equal weights."""

import numpy as np
import pytest

from hybrid_imagenet import config, print_config, run_plan
from hybrid_imagenet.comm import SingleProcess
from hybrid_imagenet.data import datasets, pipeline
from hybrid_imagenet.errors import UserError
from hybrid_imagenet.order.sampling import Cursor, SampleOrder
from tests.data import test_idx
from tests.support import program
from tests.training import virtual_gpus_job as virtual


@pytest.fixture
def data(tmp_path):
    """Writes 96 images of ten classes."""
    generator = np.random.default_rng(3)
    labels = np.arange(96, dtype=np.uint8) % 10
    images = np.clip(
        20 * labels[:, None, None] + generator.integers(0, 60, (96, 8, 8)), 0, 255
    ).astype(np.uint8)
    return test_idx.write(tmp_path / "data", train=images, labels=labels)


def largest_difference(a, b):
    """Returns the largest difference of any array, relative to its largest value."""
    assert set(a) == set(b)
    return max(
        np.abs(a[key] - b[key]).max() / (np.abs(b[key]).max() + 1e-3) for key in a if a[key].size
    )


def compare(pools, data, tmp_path, methods, layouts=("4x1", "2x2", "1x4")):
    """Trains four GPUs with each method in all layouts (ranks x virtual GPUs per rank).

    Layouts run on the ranks of the pools and in this process. The first one is the reference.
    """
    for layout in layouts:
        ranks = int(layout[0])
        if ranks > 1:
            pools[ranks].call(virtual.job, data, str(tmp_path), list(methods.values()), timeout=900)
    for number, (name, flags) in enumerate(methods.items()):
        weights = {
            layout: dict(np.load(tmp_path / f"{number}-{layout}.npz"))
            for layout in layouts
            if layout != "1x4"
        }
        weights["1x4"] = virtual.final(data, tmp_path / f"{number}-1x4", SingleProcess(), flags, 4)
        reference = layouts[0]
        assert weights[reference]["steps"] >= 20
        for layout in layouts[1:]:
            difference = largest_difference(weights[layout], weights[reference])
            assert difference < 1e-4, (name, layout)
        epochs, reference_epochs = (
            [
                record
                for record in program.records(tmp_path / run / "run")
                if record["kind"] == "epoch"
            ]
            for run in (f"{number}-1x4", f"{number}-{reference}-0")
        )
        assert {record["val_split"] for record in epochs if "val_top1" in record} == {"tuning"}
        for ours, real in zip(epochs, reference_epochs, strict=True):
            for key in ("learning_rate", "momentum", "global_batch", "per_gpu_batch", "val_count"):
                assert ours.get(key) == real.get(key), key
            assert ours["train_loss"] == pytest.approx(real["train_loss"], rel=1e-3)


@pytest.mark.slow
def test_four_virtual_gpus_on_one_rank_equal_two_ranks_of_two(pools, data, tmp_path):
    """Normalizes over all four GPUs, so over the virtual GPUs of a rank and over ranks."""
    compare(pools, data, tmp_path, virtual.SHORT, layouts=("2x2", "1x4"))


@pytest.mark.slow
def test_four_gpus_in_all_layouts_give_equal_weights_with_every_method(pools, data, tmp_path):
    compare(pools, data, tmp_path, virtual.LONG | virtual.METHODS)
    (tmp_path / "engine").mkdir()
    methods = list(virtual.METHODS.values())
    pools["tensorflow"].call(
        virtual.job, data, str(tmp_path / "engine"), methods, "tensorflow", timeout=900
    )
    groups = dict(np.load(tmp_path / f"{len(virtual.LONG)}-4x1.npz"))
    assert largest_difference(dict(np.load(tmp_path / "engine" / "0-4x1.npz")), groups) < 1e-4
    flags = (*virtual.HYBRID, "--eval_batch=16")
    # Each of two GPUs has the batch of two. --lr is per GPU, so it doubles.
    merged = virtual.final(
        data, tmp_path / "merged", SingleProcess(), flags, 2, "--per_gpu_batch=8", "--lr=0.2"
    )
    assert largest_difference(merged, groups) < 1e-4
    alone = virtual.final(data, tmp_path / "alone", SingleProcess(), flags, 4)
    assert largest_difference(alone, groups) > 1e-2


def test_training_batches_of_virtual_gpus_equal_those_of_real_gpus(data):
    source = datasets.open_source("fashion_mnist", data)
    order = SampleOrder(96, seed=5)

    def elements(rank, size, parts):
        settings = {"epochs": 1, "image_size": 8, "augmentation": "shift", "virtual_gpus": parts}
        return list(
            pipeline.training_batches(source, order, Cursor(0, 7), (3, 2), rank, size, **settings)
        )

    real = [elements(rank, 4, 1) for rank in range(4)]
    for size, parts in ((2, 2), (1, 4)):
        for rank in range(size):
            batches = elements(rank, size, parts)
            assert len(batches) == len(real[0])
            for number, element in enumerate(batches):
                expected = [real[rank * parts + part][number]["seed"] for part in range(parts)]
                np.testing.assert_array_equal(element["seed"], np.concatenate(expected))


@pytest.mark.parametrize(
    ("flags", "ranks", "expected"),
    [
        (["--bn_group=2"], 4, (1, 2)),
        (["--sync_batch_norm"], 4, (1, 4)),
        (["--virtual_gpus=8", "--bn_group=2"], 2, (4, 1)),
        (["--virtual_gpus=2", "--bn_group=4"], 6, (1, 2)),
    ],
)
def test_batch_norm_groups_are_parts_of_a_rank_or_several_ranks(flags, ranks, expected):
    resolved = config.resolve(flags, ranks)
    network = run_plan.make(resolved).network
    assert (network.parts_per_rank, network.ranks_per_group) == expected
    neighbors = expected[1]
    assert run_plan.make(resolved).communication.neighbors == (
        neighbors if neighbors < ranks else 1
    )


def test_bn_group_that_does_not_divide_the_gpus_is_rejected():
    flags = ["--bn_group=4", "--virtual_gpus=2"]
    resolved = config.resolve(flags, 3)
    message = r"--bn_group=4 does not divide 6 GPUs\. Set it to a divisor of 6\."
    with pytest.raises(UserError, match=message):
        run_plan.make(resolved)
    with pytest.raises(UserError, match=message):
        print_config.describe(resolved, 60000)
    assert run_plan.make(config.resolve(flags, 4)).communication.neighbors == 2


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [(["--sync_batch_norm"], 2), (["--bn_group=2"], 4), (["--bn_group=4", "--virtual_gpus=2"], 2)],
)
def test_jit_compile_with_normalization_over_ranks_is_rejected(flags, ranks):
    message = rf"^{flags[0]} cannot be combined with --jit_compile, .*Omit one of them\.$"
    resolved = config.resolve(["--jit_compile", *flags], ranks)
    with pytest.raises(UserError, match=message):
        run_plan.make(resolved)
    with pytest.raises(UserError, match=message):
        print_config.describe(resolved, 60000)
    run_plan.make(config.resolve(flags, ranks))
