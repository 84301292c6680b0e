"""Every recipe trains two epochs on digits on two ranks: its optimizer, schedule, augmentation,
batch and all-reduce.

On 96 of the digits with a small ResNet (AlexNet-BN if the recipe says so). Without --long only one
of each all-reduce.
"""

import json
import math

import pytest

from hybrid_imagenet import data, recipes
from hybrid_imagenet.data.sources import digits
from tests.recipes import programs
from tests.support import program

TRAIN, VALIDATION = 96, 24
ALWAYS = (
    "hybrid",
    "flash_exp4",
    "four_minutes_resnet",
)  # ring with warm-up, torus with a growing batch, both by size


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    images, labels = digits._load_digits()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            digits,
            "_load_digits",
            lambda: (images[: TRAIN + VALIDATION], labels[: TRAIN + VALIDATION]),
        )
        patch.setattr(digits, "_NUM_VALIDATION_IMAGES", VALIDATION)
        data.open_source("digits", str(folder))
    return folder


def names():
    return [pytest.param(n, marks=[] if n in ALWAYS else pytest.mark.slow) for n in recipes.names()]


@pytest.mark.parametrize("name", names())
def test_a_recipe_trains_two_epochs_on_two_ranks(pools, digits_folder, name):
    folder = digits_folder
    algorithm = recipes.load(name).overrides.get("allreduce", "ring")
    algorithm = (
        "ring" if algorithm == "size_switched" else algorithm
    )  # which sends large buckets by it on one host
    assert (
        pools[2].call(programs.train_recipe, name, str(folder), timeout=900)
        == [["", [algorithm]]] * 2
    )
    epochs = [r for r in program.records(folder / name) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2]
    assert all(math.isfinite(r["train_loss"]) and r["skipped_steps"] == 0 for r in epochs)
    validated = [r for r in epochs if "val_count" in r]
    every = recipes.load(name).overrides.get("eval_every_epochs", 1)
    assert [r["epoch"] for r in validated] == ([2] if every > 2 else [1, 2])  # and at the end
    assert all(math.isfinite(r["val_loss"]) and r["val_count"] == VALIDATION for r in validated)
    images = [r["per_gpu_batch"] * r["accumulation"] for r in epochs]  # of a rank's update
    assert [r["global_batch"] for r in epochs] == [2 * number for number in images]
    batches = {"flash_exp3": [27, 27], "flash_exp4": [8, 20]}.get(name, [8, 8])
    assert images == batches
    assert [r["accumulation"] > 1 for r in epochs] == [False, name == "flash_exp4"]
    assert [r["phase"] for r in epochs] == ([0, 1] if name in programs.WARMUPS else [1, 1])
    summary = json.loads((folder / name / "summary.json").read_text())
    assert (summary["epochs"], summary["world_size"], summary["images_per_epoch"]) == (2, 2, TRAIN)


def test_each_all_reduce_of_a_recipe_is_tried_without_long():
    used = {recipes.load(name).overrides.get("allreduce", "ring") for name in recipes.names()}
    assert {recipes.load(name).overrides.get("allreduce", "ring") for name in ALWAYS} == used
