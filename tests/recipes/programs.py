"""A program that the tests of recipes run on each rank."""

import pathlib
from unittest import mock

from hybrid_imagenet import comm, config, train

# Recipes that train with AdaBound during the warmup. Here it lasts one of the two epochs.
RECIPES_WITH_ADABOUND_WARMUP = ("hybrid", "hybrid_p40", "lu_as_printed")


def train_recipe(name: str, folder: str) -> list:
    """Trains two epochs of a recipe.

    Returns the outcome and the algorithms of its all-reduces.
    """
    resolved = config.resolve(
        [
            f"--recipe={name}",
            "--dataset=digits",
            f"--data_dir={folder}",
            f"--run_dir={pathlib.Path(folder) / name}",
            "--epochs=2",
            f"--per_gpu_batch={27 if name == 'flash_exp3' else 8}",
            "--precision=float32",
            "--progress=none",
            "--checkpoint_every_epochs=2",
            "--log_every_steps=3",
            *_small_model(name),
            *_short_schedules(name),
        ],
        comm.read_placement().size,
    )
    communicator = comm.start(
        comm.CommunicationSettings(allreduce=resolved.communication.allreduce)
    )
    from hybrid_imagenet.optimizers import distributed, reducer

    reducers = []

    def make_reducer(communicator, wire_dtype):
        reducers.append(reducer.GradientReducer(communicator, wire_dtype))
        return reducers[-1]

    with mock.patch.object(distributed, "GradientReducer", make_reducer):
        outcome = train.run(resolved, communicator)
    algorithms = {bucket["algorithm"] for bucket in reducers[0].statistics()["buckets"]}
    return [outcome, sorted(algorithms)]


def _small_model(name: str) -> list[str]:
    if name == "four_minutes_alexnet":
        return ["--image_size=63"]
    flags = ["--model=resnet8", "--image_size=16"]
    if name != "four_minutes_resnet":
        # That recipe needs the full width, for buckets that are large enough for the ring.
        flags.append("--model_width=4")
    return flags


def _short_schedules(name: str) -> list[str]:
    """Returns flags that fit the schedules of a recipe into two epochs."""
    if name in RECIPES_WITH_ADABOUND_WARMUP:
        return ["--warmup_epochs=1"]
    if name == "short":
        return ["--image_size_schedule=0:12,1:16", "--eval_image_size=24", "--ema_every=2"]
    if name == "flash_exp4":
        return ["--batch_schedule=0:*1,1:*2.5"]
    return []
