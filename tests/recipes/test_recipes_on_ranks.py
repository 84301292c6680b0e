"""Every recipe trains two epochs on digits on two ranks: its optimizer, schedule, augmentation, batch and all-reduce.

One start of the ranks trains all of them, on 96 of the digits with a small ResNet (AlexNet-BN if the recipe says so).
"""

import json
import math

import pytest

from hybrid_imagenet import recipes
from hybrid_imagenet.data.sources import digits
from tests.ranks import results
from tests.support import program

TRAIN, VALIDATION = 96, 24
WARMUPS = ("hybrid", "hybrid_p40")  # one epoch of AdaBound, one of SGD
CODE = """
import pathlib, sys
from hybrid_imagenet import comm, config, recipes
c = comm.start(comm.Settings(), others=[comm.Settings(allreduce=name) for name in ("torus", "hybrid")])
import keras
from hybrid_imagenet import train
from hybrid_imagenet.comm.gradients import GradientReducer
from hybrid_imagenet.comm.selection import Selector
folder, seen = pathlib.Path(FOLDER), {}
for name in recipes.names():
    model = ["--image_size=63"] if name == "four_minutes_alexnet" else ["--model=resnet10", "--image_size=32"]
    resolved = config.resolve([
        f"--recipe={name}", "--dataset=digits", f"--data_dir={folder}", f"--run_dir={folder / name}", "--epochs=2",
        f"--per_gpu_batch={27 if name == 'flash_exp3' else 8}", "--precision=float32", "--progress=none",
        "--checkpoint_every_epochs=2", "--log_every_steps=3", *model,
        *(["--warmup_epochs=1"] if name in WARMUPS else []),
        *(["--batch_schedule=0:*1,1:*5/2"] if name == "flash_exp4" else []),
    ])
    # A process starts communication once; its reductions are made anew for each recipe's settings.
    settings = comm.Settings(allreduce=resolved.allreduce, compression=resolved.compression)
    c._reducer = GradientReducer(c, settings, Selector(c, settings, c.sets))
    seen[name] = [train.run(resolved, c), sorted({b["algorithm"] for b in c.statistics()["buckets"]})]
    keras.backend.clear_session()
report(seen)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recipes")
    images, labels = digits._load()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "_load", lambda: (images[: TRAIN + VALIDATION], labels[: TRAIN + VALIDATION]))
        patch.setattr(digits, "_HELD_OUT", VALIDATION)
        digits.open_digits(folder, "train")
    ranks = results(2, f"FOLDER, WARMUPS = {str(folder)!r}, {WARMUPS}\n{CODE}", timeout=1500)
    return folder, ranks


@pytest.mark.parametrize("name", recipes.names())
def test_a_recipe_trains_two_epochs_on_two_ranks(trained, name):
    folder, ranks = trained
    overrides = recipes.load(name).overrides
    assert [outcome for outcome, _ in (rank[name] for rank in ranks)] == ["", ""]
    assert [algorithms for _, algorithms in (rank[name] for rank in ranks)] == [[_algorithm(overrides)]] * 2
    epochs = [r for r in program.records(folder / name) if r["kind"] == "epoch"]
    assert [r["epoch"] for r in epochs] == [1, 2]
    assert all(math.isfinite(r["train_loss"]) and math.isfinite(r["val_loss"]) for r in epochs)
    assert all(r["val_count"] == VALIDATION and r["skipped_steps"] == 0 for r in epochs)
    assert all(r["global_batch"] == 2 * r["per_gpu_batch"] for r in epochs)
    batches = {"flash_exp3": [27, 27], "flash_exp4": [8, 20]}.get(name, [8, 8])
    assert [r["per_gpu_batch"] for r in epochs] == batches
    assert [r["phase"] for r in epochs] == ([0, 1] if name in WARMUPS else [1, 1])
    summary = json.loads((folder / name / "summary.json").read_text())
    assert (summary["epochs"], summary["world_size"], summary["images_per_epoch"]) == (2, 2, TRAIN)


def _algorithm(overrides):
    """What two ranks of one host make of a recipe's all-reduce: hybrid sends large buckets by ring."""
    name = overrides.get("allreduce", "ring")
    return "ring" if name == "hybrid" else name
