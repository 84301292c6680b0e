"""Every recipe trains two epochs on two ranks.

The data are 96 of the digits. The network is a small ResNet, or AlexNet-BN if the recipe has it.
Without --long, only one recipe of each all-reduce algorithm is trained.
"""

import json
import math

import pytest

from hybrid_imagenet import recipes
from hybrid_imagenet.data import datasets
from hybrid_imagenet.data.sources import digits
from tests.recipes import programs
from tests.support import program

TRAIN = 96
VALIDATION = 24
# These cover the ring with AdaBound's warmup, the torus with a growing batch, and the all-reduce by
# size.
ALWAYS = ("hybrid", "flash_exp4", "four_minutes_resnet")


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
        datasets.open_source("digits", str(folder))
    return folder


def recipe_parameters():
    return [
        pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow)
        for name in recipes.names()
    ]


def all_reduce_of(name):
    return recipes.load(name).overrides.get("allreduce", "ring")


@pytest.mark.parametrize("name", recipe_parameters())
def test_recipe_trains_two_epochs_on_two_ranks(pools, digits_folder, name):
    folder = digits_folder
    algorithm = all_reduce_of(name)
    if algorithm == "size_switched":
        # On one host it sends large buckets through the ring.
        algorithm = "ring"
    results = pools[2].call(programs.train_recipe, name, str(folder), timeout=900)
    assert results == [["", [algorithm]]] * 2
    epochs = [r for r in program.records(folder / name) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2]
    assert [r["skipped_steps"] for r in epochs] == [0, 0]
    assert all(math.isfinite(r["train_loss"]) and r["skipped_steps"] == 0 for r in epochs)
    validated = [r for r in epochs if "val_count" in r]
    # Every run validates at its end, and the others also after the first epoch.
    validates_rarely = recipes.load(name).overrides.get("eval_every_epochs", 1) > 2
    assert [r["epoch"] for r in validated] == ([2] if validates_rarely else [1, 2])
    assert all(math.isfinite(r["val_loss"]) and r["val_count"] == VALIDATION for r in validated)
    images_per_rank = [r["per_gpu_batch"] * r["accumulation"] for r in epochs]
    assert [r["global_batch"] for r in epochs] == [2 * images for images in images_per_rank]
    assert images_per_rank == {"flash_exp3": [27, 27], "flash_exp4": [8, 20]}.get(name, [8, 8])
    assert [r["accumulation"] > 1 for r in epochs] == [False, name == "flash_exp4"]
    has_adabound = name in programs.RECIPES_WITH_ADABOUND_WARMUP
    assert [r["phase"] for r in epochs] == ([0, 1] if has_adabound else [1, 1])
    summary = json.loads((folder / name / "summary.json").read_text())
    assert (summary["epochs"], summary["world_size"], summary["images_per_epoch"]) == (2, 2, TRAIN)


def test_recipes_trained_without_long_cover_every_all_reduce():
    used = {all_reduce_of(name) for name in recipes.names()}
    assert {all_reduce_of(name) for name in ALWAYS} == used
